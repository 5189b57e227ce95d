"""Blocking functions, bounded threads, and locks in a process that forks."""
