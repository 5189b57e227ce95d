"""Readers and writers of the internal topics, and registries kept in them. May import topics, records and clients."""
