"""Check-back: the scan of half against op, and the checks sent or fetched. May import resolve, query and shards."""
