"""Measures how long a shard was unserved, as far as its next owner can know."""

from __future__ import annotations

import time
from collections.abc import Iterable


class UnservedTime:
    """The shards that are assigned to this instance and not served, each with the start time (seconds since the epoch).

    It is unknown when an owner died: the group takes up to the session time-out to notice, which is not counted here.
    """

    def __init__(self) -> None:
        """Start now: earlier releases do not count, because no instance may have run since then."""
        self._started = time.time()
        self._since: dict[int, float] = {}

    def begin(self, shards: Iterable[int]) -> None:
        """Record that shards are assigned to this instance and not served yet."""
        now = time.time()
        for shard in shards:
            self._since.setdefault(shard, now)

    def forget(self, shards: Iterable[int]) -> None:
        """Record that shards are no longer assigned to this instance."""
        for shard in shards:
            self._since.pop(shard, None)

    def end(self, shard: int, released_ms: int | None) -> float:
        """Return how long the shard was unserved, in seconds. `released_ms` is when its former owner released it."""
        now = time.time()
        since = self._since.pop(shard, now)
        if released_ms is not None and released_ms / 1000 >= self._started:
            since = min(since, released_ms / 1000)
        return max(0.0, now - since)
