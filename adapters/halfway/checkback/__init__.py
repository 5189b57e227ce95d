"""The HTTP caller that asks a producer service for its verdict."""

from halfway.checkback.caller import HttpCheckCaller
from halfway.checkback.rules import AnyAddress, Signer, Unsigned, UrlRule

__all__ = ["AnyAddress", "HttpCheckCaller", "Signer", "Unsigned", "UrlRule"]
