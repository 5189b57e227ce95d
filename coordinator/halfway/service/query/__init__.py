"""Transactions found by id, shown and listed; nothing here changes one. May import shards."""
