"""The HTTP interface.

The folders import downwards only: server, handlers, requests, responses.
"""
