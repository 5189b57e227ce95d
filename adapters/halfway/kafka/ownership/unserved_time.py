"""How long a shard was unserved, as far as its next owner can know."""

from __future__ import annotations

import time
from collections.abc import Iterable


class UnservedTime:
    """Shards that are assigned to this instance and not served, with the time since when; seconds since the epoch.

    Nobody knows when an owner died: the group takes up to a session time-out to notice, which is not counted here.
    """

    def __init__(self) -> None:
        """Start now: earlier releases do not count, as there may have been no instance at all since then."""
        self._started = time.time()
        self._since: dict[int, float] = {}

    def begin(self, shards: Iterable[int]) -> None:
        """Note that shards are to be served here from now on, and are not yet."""
        now = time.time()
        for shard in shards:
            self._since.setdefault(shard, now)

    def forget(self, shards: Iterable[int]) -> None:
        """Note that shards are another's to serve."""
        for shard in shards:
            self._since.pop(shard, None)

    def end(self, shard: int, released_ms: int | None) -> float:
        """Return how long the shard was unserved, in seconds. `released_ms` is when its former owner released it."""
        now = time.time()
        since = self._since.pop(shard, now)
        if released_ms is not None and released_ms / 1000 >= self._started:
            since = min(since, released_ms / 1000)
        return max(0.0, now - since)
