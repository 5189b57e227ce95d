"""Spark jobs over halfway's topics: audit, ledger, sweep and report.

They read the topics themselves (or an archive of them in Parquet), never the coordinator's memory, so they can tell
whether every transaction ended the way its producer meant.
"""
