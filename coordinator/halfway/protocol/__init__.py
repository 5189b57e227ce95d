"""Transactions, outcomes, check policy and shard state: pure code without I/O or a clock."""
