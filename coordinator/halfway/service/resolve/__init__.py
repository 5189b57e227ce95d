"""Ends, parks and resumes: claims an id, writes through the lane, applies the write. May import query and shards."""
