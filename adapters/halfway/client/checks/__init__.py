"""Answering checks: what to answer, endpoints for web servers, verification, and checks that are fetched."""
