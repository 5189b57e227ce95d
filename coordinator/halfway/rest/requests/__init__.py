"""Reads bodies, validates them by the models and their schemas, and converts them. May import responses."""
