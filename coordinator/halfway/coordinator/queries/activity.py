"""What this instance has seen lately, in bounded memory: endpoints and failures (docs/api.md#statistics)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from halfway.coordinator.ports import CheckReply, Clock, LaneWrite, Observer
from halfway.coordinator.records import Endpoint, FailingTopic, LaneFailure, RefusedWrite, Skipped
from halfway.coordinator.requests import Moment
from halfway.protocol.transactions import Action, State

K = TypeVar("K")
V = TypeVar("V")

MAX_GROUPS: Final = 500
"""Groups whose endpoints are kept."""
MAX_ENTRIES: Final = 100
"""Topics, refused writes, and kinds of skipped records. The oldest are dropped."""
_ENDPOINTS: Final = 10
_OUTCOMES: Final = {State.COMMITTED: Action.COMMIT.value, State.ROLLED_BACK: Action.ROLLBACK.value}


_ByKind = defaultdict[K, dict[str, int]]
"""The count of each group, by the other labels."""
_counts: Final[Callable[[], dict[str, int]]] = partial(defaultdict, int)


class Activity:
    """An `Observer` that passes every call on to another, and keeps what failed for statistics.

    All methods are called on the loop's thread, except `skipped_record` and `lane_failed`, which any thread may call.
    """

    def __init__(self, observer: Observer, clock: Clock) -> None:
        """Pass every call on to `observer`."""
        self._observer = observer
        self.prepared = observer.prepared
        self.ended = observer.ended
        self.resolved_after = observer.resolved_after
        self.checked = observer.checked
        self.lane_committed = observer.lane_committed
        self.forwarded = observer.forwarded
        self.refused_caller = observer.refused_caller
        self.shard_moved = observer.shard_moved
        self.audited = observer.audited
        self.horizon_shortened = observer.horizon_shortened
        self._clock = clock
        self.since = Moment(clock.now_ms())
        self.lane_failure: LaneFailure | None = None
        self._skipped: dict[tuple[str, str], Skipped] = {}
        self._topics: dict[str, FailingTopic] = {}
        self._writes: dict[str, RefusedWrite] = {}
        self._endpoints: dict[str, dict[str, Endpoint]] = {}
        self._prepared: _ByKind[tuple[str, float]] = _by_kind()
        self._ended: _ByKind[tuple[str, str, str, float]] = _by_kind()
        self._resolved: _ByKind[tuple[str, int]] = _by_kind()
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
        if write.op is not None and (outcome := _OUTCOMES.get(write.state)) is not None:
            self._resolved[outcome, max(0, write.op.at - write.prepared_at)][write.group] += 1
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
        for (result, began), groups in prepared.items():
            observer.prepared(groups, result, now - began)
        for (outcome, cause, result, began), groups in ended.items():
            observer.ended(groups, outcome, cause, result, now - began)
        for (outcome, after_ms), groups in resolved.items():
            observer.resolved_after(groups, outcome, after_ms / 1000)

    # --- what the service reports in addition to the port

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
        known = self._endpoints.get(group, {})
        _put(self._endpoints, group, known, MAX_GROUPS)
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

    def endpoints(self, group: str) -> tuple[Endpoint, ...]:
        return tuple(self._endpoints.get(group, {}).values())

    @property
    def failing(self) -> tuple[tuple[FailingTopic, ...], tuple[RefusedWrite, ...], tuple[Skipped, ...]]:
        """The topics and the writes that fail, and the records that were skipped."""
        return tuple(self._topics.values()), tuple(self._writes.values()), tuple(self._skipped.values())

    # --- halfway.coordinator.ports.Observer

    def lane_failed(self, reason: str) -> None:
        """Count the end of an incarnation."""
        self.lane_failure = LaneFailure(at=Moment(self._clock.now_ms()), reason=reason)
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


def _by_kind() -> _ByKind[Any]:
    return defaultdict(_counts)


def _put(table: dict[K, V], key: K, value: V, most: int = MAX_ENTRIES) -> None:
    """Put a value last, and drop the first if there are too many."""
    table.pop(key, None)
    table[key] = value
    while len(table) > most:
        del table[next(iter(table))]
