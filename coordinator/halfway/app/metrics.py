"""Prometheus metrics: the observer of the coordinator and of the HTTP layer, and gauges that are read at each scrape.

Some counters are exported as 0 before their first event, so that `increase()` finds that event. What is updated for
each group of a batch has classes of its own: those of prometheus_client cost more CPU time.
"""

from __future__ import annotations

import asyncio
import platform
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter as Counts
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, get_args

import msgspec
import structlog
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from halfway.coordinator import tracing
from halfway.coordinator.access import Refusal
from halfway.coordinator.records import PeerCall, Totals
from halfway.kafka.clients.config import KINDS
from halfway.kafka.clients.transactional_producer import Step
from halfway.kafka.records.lane_records import SKIP_REASONS
from halfway.protocol.errors import OverloadedError, PeerLostError, ShardUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from halfway.coordinator.coordinator import Coordinator
    from halfway.coordinator.shards.shard_table import ShardTable
    from halfway.http.server.api import Api
    from halfway.kafka.clients.config import KafkaConfig
    from halfway.protocol.records import Group


C = TypeVar("C")


class _ByLabels(Collector, ABC, Generic[C]):
    """Figures by label values, in place of prometheus_client's. Update and read them on one thread only."""

    def __init__(self, name: str, text: str, labels: Sequence[str], *, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._counts: dict[tuple[str, ...], C] = {}
        registry.register(self)

    def totals(self, first: str | None, by: int) -> Counts[str]:
        """Return the counts by the value of one label, of one value of the first label or of all."""
        found = Counts[str]()
        for labels, count in self._counts.items():
            if first in (None, labels[0]):
                found[labels[by]] += self._total(count)
        return found

    def forget(self, first: str) -> None:
        """Drop whatever has this value of the first label."""
        for labels in [labels for labels in self._counts if labels[0] == first]:
            del self._counts[labels]

    @abstractmethod
    def _total(self, count: C) -> int: ...


class Tally(_ByLabels[int]):
    """Counts by label values."""

    def count(self, labels: tuple[str, ...], times: int) -> None:
        self._counts[labels] = self._counts.get(labels, 0) + times

    def _total(self, count: int) -> int:
        return count

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


class Distribution(_ByLabels[list[int]]):
    """Observations by label values."""

    def __init__(self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float], **options: Any) -> None:
        """Take the upper bounds of the buckets, without infinity."""
        self._bounds = tuple(buckets)
        self._names = [*(str(float(bound)) for bound in buckets), "+Inf"]
        self._sums: dict[tuple[str, ...], float] = {}
        self._exemplars: dict[tuple[str, ...], Exemplar] = {}
        """The newest trace of each bucket, by the label values and its name."""
        super().__init__(name, text, labels, **options)

    def observe(self, value: float, *labels: str, count: int) -> None:
        """Add `count` observations of the same value."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * len(self._names)
            self._sums[labels] = 0.0
        counts[bisect_left(self._bounds, value)] += count
        self._sums[labels] += value * count

    def show_trace(self, value: float, *labels: str, trace: str) -> None:
        """Let the bucket of a value name a trace."""
        bucket = self._names[bisect_left(self._bounds, value)]
        self._exemplars[*labels, bucket] = Exemplar({"trace_id": trace}, value, time.time())

    def forget(self, first: str) -> None:
        super().forget(first)
        self._sums = {labels: sum_ for labels, sum_ in self._sums.items() if labels in self._counts}

    def _total(self, count: list[int]) -> int:
        return sum(count)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for labels, counts in self._counts.items():
            traces = (self._exemplars.get((*labels, name)) for name in self._names)
            buckets: list[Any] = list(zip(self._names, accumulate(counts), traces, strict=True))
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


MAX_GROUPS: Final = 500
"""Further groups are counted together as `other`, so that clients cannot fill the memory with series."""
OTHER: Final = "other"

_LATENCY_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15)
_CHECK_S: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_AWAY_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30, 60, 300)
_OUTCOME_S: Final = (0.01, 0.1, 1, 10, 60, 300, 1_800, 7_200, 43_200)
_ENDS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)
_BY_SHARD: Final = {
    "pending": ("halfway_pending", "Pending transactions"),
    "parked": ("halfway_parked", "Parked transactions"),
    "remembered": ("halfway_outcomes", "Outcomes in memory"),
    "half_lag": ("halfway_half_cursor_lag", "Records of half between its cursor and its tail"),
    "op_lag": ("halfway_op_cursor_lag", "Records of op between its cursor and its tail"),
    "strays": ("halfway_strays", "Half records to correct"),
}
"""The gauge of each figure in the statistics of a shard."""
_BYTES: Final = (1_024, 16_384, 131_072, 524_288, 1_048_576, 4_194_304, 16_777_216, 67_108_864)

_CURSOR_REASONS: Final = ("foreign_cursor", "beyond_end")
_FORWARDED: Final = ("done", PeerLostError.code, ShardUnavailableError.code, OverloadedError.code)
"""The results of a call whose answer did not arrive, and of one that succeeded."""


_FAILING: Final = (("none", "true"), ("none", "false"), ("unknown", "true"), ("leased", "true"))
"""Checks that may bring no verdict: exported as 0 before the first, as all of a group may come between two scrapes."""


class _Groups:
    """The groups that have their own series."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self.is_registered: Callable[[str], bool] = bool

    def has(self, group: str) -> bool:
        return group in self._known

    def label(self, group: str) -> str:
        if group in self._known:
            return group
        if not group or len(self._known) >= MAX_GROUPS or not self.is_registered(group):
            return OTHER
        self._known.add(group)
        return group

    def forget_deleted(self) -> list[str]:
        """Leave the places of deleted groups to others, and return their names."""
        deleted = [group for group in self._known if not self.is_registered(group)]
        self._known.difference_update(deleted)
        return deleted


