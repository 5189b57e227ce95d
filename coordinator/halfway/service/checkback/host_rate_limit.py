"""Limits the checks per second to one host, from all groups. It is pure: time is a parameter, in ms since the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

_WINDOW_MS = 1000


class HostRateLimits:
    """Admits `limit` checks per second to a host, and always the first check of each group."""

    def __init__(self, limit: int) -> None:
        """Start with nothing sent."""
        self._limit = limit
        self._window_start = 0
        self._sent: dict[str, int] = {}
        self._groups: set[tuple[str, str]] = set()

    def admits(self, group: str, urls: Sequence[str], now: int) -> bool:
        """Return whether a check may be sent to the hosts of these URLs now. If so, it counts for each host."""
        if not 0 <= now - self._window_start < _WINDOW_MS:
            self._window_start = now
            self._sent.clear()
            self._groups.clear()
        hosts = {_host(url) for url in urls}
        for host in hosts:
            if self._sent.get(host, 0) >= self._limit and (group, host) in self._groups:
                return False
        for host in hosts:
            self._sent[host] = self._sent.get(host, 0) + 1
            self._groups.add((group, host))
        return True


@lru_cache(maxsize=4096)
def _host(url: str) -> str:
    try:
        return (urlsplit(url).hostname or url).removesuffix(".")
    except ValueError:
        return url
