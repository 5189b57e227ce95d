"""A histogram that adds many equal observations in one step, and a counter without a lock.

The classes of prometheus_client cost more CPU time, and these are updated for each group of a batch.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Tally(Collector):
    """Counts by label values. Update and read it on one thread only."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        """Start without counts."""
        self._name = name
        self._text = text
        self._labels = labels
        self._counts: dict[tuple[str, ...], int] = {}

    def count(self, labels: tuple[str, ...], times: int) -> None:
        """Add `times` to the count of these label values."""
        self._counts[labels] = self._counts.get(labels, 0) + times

    def forget(self, first: str) -> None:
        """Drop every count whose first label has this value."""
        for labels in [labels for labels in self._counts if labels[0] == first]:
            del self._counts[labels]

    def describe(self) -> Iterator[Metric]:
        """Name the metric."""
        yield CounterMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        """Return the counts."""
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

    def forget(self, first: str) -> None:
        """Drop every observation whose first label has this value."""
        for labels in [labels for labels in self._counts if labels[0] == first]:
            del self._counts[labels], self._sums[labels]

    def describe(self) -> Iterator[Metric]:
        """Name the metric."""
        yield HistogramMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        """Return the cumulative buckets."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for labels, counts in self._counts.items():
            buckets = list(zip(self._names, accumulate(counts), strict=True))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family
