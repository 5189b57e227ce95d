"""File descriptors: raises the limit as far as the system allows, and reserves enough of them for Kafka."""

from __future__ import annotations

from typing import Final

from halfway.rest.server.server import MAX_CONNECTIONS

_TARGET_LIMIT: Final = 65_536
_RESERVED: Final = 1_500
"""For Kafka clients, check endpoints, other instances and the health port."""
HEALTH_CONNECTIONS: Final = 64
"""Connections of the health port, from the reserve: a platform and a few scrapers need no more."""
CONSOLE_CONNECTIONS: Final = 256
"""Further connections of the health port if it serves the console."""


def connections_within(limit: int) -> int:
    """Return how many client connections are possible if a process may have `limit` open files."""
    free = max(limit - _RESERVED, limit // 3)
    return max(1, min(MAX_CONNECTIONS, free))


def raise_limit() -> int:
    """Raise the soft limit of open files as far as allowed, and return how many client connections it permits."""
    try:
        import resource
    except ImportError:  # not available on every platform
        return MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    target = _TARGET_LIMIT if hard == unlimited else min(hard, _TARGET_LIMIT)
    if soft != unlimited and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        soft = target
    return connections_within(_TARGET_LIMIT if soft == unlimited else soft)
