"""Prepare: checks the rules, chooses the shard, stores the half message. May import query and shards."""
