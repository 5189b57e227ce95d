"""The HTTP caller that asks a producer service for its verdict."""

from halfway.checkback.caller import HttpCheckCaller
from halfway.checkback.rules import AllowedHosts, AnyAddress, UrlRule

__all__ = ["AllowedHosts", "AnyAddress", "HttpCheckCaller", "UrlRule"]
