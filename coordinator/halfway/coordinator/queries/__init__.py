"""Queries: get, list and history of transactions. They change nothing. May import shards."""
