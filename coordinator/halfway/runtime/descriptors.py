"""File descriptors: as many as the system allows, with enough of them reserved for Kafka."""

from __future__ import annotations

from typing import Final

from halfway.rest.server.server import MAX_CONNECTIONS

_WANTED: Final = 65_536
_KEPT: Final = 1_500
"""For Kafka clients, check endpoints, other instances and the second port."""
HEALTH_CONNECTIONS: Final = 64
"""On the second port, out of those that are kept: a platform and a few scrapers need no more."""
CONSOLE_CONNECTIONS: Final = 256
"""On the second port beside those, if the console is there."""


def connections_within(limit: int) -> int:
    """Return how many client connections may be held if a process may have `limit` files open."""
    free = max(limit - _KEPT, limit // 3)
    return max(1, min(MAX_CONNECTIONS, free))


def connections_to_hold() -> int:
    """Raise the soft limit of open files as far as it is allowed, and return how many connections fit into it."""
    try:
        import resource
    except ImportError:  # not on every platform
        return MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unbounded = resource.RLIM_INFINITY
    wanted = _WANTED if hard == unbounded else min(hard, _WANTED)
    if soft != unbounded and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return connections_within(_WANTED if soft == unbounded else soft)
