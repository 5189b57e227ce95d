"""Prometheus metrics: the observer of the service and of the REST layer, and gauges that are read at each scrape.

The counters that are exported as 0 before their first event, so that `increase()` finds that event.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import product
from typing import TYPE_CHECKING, Final, get_args

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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from halfway.app.metrics.instruments import Distribution, Tally
from halfway.coordinator.access import Refusal
from halfway.coordinator.records import PeerCall
from halfway.kafka.clients.config import KINDS
from halfway.kafka.clients.transactional_producer import Step
from halfway.kafka.records.lane_records import SKIP_REASONS
from halfway.protocol.errors import OverloadedError, PeerLostError, ShardUnavailableError

if TYPE_CHECKING:
    from halfway.app.metrics.instruments import LoopPauses
    from halfway.coordinator.access import KeyFreshness
    from halfway.coordinator.coordinator import Coordinator
    from halfway.coordinator.queries.queries import TailFreshness
    from halfway.coordinator.records import HealthWarning
    from halfway.coordinator.shards.shard_table import ShardTable
    from halfway.http.responses.slices import Unsent
    from halfway.http.server.api import Api
    from halfway.kafka.clients.config import KafkaConfig


MAX_GROUPS: Final = 500
"""Further groups are counted together as `other`, so that clients cannot fill the memory with series."""
OTHER: Final = "other"

_LATENCY_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15)
_CHECK_S: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_AWAY_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30, 60, 300)
_OUTCOME_S: Final = (0.01, 0.1, 1, 10, 60, 300, 1_800, 7_200, 43_200)
_ENDS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)
_BYTES: Final = (1_024, 16_384, 131_072, 524_288, 1_048_576, 4_194_304, 16_777_216, 67_108_864)


class _Groups:
    """The groups that have their own series."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self.is_registered: Callable[[str], bool] = bool

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


_KEYS_AGE: Final = "Time since the keys were last read to their end"
_TAIL_AGE: Final = "Time since every served shard of half was last read to its end"
_THROTTLED: Final = "For how long brokers have delayed answers because of quotas"


