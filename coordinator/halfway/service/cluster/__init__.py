"""Several instances: calls forwarded to a shard's owner, or sent to all. May import every neighbour."""
