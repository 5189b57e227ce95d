"""The HTTP interface.

The folders import downwards only: server, stream and console, handlers, requests and responses.
"""
