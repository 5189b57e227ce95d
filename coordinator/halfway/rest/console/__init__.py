"""The console: the files of a browser application and the handler that serves them next to the API."""

from halfway.rest.console.console import Console

__all__ = ["Console"]
