"""Who owns a shard: membership, acquisition, fencing, release. May import every neighbour."""
