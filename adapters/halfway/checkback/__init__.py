"""The HTTP client that requests a verdict from a producer service."""

from halfway.checkback.caller import HttpCheckCaller
from halfway.checkback.destinations import LOOPBACK_NETWORKS, Destinations

__all__ = ["LOOPBACK_NETWORKS", "Destinations", "HttpCheckCaller"]
