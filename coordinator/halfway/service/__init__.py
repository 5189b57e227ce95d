"""What halfway does: prepare, end, scan, check and groups, and the ports these need."""