class Metrics:
    """The observer. A figure that exists elsewhere is not counted again: it is read at each scrape."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the number of series, and nobody uses them
        self.registry = registry = CollectorRegistry()
        tally, distribution = partial(Tally, registry=registry), partial(Distribution, registry=registry)
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self._groups = _Groups()
        self._prepares = tally("halfway_prepares", "Prepares by result", ["group", "result"])
        self._ends = tally("halfway_ends", "Ends by outcome and result", ["group", "outcome", "cause", "result"])
        self._prepare_s = distribution("halfway_prepare_seconds", "Time of a prepare", ["result"], _LATENCY_S)
        self._end_s = distribution("halfway_end_seconds", "Time of an end", ["outcome", "result"], _LATENCY_S)
        text = "Time from prepare to outcome"
        self._outcome_s = distribution("halfway_time_to_outcome_seconds", text, ["group", "outcome"], _OUTCOME_S)
        self._checks = tally("halfway_checks", "Checks by verdict", ["group", "verdict", "sent"])
        self._of_groups = (self._prepares, self._ends, self._outcome_s, self._checks)
        """The metrics whose first label is a group."""
        self._registered: Callable[[], Iterable[Group]] = tuple
        self._requests = tally("halfway_requests", "Requests answered", ["operation", "status"])
        self._streamed = tally("halfway_stream_operations", "Operations of streams answered", ["operation", "status"])
        text = "Ends in a Kafka transaction of the lane"
        self._lane_ends = histogram("halfway_lane_batch_ends", text, buckets=_ENDS)
        text = "Payload of a Kafka transaction of the lane"
        self._lane_bytes = histogram("halfway_lane_batch_bytes", text, buckets=_BYTES)
        self._check_s = distribution("halfway_check_seconds", "Time of a check", ["verdict"], _CHECK_S)
        self._lane_s = distribution("halfway_lane_commit_seconds", "Time of a Kafka transaction", [], _LATENCY_S)
        self._lane_s.observe(0.0, count=0)
        text = "Incarnations that ended in a failure"
        self._lane_failures = counter("halfway_lane_failures", text, ["reason"])
        text = "Records of internal topics that could not be used"
        self._skipped = counter("halfway_skipped_records", text, ["topic", "reason"])
        text = "Outcomes forgotten before the horizon, because memory is bounded"
        self._shortened = counter("halfway_horizon_shortened", text, ["shard"])
        text = "Calls refused for lack of permission, by reason"
        self._refused = counter("halfway_refused_callers", text, ["reason"])
        for reason in get_args(Refusal):
            self._refused.labels(reason)
        text = "Events of the audit trail, written to its topic or lost"
        self._audited = counter("halfway_audit_events", text, ["result"])
        for result in ("written", "lost"):
            self._audited.labels(result)
        self._forwarded = tally("halfway_forwarded", "Calls to other instances by result", ["call", "result"])
        text = "Time of a call to another instance"
        self._forwarded_s = distribution("halfway_forwarded_seconds", text, ["call"], _LATENCY_S)
        text = "How long a shard was unserved before this instance took it over"
        self._moved_s = histogram("halfway_shard_away_seconds", text, buckets=_AWAY_S)
        Info("halfway_build", "The running version", registry=registry).info(
            {"version": version("halfway"), "python": platform.python_version()}
        )
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)

    # --- halfway.coordinator.ports.Observer

    def prepared(self, groups: Mapping[str, int], result: str, seconds: float) -> None:
        for group, count in groups.items():
            self._prepares.count((self._groups.label(group), result), count)
        self._prepare_s.observe(seconds, result, count=sum(groups.values()))

    def ended(self, groups: Mapping[str, int], outcome: str, cause: str, result: str, seconds: float) -> None:
        for group, count in groups.items():
            self._ends.count((self._groups.label(group), outcome, cause, result), count)
        self._end_s.observe(seconds, outcome, result, count=sum(groups.values()))

    def resolved_after(self, groups: Mapping[str, int], outcome: str, seconds: float) -> None:
        for group, count in groups.items():
            self._outcome_s.observe(seconds, self._groups.label(group), outcome, count=count)

    def checked(self, group: str, verdict: str, *, sent: bool, seconds: float) -> None:
        self._checks.count((self._groups.label(group), verdict, "true" if sent else "false"), 1)
        self._check_s.observe(seconds, verdict, count=1)

    def lane_committed(self, ends: int, payload_bytes: int, seconds: float) -> None:
        self._lane_ends.observe(ends)
        self._lane_bytes.observe(payload_bytes)
        self._lane_s.observe(seconds, count=1)

    def lane_failed(self, reason: str) -> None:
        self._lane_failures.labels(reason).inc()

    def skipped_record(self, topic: str, reason: str) -> None:
        self._skipped.labels(topic, reason).inc()

    def forwarded(self, call: str, result: str, seconds: float) -> None:
        self._forwarded.count((call, result), 1)
        self._forwarded_s.observe(seconds, call, count=1)

    def refused_caller(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def shard_moved(self, seconds: float) -> None:
        self._moved_s.observe(seconds)

    def audited(self, result: str) -> None:
        self._audited.labels(result).inc()

    def horizon_shortened(self, shard: int, outcomes: int) -> None:
        self._shortened.labels(str(shard)).inc(outcomes)

    def totals(self, group: str | None) -> Totals:
        """Return what was counted since the start: of one group, or of all.

        A group that is counted together with others has no totals of its own.
        """
        if group is not None and (group == OTHER or not self._groups.has(group)):
            return Totals()
        prepares, outcomes = self._prepares.totals(group, 1), self._outcome_s.totals(group, 1)
        checks = self._checks.totals(group, 1)
        found = Totals(
            prepares=prepares["prepared"],
            commits=outcomes["commit"],
            rollbacks=outcomes["rollback"],
            checks_commit=checks["commit"],
            checks_rollback=checks["rollback"],
            checks_unknown=checks["unknown"],
            checks_none=checks["none"],
        )
        if group is not None:
            return found
        return msgspec.structs.replace(
            found,
            lane_commits=int(_value(self._lane_s, "_count")),
            lane_ends=int(_value(self._lane_ends, "_sum")),
            lane_s=_value(self._lane_s, "_sum"),
            lane_failures=int(_value(self._lane_failures, "_total")),
        )

    # --- halfway.http.stream.operations.RequestObserver

    def answered(self, operation: str, status: int) -> None:
        self._requests.count((operation, str(status)), 1)

    def streamed(self, operation: str, status: int, count: int) -> None:
        self._streamed.count((operation, str(status)), count)

    # --- rendering

    def show(self, coordinator: Coordinator, api: Api) -> None:
        """Register the gauges of a coordinator, and export 0 for each of its shards that has shortened no horizon."""
        self._groups.is_registered = coordinator.is_registered
        self._registered = coordinator.groups
        shards = coordinator.shards
        for shard in range(shards.count):
            self._shortened.labels(str(shard))
        for read in (
            partial(_figures_by_shard, shards),
            partial(_figures_by_group, coordinator, self._groups),
            partial(_figures_of, coordinator, api),
        ):
            self.registry.register(_Read(read))
        text = "Ends and other changes without an answer, by what they wait for"
        self.show_gauges("halfway_changes_waiting", text, "on", coordinator.changes_waiting)

    def export_zeros(self, config: KafkaConfig, *, has_peers: bool) -> None:
        """Export 0 for lane failures, skipped records and, if there are peers, forwarded calls."""
        for failure in ("fenced", *get_args(Step)):
            self._lane_failures.labels(failure)
        topics = [config.topic(kind) for kind in KINDS if kind != "audit"]  # `audit-log` reads it, not `serve`
        for topic, reason in (*product(topics, SKIP_REASONS), *product([config.cursors_group], _CURSOR_REASONS)):
            self._skipped.labels(topic, reason)
        calls = [call.__struct_config__.tag for call in get_args(PeerCall)] if has_peers else []
        for call, result in product(calls, _FORWARDED):
            self._forwarded.count((call, result), 0)

    def show_gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        self.registry.register(_Read(lambda: [_gauge(name, text, read())]))

    def show_gauges(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        """Register a gauge that is read at each scrape, with a sample for each value of a label."""
        self.registry.register(_Read(lambda: [_gauges(name, text, label, read())]))

    def show_counter(self, name: str, text: str, read: Callable[[], float]) -> None:
        self.registry.register(_Read(lambda: [_counter(name, text, read())]))

    def traced(self, span: Any) -> None:
        """Let the histogram that has the time of a sampled span name its trace."""
        context = span.get_span_context()
        if not context.trace_flags.sampled:
            return
        said = span.attributes
        kind = said.get("messaging.operation.type", "check")
        times, labels = {
            "create": (self._prepare_s, ("halfway.result",)),
            "settle": (self._end_s, ("messaging.operation.name", "halfway.result")),
            "send": (self._lane_s, ()),
            "check": (self._check_s, ("halfway.outcome",)),
        }[kind]
        error = "none" if kind == "check" else said.get("error.type", "")
        values = (said.get(label, error) for label in labels)
        seconds = (span.end_time - span.start_time) / 1e9
        times.show_trace(seconds, *values, trace=f"{context.trace_id:032x}")

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics as text, and its content type. It has the series of a deleted group for the last time."""
        encode, content_type = encoding(accept)
        names = [group.name for group in self._registered()]
        # If there are too many, the places are for those that have something to show.
        if len(names) <= MAX_GROUPS:
            for name, (verdict, sent) in product(names, _FAILING):
                self._checks.count((self._groups.label(name), verdict, sent), 0)
        text = encode(self.registry)
        for group in self._groups.forget_deleted():
            for metric in self._of_groups:
                metric.forget(group)
        return text, content_type


