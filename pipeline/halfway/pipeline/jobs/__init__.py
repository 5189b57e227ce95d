"""The jobs of the command line: each reads, applies rules, and writes."""
