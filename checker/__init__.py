"""Judges what callers were told against what the topics hold: see docs/checker.md."""