def encoding(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """Return what encodes metrics, and the content type: with exemplars if they are accepted and traces are on."""
    return choose_encoder(accept) if tracing.is_on() else (generate_latest, CONTENT_TYPE_LATEST)


def _value(metric: Collector, suffix: str) -> float:
    """Return the sum of a metric's samples whose names end like this."""
    samples = (sample for family in metric.collect() for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name.endswith(suffix))


class _Read(Collector):
    """Figures that are read where they live, at each scrape."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


def _figures_of(coordinator: Coordinator, api: Api) -> Iterator[Metric]:
    shards, in_flight = coordinator.shards, api.in_flight
    payloads, losses = shards.payloads, shards.losses
    yield _gauge("halfway_shards", "The number of shards of all instances together", shards.count)
    bounds, of_http = coordinator.limits, api.limits
    limits = {
        "pending": bounds.max_pending,
        "requests": of_http.max_requests,
        "body_bytes": of_http.max_body_bytes_in_flight,
        "streams": of_http.max_streams,
        "outcomes": bounds.max_outcomes_per_shard,
    }
    text = "Bounds: pending and parked transactions, requests in flight, their bodies, streams, outcomes of a shard"
    yield _gauges("halfway_limit", text, "limit", limits)
    text = "What the lane holds back: ends whose last write was refused, topics and transactions in quarantine"
    yield _gauges("halfway_held_back", text, "kind", coordinator.statistics.held_back())
    yield _gauge("halfway_payload_cache_bytes", "Payloads held in memory", payloads.bytes)
    yield _counter("halfway_payload_cache_hits", "Payloads found in memory", payloads.hits)
    yield _counter("halfway_payload_cache_misses", "Payloads read back from Kafka", payloads.misses)
    text = "Times that Kafka was found to have lost records of a shard that it had acknowledged"
    yield _counter("halfway_log_losses", text, losses.found)
    text = "Transactions that the log has lost, by what became of them"
    missing = CounterMetricFamily("halfway_missing_transactions", text, labels=["result"])
    missing.add_metric(["written_again"], losses.written_again)
    missing.add_metric(["lost"], losses.lost)
    yield missing
    text = "Transactions that the log has lost, and that are in memory only until they are written again"
    yield _gauge("halfway_unwritten_transactions", text, shards.unwritten)
    yield _gauge("halfway_resolving", "Transactions that wait for the lane or are in it", len(shards.claims))
    yield _gauge("halfway_requests_in_flight", "Requests in flight", in_flight.taken)
    yield _gauge("halfway_body_bytes_in_flight", "Bodies received and not yet answered", in_flight.bytes)
    yield _gauge("halfway_streams", "Open streams", len(api.streams))
    yield _gauge("halfway_prepares_waiting", "Prepares that wait for a place", api.admission.waiting)


def _figures_by_shard(shards: ShardTable) -> Iterator[Metric]:
    stats = {str(one.shard): one for one in shards.figures()}
    for name, (metric, text) in _BY_SHARD.items():
        yield _gauges(metric, text, "shard", {shard: getattr(one, name) for shard, one in stats.items()})


_BY_GROUP: Final = {
    "pending": "Pending transactions of a group",
    "parked": "Parked transactions of a group",
    "checks_due": "Checks of a group that wait to be sent or fetched",
    "breaker_open": "1: the endpoints of a group could not be reached, and only probes are sent",
    "overdue_seconds": "For how long a check of a group has been due without a verdict: the longest",
}
"""The gauges of each group, without their prefix."""


def _figures_by_group(coordinator: Coordinator, groups: _Groups) -> Iterator[Metric]:
    found = {name: defaultdict[str, float](float) for name in _BY_GROUP}
    for group, (pending, parked) in coordinator.shards.group_counts().items():
        label = groups.label(group)
        _, due, until, overdue_s = coordinator.checks_of_group(group)
        for name, number in (("pending", pending), ("parked", parked), ("checks_due", due)):
            found[name][label] += number
        for name, highest in (("breaker_open", until is not None), ("overdue_seconds", overdue_s)):
            found[name][label] = max(found[name][label], highest)
    for name, text in _BY_GROUP.items():
        yield _gauges(f"halfway_group_{name}", text, "group", found[name])


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for one, value in values.items():
        family.add_metric([one], value)
    return family


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
