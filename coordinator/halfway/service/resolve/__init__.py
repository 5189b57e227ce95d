"""Ends, parks and resumes: claim an id, write through the lane, apply the write. May import query and shards."""
