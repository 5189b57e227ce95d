"""The times in which faults were in effect, and the delays that they explain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from checker.history import Fault, Serving


class Disturbances:
    """The times in which faults may have made shards unserved or calls slow."""

    def __init__(self) -> None:
        """Start without faults."""
        self._all: list[tuple[int, int]] = []
        self._of_shards: list[tuple[int, int]] = []
        self._unserved: defaultdict[int, list[tuple[int, int | None]]] = defaultdict(list)
        """By shard; None as long as it is not served again."""

    def add(self, fault: Fault | Serving) -> None:
        """Add a fault that is over, whether or not it took effect, or that a shard is served from now on, or is not.

        The owner of a shard can lose it without a fault, on a slow machine.
        """
        if isinstance(fault, Serving):
            periods = self._unserved[fault.shard]
            lasts = bool(periods) and periods[-1][1] is None
            if fault.serving and lasts:
                periods[-1] = (periods[-1][0], fault.at)
            elif not fault.serving and not lasts:
                periods.append((fault.at, None))
            return
        since = fault.at if fault.since is None else fault.since
        self._all.append((since, fault.at))
        if fault.stops_ms is None:
            self._of_shards.append((since, fault.at))
        elif fault.stops_ms > 0:
            self._of_shards.append((since, min(fault.at, since + fault.stops_ms)))

    def unserved(self, now: int) -> Mapping[int, list[tuple[int, int]]]:
        """Return when each shard was unserved; one that was not served again counts until now."""
        return {
            shard: [(since, now if until is None else until) for since, until in periods]
            for shard, periods in self._unserved.items()
            if periods
        }

    def unserved_between(self, shards: Iterable[int], start: int, end: int) -> bool:
        """Return whether one of the shards was unserved between two times."""
        periods = self.unserved(end)
        return any(since <= end and until >= start for shard in shards for since, until in periods.get(shard, ()))

    def between(self, start: int, end: int, *, of_shards: bool) -> bool:
        """Return whether a fault was in effect between two times; `of_shards`: only faults that stop shards count."""
        return any(since <= end and until >= start for since, until in (self._of_shards if of_shards else self._all))

    def unexplained(self, start: int, end: int, *, of_shards: bool) -> int:
        """Return how much of a period no fault covers; `of_shards`: only faults that stop shards count."""
        explained, reached = 0, start
        for since, until in sorted(self._of_shards if of_shards else self._all):
            if until > reached and since < end:
                explained += min(until, end) - max(since, reached)
                reached = max(reached, min(until, end))
        return end - start - explained
