"""The lane in memory: what waits at one turn of the loop is one Kafka transaction."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halfway.coordinator.ports import (
    Clock,
    LaneAnswer,
    LaneAnswers,
    LaneWrite,
    Observer,
    ShardListener,
    Tombstone,
    Written,
)
from halfway.coordinator.records import Quarantined
from halfway.protocol.errors import (
    HalfwayError,
    LaneLostError,
    MessageTooLargeError,
    NotAuthorisedError,
    NotWrittenError,
    OverloadedError,
    TopicUnavailableError,
)
from tests.support.memory.log import Faults, MemoryLog, half_headers, kept_headers, real_headers

_HELD_S = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class Incarnation:
    """The id of the lane, its shards (changed by the membership), and the receivers of its events."""

    number: int
    shards: set[int]
    listener: ShardListener
    on_lost: Callable[[], None]


class MemoryLane:
    """The port `service.ports.Lane`."""

    def __init__(self, log: MemoryLog, faults: Faults, clock: Clock, observer: Observer, *, capacity: int) -> None:
        """Start without an incarnation; at most `capacity` writes wait."""
        self._log = log
        self._faults = faults
        self._clock = clock
        self._observer = observer
        self._capacity = capacity
        self._waiting: deque[LaneWrite] = deque()
        self._answered: Callable[[LaneAnswers], None] = lambda _: None
        self._scheduled = False
        self._incarnation: Incarnation | None = None

    def attach(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation

    def detach(self) -> None:
        """Have no incarnation: what waits was never begun, and every new write is refused."""
        self._incarnation = None
        waiting = list(self._waiting)
        self._waiting.clear()
        self._answered([(write, NotWrittenError(f"{write.id}: the lane has ended", id=write.id)) for write in waiting])

    def listen(self, answered: Callable[[LaneAnswers], None]) -> None:
        self._answered = answered

    def submit(self, writes: Sequence[LaneWrite]) -> None:
        """Queue writes for the next Kafka transaction; see `service.ports.Lane.submit`."""
        refused: list[LaneAnswer] = []
        for write in writes:
            if self._incarnation is None or write.shard not in self._incarnation.shards:
                error = NotWrittenError(f"{write.id}: shard {write.shard} is not owned here", id=write.id)
                refused.append((write, error))
            elif len(self._waiting) >= self._capacity:
                refused.append((write, OverloadedError("too many ends wait for the lane", limit=self._capacity)))
            else:
                self._waiting.append(write)
        if self._waiting:
            self._schedule(asyncio.get_running_loop())
        if refused:
            self._answered(refused)

    def quarantined(self, most: int) -> Sequence[Quarantined]:
        """Nothing is kept apart: no message makes a Kafka transaction fail here."""
        return ()

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._scheduled:
            return
        self._scheduled = True
        if self._faults.holds_lane:
            loop.call_later(_HELD_S, self._turn, loop)
        else:
            loop.call_soon(self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take all that waits as one Kafka transaction; its callers hear at the next turn."""
        self._scheduled = False
        if self._faults.holds_lane and self._waiting:
            self._schedule(loop)
            return
        batch = list(self._waiting)
        self._waiting.clear()
        incarnation = self._incarnation
        if incarnation is None or not batch:
            return
        admitted, refused = self._admitted(batch, incarnation, loop.time())
        if refused:
            loop.call_soon(self._answered, refused)
        if not admitted:
            return
        lost = self._faults.take_batch()
        fenced = any(self._log.shards[write.shard].owner != incarnation.number for write in admitted)
        if fenced or lost is not None:
            if lost and not fenced:
                self._commit(admitted)
            self._observer.lane_failed("fenced" if fenced else "lost")
            loop.call_soon(self._lose, admitted, incarnation)
            return
        written = self._commit(admitted)
        self._observer.lane_committed(len(admitted), sum(write.size for write in admitted), 0.0)
        loop.call_soon(self._answer, list(zip(admitted, written, strict=True)), loop)

    def _answer(self, answers: LaneAnswers, loop: asyncio.AbstractEventLoop) -> None:
        """Answer what stands, once the answer has come."""
        if self._faults.holds_answers:
            loop.call_later(_HELD_S, self._answer, answers, loop)
        else:
            self._answered(answers)

    def _lose(self, batch: Sequence[LaneWrite], incarnation: Incarnation) -> None:
        incarnation.on_lost()
        self._answered([(write, LaneLostError(id=write.id)) for write in batch])

    def _admitted(
        self, batch: Sequence[LaneWrite], incarnation: Incarnation, now: float
    ) -> tuple[list[LaneWrite], list[LaneAnswer]]:
        """Return the writes that may begin, and the others with their errors."""
        admitted: list[LaneWrite] = []
        refused: list[LaneAnswer] = []
        for write in batch:
            error = self._refusal(write, incarnation, now)
            if error is None:
                admitted.append(write)
            else:
                refused.append((write, error))
        return admitted, refused

    def _refusal(self, write: LaneWrite, incarnation: Incarnation, now: float) -> HalfwayError | None:
        reason = None
        if write.deadline < now:
            reason = "its deadline passed before it could begin"
        elif write.shard not in incarnation.shards:
            reason = f"shard {write.shard} was given up"
        elif not incarnation.listener.may_still_be_written(write):
            reason = "it is no longer current"
        if reason is not None:
            return NotWrittenError(f"{write.id}: {reason}", id=write.id)
        for message in write.messages:
            topic = self._log.topics.get(message.topic)
            if topic is None:
                return TopicUnavailableError(f"topic {message.topic!r} does not exist: create it", topic=message.topic)
            if message.topic in self._faults.denied_topics:
                return NotAuthorisedError(f"halfway may not write to topic {message.topic!r}", topic=message.topic)
            limit = topic.facts.max_message_bytes
            if write.size > limit and message.size > limit:
                return MessageTooLargeError(f"a record for topic {message.topic!r} is too large", topic=message.topic)
        return None

    def _commit(self, batch: Sequence[LaneWrite]) -> list[Written]:
        written = [self._write(write) for write in batch]
        for write, stands in zip(batch, written, strict=True):
            shard = self._log.shards[write.shard]
            if stands.half is not None:
                shard.half.mark()
            if stands.op is not None:
                shard.op.mark()
            if stands.parked is not None:
                shard.parked.mark()
        return written

    def _write(self, write: LaneWrite) -> Written:
        """Write real messages, op, half and parked, all at once: nothing else runs meanwhile."""
        now, total = self._clock.now_ms(), len(write.messages)
        for index, message in enumerate(write.messages, 1):
            headers = real_headers(message.headers, write.id, f"{index}/{total}", write.prepared_at)
            self._log.topics[message.topic].append(message.topic, message, headers, now)
        shard = self._log.shards[write.shard]
        op = half = parked = None
        if write.op is not None:
            op = shard.op.append(write.id, write.op, kept_headers("op", write.group, write.state))
        if write.half is not None:
            if isinstance(write.half, Tombstone):
                half = shard.half.append(write.id, None, kept_headers("half", write.group, write.state))
            else:
                half = shard.half.append(write.id, write.half, half_headers(write.half, write.state))
        if write.parked is not None:
            parked_value = None if isinstance(write.parked, Tombstone) else write.parked
            parked = shard.parked.append(write.id, parked_value, kept_headers("parked", write.group, write.state))
        return Written(half=half, op=op, parked=parked)