class Metrics:
    """The observer. The counter of each combination of labels is looked up once and then cached."""

    def __init__(self) -> None:
        """Create all metrics in a new registry."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the number of series, and nobody uses them
        self.registry = CollectorRegistry()
        registry = self.registry
        self._groups = _Groups()
        self._counters: dict[tuple[str, ...], Counter] = {}
        self._histograms: dict[tuple[str, ...], Histogram] = {}
        self._prepares = Tally("halfway_prepares", "Prepares by result", ["group", "result"])
        self._prepare_s = Distribution("halfway_prepare_seconds", "Time of a prepare", ["result"], _LATENCY_S)
        self._ends = Tally("halfway_ends", "Ends by outcome and result", ["group", "outcome", "cause", "result"])
        self._end_s = Distribution("halfway_end_seconds", "Time of an end", ["outcome", "result"], _LATENCY_S)
        self._outcome_s = Distribution(
            "halfway_time_to_outcome_seconds", "Time from prepare to outcome", ["group", "outcome"], _OUTCOME_S
        )
        self._checks = Tally("halfway_checks", "Checks by verdict", ["group", "verdict", "sent"])
        self._of_groups = (self._prepares, self._ends, self._outcome_s, self._checks)
        """The metrics whose first label is a group."""
        for collector in (self._prepares, self._ends, self._prepare_s, self._end_s, self._outcome_s, self._checks):
            registry.register(collector)
        self._check_s = Histogram(
            "halfway_check_seconds", "Time of a check", ["verdict"], registry=registry, buckets=_CHECK_S
        )
        self._requests = Tally("halfway_requests", "Requests answered", ["operation", "status"])
        self._streamed = Tally("halfway_stream_operations", "Operations of streams answered", ["operation", "status"])
        for tally in (self._requests, self._streamed):
            registry.register(tally)
        self._lane_ends = Histogram(
            "halfway_lane_batch_ends", "Ends in a Kafka transaction of the lane", registry=registry, buckets=_ENDS
        )
        self._lane_bytes = Histogram(
            "halfway_lane_batch_bytes", "Payload of a Kafka transaction of the lane", registry=registry, buckets=_BYTES
        )
        self._lane_s = Histogram(
            "halfway_lane_commit_seconds", "Time of a Kafka transaction", registry=registry, buckets=_LATENCY_S
        )
        self._lane_failures = Counter(
            "halfway_lane_failures", "Incarnations that ended in a failure", ["reason"], registry=registry
        )
        self._skipped = Counter(
            "halfway_skipped_records",
            "Records of internal topics that could not be used",
            ["topic", "reason"],
            registry=registry,
        )
        self._shortened = Counter(
            "halfway_horizon_shortened",
            "Outcomes forgotten before the horizon, because memory is bounded",
            ["shard"],
            registry=registry,
        )
        self._refused = Counter(
            "halfway_refused_callers", "Calls refused for lack of permission, by reason", ["reason"], registry=registry
        )
        for reason in get_args(Refusal):
            self._refused.labels(reason)
        self._audited = Counter(
            "halfway_audit_events",
            "Events of the audit trail, written to its topic or lost",
            ["result"],
            registry=registry,
        )
        for result in ("written", "lost"):
            self._audited.labels(result)
        self._forwarded = Counter(
            "halfway_forwarded", "Calls to other instances by result", ["call", "result"], registry=registry
        )
        self._forwarded_s = Histogram(
            "halfway_forwarded_seconds",
            "Time of a call to another instance",
            ["call"],
            registry=registry,
            buckets=_LATENCY_S,
        )
        self._moved_s = Histogram(
            "halfway_shard_away_seconds",
            "How long a shard was unserved before this instance took it over",
            registry=registry,
            buckets=_AWAY_S,
        )
        Info("halfway_build", "The running version", registry=registry).info(
            {"version": version("halfway"), "python": platform.python_version()}
        )
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)

    # --- halfway.coordinator.ports.Observer

    def prepared(self, groups: Mapping[str, int], result: str, seconds: float) -> None:
        """Count prepares by their result."""
        for group, count in groups.items():
            self._prepares.count((self._groups.label(group), result), count)
        self._prepare_s.observe(seconds, result, count=sum(groups.values()))

    def ended(self, groups: Mapping[str, int], outcome: str, cause: str, result: str, seconds: float) -> None:
        """Count ends by outcome, cause and result."""
        for group, count in groups.items():
            self._ends.count((self._groups.label(group), outcome, cause, result), count)
        self._end_s.observe(seconds, outcome, result, count=sum(groups.values()))

    def resolved_after(self, groups: Mapping[str, int], outcome: str, seconds: float) -> None:
        """Observe the time from prepare to outcome."""
        for group, count in groups.items():
            self._outcome_s.observe(seconds, self._groups.label(group), outcome, count=count)

    def checked(self, group: str, verdict: str, *, sent: bool, seconds: float) -> None:
        """Count a check by its verdict."""
        self._checks.count((self._groups.label(group), verdict, "true" if sent else "false"), 1)
        self._observe(self._check_s, seconds, verdict)

    def lane_committed(self, ends: int, payload_bytes: int, seconds: float) -> None:
        """Observe one Kafka transaction of the lane."""
        self._lane_ends.observe(ends)
        self._lane_bytes.observe(payload_bytes)
        self._lane_s.observe(seconds)

    def lane_failed(self, reason: str) -> None:
        """Count the end of an incarnation."""
        self._count(self._lane_failures, reason)

    def skipped_record(self, topic: str, reason: str) -> None:
        """Count a skipped record."""
        self._count(self._skipped, topic, reason)

    def forwarded(self, call: str, result: str, seconds: float) -> None:
        """Count a call to another instance."""
        self._count(self._forwarded, call, result)
        self._observe(self._forwarded_s, seconds, call)

    def refused_caller(self, reason: str) -> None:
        """Count a call that was refused because of its caller."""
        self._count(self._refused, reason)

    def shard_moved(self, seconds: float) -> None:
        """Observe how long a shard was unserved."""
        self._moved_s.observe(seconds)

    def audited(self, result: str) -> None:
        """Count an event of the audit trail."""
        self._count(self._audited, result)

    def horizon_shortened(self, shard: int, outcomes: int) -> None:
        """Count outcomes that were forgotten early."""
        self._shortened.labels(str(shard)).inc(outcomes)

    # --- halfway.http.server.api.RequestObserver

    def answered(self, operation: str, status: int) -> None:
        """Count a request."""
        self._requests.count((operation, str(status)), 1)

    def streamed(self, operation: str, status: int, count: int) -> None:
        """Count operations of streams."""
        self._streamed.count((operation, str(status)), count)

    # --- rendering

    def show(self, coordinator: Coordinator, api: Api) -> None:
        """Register the gauges of a coordinator, and export 0 for each of its shards that has shortened no horizon."""
        self._groups.is_registered = coordinator.is_registered
        shards = coordinator.shards
        for shard in range(shards.count):
            self._shortened.labels(str(shard))
        self.registry.register(_Gauges(shards, api, self._groups))

    def export_zeros(
        self,
        *,
        lane_failures: Iterable[str],
        skipped: Iterable[tuple[str, str]],
        forwarded: Iterable[tuple[str, str]],
    ) -> None:
        """Export 0 for lane failures by reason, skipped records by topic and reason, and calls by kind and result."""
        for reason in lane_failures:
            self._lane_failures.labels(reason)
        for topic, reason in skipped:
            self._skipped.labels(topic, reason)
        for call, result in forwarded:
            self._forwarded.labels(call, result)

    def show_unsent(self, unsent: Unsent) -> None:
        """Register the gauge of answers that clients have not read."""
        self.registry.register(_Unsent(unsent))

    def show_keys(self, keys: KeyFreshness) -> None:
        """Register the gauge of the keys' age: for that long, a revoked key may still be accepted."""
        self.registry.register(_Reading("halfway_keys_age_seconds", _KEYS_AGE, lambda: keys.age_s))

    def show_tail(self, tail: TailFreshness) -> None:
        """Register the gauge of the tail's age: for that long, a record of a served shard may not have been seen."""
        self.registry.register(_Reading("halfway_tail_age_seconds", _TAIL_AGE, lambda: tail.age_s))

    def show_throttling(self, seconds: Callable[[], float]) -> None:
        """Register the time for which brokers have delayed answers because of quotas."""
        self.registry.register(_Reading("halfway_kafka_throttled_seconds", _THROTTLED, seconds, counts=True))

    def show_troubles(self, troubles: Callable[[], Mapping[int, float]]) -> None:
        """Register the gauge of shards that cannot be acquired. `troubles` maps them to seconds since the epoch."""
        self.registry.register(_Troubles(troubles))

    def show_warnings(self, checks: Sequence[str], warnings: Callable[[], Sequence[HealthWarning]]) -> None:
        """Register the gauge of warnings; each of `checks` has a sample."""
        self.registry.register(_Warnings(checks, warnings))

    def show_pauses(self, pauses: LoopPauses) -> None:
        """Register the gauge of the event loop's pauses."""
        self.registry.register(_Pauses(pauses))

    def render(self) -> tuple[bytes, str]:
        """Return all metrics as text, and its content type. It has the series of a deleted group for the last time."""
        text = generate_latest(self.registry)
        for group in self._groups.forget_deleted():
            for metric in self._of_groups:
                metric.forget(group)
        return text, CONTENT_TYPE_LATEST

    def _count(self, counter: Counter, *labels: str) -> None:
        key = (counter._name, *labels)  # noqa: SLF001 - only as a key
        child = self._counters.get(key)
        if child is None:
            child = self._counters[key] = counter.labels(*labels)
        child.inc()

    def _observe(self, histogram: Histogram, value: float, *labels: str) -> None:
        key = (histogram._name, *labels)  # noqa: SLF001 - only as a key
        child = self._histograms.get(key)
        if child is None:
            child = self._histograms[key] = histogram.labels(*labels)
        child.observe(value)


