"""Judges a load: its journal, the checker, and what consumers see."""
