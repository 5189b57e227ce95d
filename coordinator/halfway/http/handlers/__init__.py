"""The calls: the table of routes, one handler per call, batches and OpenAPI. May import requests and responses."""
