"""Prepare: the rules, the shard, the half message. May import query and shards."""
