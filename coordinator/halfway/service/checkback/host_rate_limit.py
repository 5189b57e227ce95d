"""Limits the checks to one host each second, from all groups: pure; time is a parameter, in ms since the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

_WINDOW_MS = 1000


class HostRateLimits:
    """Admits `most` checks to a host each second, and always the first of each group."""

    def __init__(self, most: int) -> None:
        """Start with nothing sent."""
        self._most = most
        self._began = 0
        self._sent: dict[str, int] = {}
        self._groups: set[tuple[str, str]] = set()

    def admits(self, group: str, urls: Sequence[str], now: int) -> bool:
        """Whether a check may be sent to the hosts of these URLs now; if so, it counts for each of them."""
        if not 0 <= now - self._began < _WINDOW_MS:
            self._began = now
            self._sent.clear()
            self._groups.clear()
        hosts = {_host(url) for url in urls}
        for host in hosts:
            if self._sent.get(host, 0) >= self._most and (group, host) in self._groups:
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
