"""Check-back: the scan of half against op, and pushed and fetched checks. May import resolve, query and shards."""
