"""The HTTP client that requests a verdict from a producer service."""

from halfway.checks.caller import HttpCheckCaller
from halfway.checks.destinations import LOOPBACK_NETWORKS, Destinations

__all__ = ["LOOPBACK_NETWORKS", "Destinations", "HttpCheckCaller"]
