"""Ownership of shards: membership, acquisition, fencing, release. May import every sibling folder."""
