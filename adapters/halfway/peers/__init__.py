"""Calls to other instances over HTTP."""

from halfway.peers.client import HttpPeers, PeerLimits

__all__ = ["HttpPeers", "PeerLimits"]
