"""Encodes, decodes and validates the records of the internal topics. May import clients."""
