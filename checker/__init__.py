"""Checks the answers that callers got against the contents of the topics (docs/verification.md#the-checker)."""
