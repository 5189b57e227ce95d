"""The calls: the table of routes, a function for each, batches, and OpenAPI. May import requests and responses."""