class _Troubles(Collector):
    """The shards that this instance cannot acquire."""

    def __init__(self, troubles: Callable[[], Mapping[int, float]]) -> None:
        self._troubles = troubles

    def describe(self) -> Iterator[Metric]:
        """Return nothing: no other collector uses the name."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "halfway_shard_not_acquired_seconds",
            "How long a shard that is assigned to this instance could not be acquired",
            labels=["shard"],
        )
        now = time.time()
        for shard, since in self._troubles().items():
            family.add_metric([str(shard)], max(0.0, now - since))
        yield family


class _Gauges(Collector):
    """The coordinator's state, read at each scrape."""

    def __init__(self, shards: ShardTable, api: Api, groups: _Groups) -> None:
        self._shards = shards
        self._api = api
        self._groups = groups

    def describe(self) -> Iterator[Metric]:
        """Return nothing: no other collector uses the names."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from self._by_shard()
        yield from self._by_group()
        payloads = self._shards.payloads
        yield _gauge("halfway_payload_cache_bytes", "Payloads held in memory", payloads.bytes)
        for name, text, count in (
            ("halfway_payload_cache_hits", "Payloads found in memory", payloads.hits),
            ("halfway_payload_cache_misses", "Payloads read back from Kafka", payloads.misses),
        ):
            yield CounterMetricFamily(name, text, value=count)
        losses = self._shards.losses
        text = "Times that Kafka was found to have lost records of a shard that it had acknowledged"
        yield CounterMetricFamily("halfway_log_losses", text, value=losses.found)
        missing = CounterMetricFamily(
            "halfway_missing_transactions",
            "Transactions that the log has lost, by what became of them",
            labels=["result"],
        )
        missing.add_metric(["written_again"], losses.written_again)
        missing.add_metric(["lost"], losses.lost)
        yield missing
        text = "Transactions that the log has lost, and that are in memory only until they are written again"
        yield _gauge("halfway_unwritten_transactions", text, self._shards.unwritten)
        yield _gauge("halfway_resolving", "Transactions that wait for the lane or are in it", len(self._shards.claims))
        yield _gauge("halfway_requests_in_flight", "Requests in flight", self._api.in_flight.taken)
        yield _gauge("halfway_body_bytes_in_flight", "Bodies received and not yet answered", self._api.in_flight.bytes)
        yield _gauge("halfway_streams", "Open streams", len(self._api.streams))
        yield _gauge("halfway_event_listeners", "Listeners to events", len(self._api.events))
        yield _gauge("halfway_prepares_waiting", "Prepares that wait for a place", self._api.admission.waiting)

    def _by_shard(self) -> Iterator[Metric]:
        families = {
            "pending": GaugeMetricFamily("halfway_pending", "Pending transactions", labels=["shard"]),
            "parked": GaugeMetricFamily("halfway_parked", "Parked transactions", labels=["shard"]),
            "ended": GaugeMetricFamily("halfway_outcomes", "Outcomes in memory", labels=["shard"]),
            "oldest_pending_s": GaugeMetricFamily(
                "halfway_oldest_pending_seconds", "Age of the oldest pending transaction", labels=["shard"]
            ),
            "half_lag": GaugeMetricFamily(
                "halfway_half_cursor_lag", "Records of half between its cursor and its tail", labels=["shard"]
            ),
            "op_lag": GaugeMetricFamily(
                "halfway_op_cursor_lag", "Records of op between its cursor and its tail", labels=["shard"]
            ),
            "due": GaugeMetricFamily(
                "halfway_agenda", "Transactions that a scan will examine: all pending ones", labels=["shard"]
            ),
            "strays": GaugeMetricFamily("halfway_strays", "Half records to correct", labels=["shard"]),
        }
        for stats in self._shards.stats():
            for name, family in families.items():
                family.add_metric([str(stats.shard)], getattr(stats, name))
        yield from families.values()

    def _by_group(self) -> Iterator[Metric]:
        pending = GaugeMetricFamily("halfway_group_pending", "Pending transactions of a group", labels=["group"])
        parked = GaugeMetricFamily("halfway_group_parked", "Parked transactions of a group", labels=["group"])
        totals: dict[str, tuple[int, int]] = {}
        for group, counts in self._shards.group_counts().items():
            label = self._groups.label(group)
            before = totals.get(label, (0, 0))
            totals[label] = (before[0] + counts[0], before[1] + counts[1])
        for label, counts in totals.items():
            pending.add_metric([label], counts[0])
            parked.add_metric([label], counts[1])
        yield pending
        yield parked


class _Unsent(Collector):
    """Answers that clients have not read."""

    def __init__(self, unsent: Unsent) -> None:
        self._unsent = unsent

    def collect(self) -> Iterator[Metric]:
        yield _gauge("halfway_unsent_answer_bytes", "Answers that clients have not read yet", self._unsent.bytes)


class _Reading(Collector):
    """One figure that is read when metrics are rendered."""

    def __init__(self, name: str, text: str, read: Callable[[], float], *, counts: bool = False) -> None:
        """Take its name and what reads it; `counts` if it only grows."""
        self._name, self._text, self._read, self._counts = name, text, read, counts

    def collect(self) -> Iterator[Metric]:
        if self._counts:
            yield CounterMetricFamily(self._name, self._text, value=self._read())
        else:
            yield _gauge(self._name, self._text, self._read())


class _Warnings(Collector):
    """What is unsafe on this instance."""

    def __init__(self, checks: Sequence[str], warnings: Callable[[], Sequence[HealthWarning]]) -> None:
        self._checks = checks
        self._warnings = warnings

    def describe(self) -> Iterator[Metric]:
        """Return nothing: no other collector uses the name."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        text = "What is unsafe on this instance, by check: the number of warnings in /health/ready"
        family = GaugeMetricFamily("halfway_warnings", text, labels=["check"])
        found = [warning.check for warning in self._warnings()]
        for check in dict.fromkeys((*self._checks, *found)):
            family.add_metric([check], found.count(check))
        yield family


class _Pauses(Collector):
    """Pauses of the event loop."""

    def __init__(self, pauses: LoopPauses) -> None:
        self._pauses = pauses

    def collect(self) -> Iterator[Metric]:
        text = "The longest pause of the event loop in the last minute"
        yield _gauge("halfway_loop_pause_seconds", text, self._pauses.longest_s())


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


_CURSOR_REASONS: Final = ("foreign_cursor", "beyond_end")
_FORWARDED: Final = ("done", PeerLostError.code, ShardUnavailableError.code, OverloadedError.code)
"""The results of a call whose answer did not arrive, and of one that succeeded."""


def export_zeros(metrics: Metrics, config: KafkaConfig, *, has_peers: bool) -> None:
    """Export 0 for lane failures, skipped records and, if there are peers, forwarded calls."""
    topics = [config.topic(kind) for kind in KINDS if kind != "audit"]  # `halfway audit-log` reads audit, not `serve`
    metrics.export_zeros(
        lane_failures=("fenced", *get_args(Step)),
        skipped=(*product(topics, SKIP_REASONS), *product([config.cursors_group], _CURSOR_REASONS)),
        forwarded=product([call.__struct_config__.tag for call in get_args(PeerCall)], _FORWARDED) if has_peers else (),
    )
