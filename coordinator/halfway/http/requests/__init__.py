"""Authenticates callers, admits requests, and reads, validates and converts bodies. May import responses."""
