"""Checks the answers that callers got against the contents of the topics (docs/checker.md)."""
