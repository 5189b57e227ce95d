"""Spark jobs over halfway's topics: audit, ledger, sweep and report.

They read the topics (or an archive of them in Parquet), never the coordinator's memory, so they show independently
whether every transaction ended as its producer intended.
"""
