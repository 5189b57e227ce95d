"""The migrations of the barrier's table."""
