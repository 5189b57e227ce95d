"""Calls between instances, and what all of them know."""
