"""Calls that go to a shard's owner or to all instances. May import every neighbouring folder."""
