"""A histogram that adds many equal observations in one step, a counter without a lock, and the loop's pauses.

The classes of prometheus_client cost more CPU time, and these are updated for each group of a batch. A pause of the
event loop delays every request.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter, deque
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import structlog
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Tally(Collector):
    """Counts by label values. Update and read it on one thread only."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._counts: dict[tuple[str, ...], int] = {}

    def count(self, labels: tuple[str, ...], times: int) -> None:
        """Add `times` to the count of these label values."""
        self._counts[labels] = self._counts.get(labels, 0) + times

    def totals(self, first: str | None, by: int) -> Counter[str]:
        """Return the counts by the value of one label, of one value of the first label or of all."""
        found = Counter[str]()
        for labels, count in self._counts.items():
            if first in (None, labels[0]):
                found[labels[by]] += count
        return found

    def forget(self, first: str) -> None:
        """Drop every count whose first label has this value."""
        for labels in [labels for labels in self._counts if labels[0] == first]:
            del self._counts[labels]

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


class Distribution(Collector):
    """Observations by label values. Update and read it on one thread only."""

    def __init__(self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> None:
        """Take the upper bounds of the buckets, without infinity."""
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = tuple(buckets)
        self._names = [*(str(float(bound)) for bound in buckets), "+Inf"]
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def observe(self, value: float, *labels: str, count: int) -> None:
        """Add `count` observations of the same value."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * len(self._names)
            self._sums[labels] = 0.0
        counts[bisect_left(self._bounds, value)] += count
        self._sums[labels] += value * count

    def totals(self, first: str | None, by: int) -> Counter[str]:
        """Return the numbers of observations by the value of one label, of one value of the first label or of all."""
        found = Counter[str]()
        for labels, counts in self._counts.items():
            if first in (None, labels[0]):
                found[labels[by]] += sum(counts)
        return found

    def forget(self, first: str) -> None:
        """Drop every observation whose first label has this value."""
        for labels in [labels for labels in self._counts if labels[0] == first]:
            del self._counts[labels], self._sums[labels]

    def collect(self) -> Iterator[Metric]:
        """Return the cumulative buckets."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for labels, counts in self._counts.items():
            buckets = list(zip(self._names, accumulate(counts), strict=True))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family


log = structlog.get_logger(__name__)

LONG_S: Final = 5.0
"""A longer pause is a warning."""
_EVERY_S: Final = 0.025
"""The measured pause can be shorter than the real one by at most this time."""
_WINDOW_S: Final = 60


class LoopPauses:
    """Measures how late short sleeps end, and stores the longest pause of each of the last sixty seconds."""

    def __init__(self) -> None:
        self._longest: deque[tuple[int, float]] = deque(maxlen=_WINDOW_S)

    def longest_s(self, *, within_s: float = _WINDOW_S) -> float:
        """Return the longest pause of the last `within_s` seconds."""
        since = time.monotonic() - within_s
        return max((pause for second, pause in self._longest if second >= since), default=0.0)

    def record(self, now: float, pause_s: float) -> None:
        second = int(now)
        if self._longest and self._longest[-1][0] == second:
            self._longest[-1] = (second, max(self._longest[-1][1], pause_s))
        else:
            self._longest.append((second, pause_s))

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            due = time.monotonic() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            now = time.monotonic()
            pause_s = max(0.0, now - due)
            if pause_s > LONG_S:
                log.warning("event_loop_paused", seconds=round(pause_s, 1))
            self.record(now, pause_s)
