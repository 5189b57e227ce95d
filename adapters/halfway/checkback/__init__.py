"""The HTTP caller that asks a producer service for its verdict."""

from halfway.checkback.caller import HttpCheckCaller
from halfway.checkback.destinations import LOOPBACK_NETWORKS, Destinations

__all__ = ["LOOPBACK_NETWORKS", "Destinations", "HttpCheckCaller"]
