"""The console: the files of a browser application and the handler that serves them next to the API."""

from halfway.http.console.console import Console

__all__ = ["Console"]
