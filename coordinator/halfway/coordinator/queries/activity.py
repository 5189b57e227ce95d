"""Recent activity of this instance, in bounded memory: rates, endpoints, failures (docs/rest.md#statistics)."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from halfway.coordinator.queries.action_log import Journal
from halfway.coordinator.records import Endpoint, FailingTopic, HistoryEvent, LaneFailure, RefusedWrite, Skipped, Tally
from halfway.coordinator.records import LaneFigures as Lane
from halfway.coordinator.requests import Moment
from halfway.protocol.records import Half
from halfway.protocol.transactions import Action, State

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from halfway.coordinator.ports import CheckReply, Clock, LaneWrite, Observer
    from halfway.protocol.principal import Principal


K = TypeVar("K")
V = TypeVar("V")

WINDOW_S: Final = 10
"""Rates are the mean over this many seconds before the current one."""
MAX_GROUPS: Final = 500
"""Groups with rates of their own. The others share one."""
MAX_ENTRIES: Final = 100
"""Topics, refused writes, and kinds of skipped records. The oldest are dropped."""
_ENDPOINTS: Final = 10
_OUTCOMES: Final = {State.COMMITTED: Action.COMMIT.value, State.ROLLED_BACK: Action.ROLLBACK.value}


class _Series:
    """A count since the start, and the counts of the last seconds."""

    __slots__ = ("_at", "_seconds", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self._seconds = [0.0] * (WINDOW_S + 1)
        self._at = 0

    def add(self, amount: float, now: int) -> None:
        if now != self._at:
            self._advance(now)
        self.total += amount
        self._seconds[now % len(self._seconds)] += amount

    def take(self, other: _Series, now: int) -> None:
        """Add the counts of another series."""
        self._advance(now)
        other._advance(now)
        self.total += other.total
        self._seconds = [mine + its for mine, its in zip(self._seconds, other._seconds, strict=True)]

    def per_s(self, now: int) -> float:
        self._advance(now)
        return (sum(self._seconds) - self._seconds[now % len(self._seconds)]) / WINDOW_S

    def _advance(self, now: int) -> None:
        size = len(self._seconds)
        for second in range(max(self._at + 1, now - size + 1), now + 1):
            self._seconds[second % size] = 0.0
        self._at = max(self._at, now)


_Table = dict[tuple[str, ...], _Series]
"""By the group and the labels of the count."""
_ByKind = defaultdict[K, dict[str, int]]
"""The count of each group, by the other labels."""
_counts: Final[Callable[[], dict[str, int]]] = partial(defaultdict, int)


class Activity:
    """An `Observer` that passes every call on to another, and keeps recent figures for statistics.

    All methods are called on the loop's thread, except `skipped_record` and `lane_failed`, which any thread may call.
    """

    def __init__(self, observer: Observer, clock: Clock) -> None:
        """Pass every call on to `observer`."""
        self._observer = observer
        self.ended = observer.ended
        self.resolved_after = observer.resolved_after
        self.forwarded = observer.forwarded
        self.refused_caller = observer.refused_caller
        self.shard_moved = observer.shard_moved
        self.audited = observer.audited
        self.horizon_shortened = observer.horizon_shortened
        self._clock = clock
        self.since = Moment(clock.now_ms())
        self.journal = Journal(self.since)
        """The recent events of each transaction."""
        self._prepares: dict[str, _Series] = {}
        self._ends: _Table = {}
        self._checks: _Table = {}
        self._commits, self._lane_ends, self._lane_s = _Series(), _Series(), _Series()
        self._lane_failures = 0
        self._lane_failure: LaneFailure | None = None
        self._skipped: dict[tuple[str, str], Skipped] = {}
        self._topics: dict[str, FailingTopic] = {}
        self._writes: dict[str, RefusedWrite] = {}
        self._endpoints: dict[str, dict[str, Endpoint]] = {}
        self.is_registered: Callable[[str], bool] = bool
        """Whether there is a group of this name. Deleted groups leave their place to others."""
        self._forgotten_at = 0
        self._prepared: _ByKind[tuple[str, float]] = _by_kind()
        self._ended: _ByKind[tuple[str, str, str, float]] = _by_kind()
        self._resolved: _ByKind[tuple[str, str, int]] = _by_kind()
        self._scheduled = False

    @classmethod
    def around(cls, observer: Observer, clock: Clock) -> Activity:
        """Return the observer itself if it is an Activity, else an Activity that passes on to it."""
        return observer if isinstance(observer, Activity) else cls(observer, clock)

    # --- the counts of one turn of the event loop are passed on together; `began` is on the loop's clock

    def note_prepare(self, group: str, result: str, began: float) -> None:
        self._prepared[result, began][group] += 1
        if not self._scheduled:
            self._schedule_flush()

    def note_end(self, group: str, outcome: str, cause: str, result: str, began: float) -> None:
        self._ended[outcome, cause, result, began][group] += 1
        if not self._scheduled:
            self._schedule_flush()

    def note_write(self, write: LaneWrite) -> None:
        """Count a write of the lane. An end clears its earlier failures; a note, such as a refused commit, does not."""
        if write.state.ended and (self._writes or self._topics):
            self.clear_failures(write.id, [message.topic for message in write.messages])
        op = write.op
        if op is None:
            if isinstance(write.half, Half):
                self.note_event(write.id, "reanchored")
        elif (outcome := _OUTCOMES.get(write.state)) is not None:
            self._resolved[outcome, op.cause, max(0, op.at - write.prepared_at)][write.group] += 1
            if not self._scheduled:
                self._schedule_flush()

    def _schedule_flush(self) -> None:
        self._scheduled = True
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        now, observer = asyncio.get_running_loop().time(), self._observer
        prepared, ended, resolved = self._prepared, self._ended, self._resolved
        self._prepared, self._ended, self._resolved = _by_kind(), _by_kind(), _by_kind()
        for (outcome, cause, _), groups in resolved.items():
            self.note_outcomes(groups, outcome, cause)
        for (result, began), groups in prepared.items():
            self.prepared(groups, result, now - began)
        for (outcome, cause, result, began), groups in ended.items():
            observer.ended(groups, outcome, cause, result, now - began)
        for (outcome, _, after_ms), groups in resolved.items():
            observer.resolved_after(groups, outcome, after_ms / 1000)

    # --- what the service reports in addition to the port

    def note_outcomes(self, groups: Mapping[str, int], outcome: str, cause: str) -> None:
        now = _second()
        for group, count in groups.items():
            _add(self._ends, (self._group_label(group), outcome, cause), count, now)

    def note_event(self, transaction_id: str, event: str, by: Principal | None = None) -> None:
        """Keep an event of a transaction that op does not hold, or not completely."""
        history_event = HistoryEvent(at=Moment(self._clock.now_ms()), event=event, by=None if by is None else str(by))
        self.journal.add(transaction_id, history_event)

    def note_refused_write(
        self, transaction_id: str, topic: str | None, code: str, detail: str, retry_after_s: float
    ) -> None:
        """Keep a write that was refused, until it is done."""
        now = Moment(self._clock.now_ms())
        retry_at = Moment(now + round(retry_after_s * 1000))
        self._writes.pop(transaction_id, None)
        _put(
            self._writes,
            transaction_id,
            RefusedWrite(
                id=transaction_id, topic=topic, error_code=code, detail=detail, last_at=now, retry_at=retry_at
            ),
        )
        if topic is not None:
            before = self._topics.pop(topic, None)
            failing = FailingTopic(
                topic=topic,
                error_code=code,
                detail=detail,
                refused=1 if before is None else before.refused + 1,
                first_at=now if before is None else before.first_at,
                last_at=now,
                retry_at=retry_at,
                first_error_code=code if before is None else before.first_error_code,
                first_detail=detail if before is None else before.first_detail,
            )
            _put(self._topics, topic, failing)

    def clear_failures(self, transaction_id: str, topics: Sequence[str]) -> None:
        self._writes.pop(transaction_id, None)
        for topic in topics:
            self._topics.pop(topic, None)

    def note_check_reply(self, group: str, reply: CheckReply) -> None:
        """Keep the last answer of each endpoint of a group."""
        known = self._endpoints.get(group)
        if known is None:
            if len(self._endpoints) >= MAX_GROUPS:
                self._forget_deleted()
            if len(self._endpoints) >= MAX_GROUPS:
                return
            known = self._endpoints[group] = {}
        now = Moment(self._clock.now_ms())
        for attempt in reply.attempts:
            known.pop(attempt.host, None)
            known[attempt.host] = Endpoint(
                host=attempt.host,
                well=attempt.answered,
                status=attempt.status,
                detail=attempt.detail or None,
                at=now,
                duration_s=round(attempt.duration_s, 3),
            )
            while len(known) > _ENDPOINTS:
                del known[next(iter(known))]

    # --- reading

    def prepares(self, group: str | None = None) -> float:
        now = _second()
        return sum(series.per_s(now) for name, series in self._prepares.items() if group in (None, name))

    def ends(self, group: str | None = None) -> list[Tally]:
        """Return the counts of outcomes by outcome and cause, of one group or of all."""
        return _tallies(self._ends, group)

    def checks(self, group: str | None = None) -> list[Tally]:
        return _tallies(self._checks, group)

    def endpoints(self, group: str) -> tuple[Endpoint, ...]:
        return tuple(self._endpoints.get(group, {}).values())

    @property
    def lane(self) -> Lane:
        now = _second()
        commits = self._commits.per_s(now)
        return Lane(
            commits_per_s=round(commits, 2),
            ends_per_s=round(self._lane_ends.per_s(now), 2),
            commit_s=round(self._lane_s.per_s(now) / commits, 4) if commits else 0.0,
            failures=self._lane_failures,
            last_failure=self._lane_failure,
        )

    @property
    def failing(self) -> tuple[tuple[FailingTopic, ...], tuple[RefusedWrite, ...], tuple[Skipped, ...]]:
        """The topics and the writes that fail, and the records that were skipped."""
        return tuple(self._topics.values()), tuple(self._writes.values()), tuple(self._skipped.values())

    def _group_label(self, group: str) -> str:
        """Return the group under which to count: itself, or "" with all that have no place of their own."""
        if group in self._prepares:
            return group
        if len(self._prepares) >= MAX_GROUPS:
            self._forget_deleted()
        return group if len(self._prepares) < MAX_GROUPS else ""

    def _forget_deleted(self) -> None:
        """Count what deleted groups did with what has no place of its own, so that totals stay."""
        now = _second()
        if now == self._forgotten_at:
            return  # it would be asked for each group that has no place
        self._forgotten_at = now
        for group in [group for group in self._prepares if group and not self.is_registered(group)]:
            _move(self._prepares, group, "", now)
        for table in (self._ends, self._checks):
            for key in [key for key in table if key[0] and not self.is_registered(key[0])]:
                _move(table, key, ("", *key[1:]), now)
        self._endpoints = {group: known for group, known in self._endpoints.items() if self.is_registered(group)}

    # --- halfway.coordinator.ports.Observer

    def prepared(self, groups: Mapping[str, int], result: str, seconds: float) -> None:
        if result == "prepared":
            now = _second()
            for group, count in groups.items():
                _add(self._prepares, self._group_label(group), count, now)
        self._observer.prepared(groups, result, seconds)

    def checked(self, group: str, verdict: str, *, sent: bool, seconds: float) -> None:
        _add(self._checks, (self._group_label(group), verdict), 1, _second())
        self._observer.checked(group, verdict, sent=sent, seconds=seconds)

    def lane_committed(self, ends: int, payload_bytes: int, seconds: float) -> None:
        """Observe one Kafka transaction of the lane."""
        now = _second()
        self._commits.add(1, now)
        self._lane_ends.add(ends, now)
        self._lane_s.add(seconds, now)
        self._observer.lane_committed(ends, payload_bytes, seconds)

    def lane_failed(self, reason: str) -> None:
        """Count the end of an incarnation."""
        self._lane_failures += 1
        self._lane_failure = LaneFailure(at=Moment(self._clock.now_ms()), reason=reason)
        self._observer.lane_failed(reason)

    def skipped_record(self, topic: str, reason: str) -> None:
        """Count a record that could not be used."""
        before = self._skipped.get((topic, reason))
        count = 1 if before is None else before.count + 1
        _put(
            self._skipped,
            (topic, reason),
            Skipped(topic=topic, reason=reason, count=count, last_at=Moment(self._clock.now_ms())),
        )
        self._observer.skipped_record(topic, reason)


def _second() -> int:
    return int(time.monotonic())


def _by_kind() -> _ByKind[Any]:
    return defaultdict(_counts)


def _add(table: dict[K, _Series], key: K, amount: float, now: int) -> None:
    series = table.get(key)
    if series is None:
        series = table[key] = _Series()
    series.add(amount, now)


def _move(table: dict[K, _Series], key: K, to: K, now: int) -> None:
    series = table.pop(key)
    table.setdefault(to, _Series()).take(series, now)


def _tallies(table: _Table, group: str | None) -> list[Tally]:
    now = _second()
    tallies: dict[tuple[str, ...], Tally] = {}
    for (name, *names), series in table.items():
        if group in (None, name):
            key = tuple(names)
            before = tallies.get(key, Tally(names=key, total=0, per_s=0.0))
            total, per_s = before.total + round(series.total), before.per_s + series.per_s(now)
            tallies[key] = Tally(names=key, total=total, per_s=per_s)
    return list(tallies.values())


def _put(table: dict[K, V], key: K, value: V) -> None:
    """Put a value last, and drop the first if there are too many."""
    table.pop(key, None)
    table[key] = value
    while len(table) > MAX_ENTRIES:
        del table[next(iter(table))]
