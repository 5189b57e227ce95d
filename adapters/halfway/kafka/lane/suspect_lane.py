"""The suspect lane: writes ends that may have made a Kafka transaction fail, apart from all others.

Suspects (topic, then id) run on the incarnation's third producer, `.q`, with a back-off for each topic. If a suspect
fails, its caller gets the error and the transaction stays pending. See docs/protocol.md#end-the-lane.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from halfway.coordinator.logging import LogSummary
from halfway.coordinator.ports import LaneAnswer, LaneWrite
from halfway.kafka.clients.threads import OwnedThread
from halfway.kafka.clients.transactional_producer import ProducerFailedError, TransactionalProducer
from halfway.kafka.lane.preflight import LaneContext, admit, largest_by_topic, still_wanted
from halfway.kafka.lane.quarantine import Blame, Route
from halfway.kafka.lane.queue import BatchLimits, LaneQueue, Release
from halfway.kafka.lane.rehearsal import Rehearsal, RehearsalFailure
from halfway.kafka.lane.transaction import write_transaction
from halfway.kafka.records.lane_records import Encoded, UserRecord
from halfway.protocol.errors import (
    HalfwayError,
    KafkaUnavailableError,
    OverloadedError,
    TopicUnavailableError,
)

log = structlog.get_logger()
_refused: Final = LogSummary(log, "info", "end_refused")

_IDLE_S: Final = 1.0
_CAPACITY: Final = 2_000
_LIMITS: Final = BatchLimits(ends=200, payload_bytes=4 * 1024 * 1024)


class SuspectLane(OwnedThread):
    """The suspect lane of one incarnation: a thread, a queue, the producer `.q`, and a rehearsal before each commit.

    It ends when the queue is closed, or when its producer first fails.
    """

    def __init__(
        self,
        context: LaneContext,
        producer: TransactionalProducer,
        rehearsal: Rehearsal,
        on_failure: Callable[[ProducerFailedError, Sequence[LaneWrite]], None],
    ) -> None:
        """Take over an initialised producer."""
        super().__init__(self._run, "halfway-suspects")
        self._context = context
        self._producer = producer
        self._rehearsal = rehearsal
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._pending: Counter[int] = Counter()
        self.queue = LaneQueue(_CAPACITY, context.config.lane_queue_bytes, _LIMITS)
        self.under_way: Sequence[LaneWrite] = ()
        """The writes that the thread is working on; they are lost if the lane hangs and is ended."""

    def put(self, write: LaneWrite, answers: list[LaneAnswer]) -> None:
        """Queue a suspect; called on the lane's thread. If there is no room, add a refusal to `answers`."""
        with self._lock:
            self._pending[write.shard] += 1
        for _, refusal in self.queue.put_all([write]):
            full = isinstance(refusal, OverloadedError)
            detail = "too many ends to suspect topics wait: try again later"
            answers.append((write, TopicUnavailableError(detail) if full else refusal))
            self._done([write])

    def works_for(self, shard: int) -> bool:
        """Return whether a write of this shard is queued or under way."""
        with self._lock:
            return self._pending[shard] > 0

    def _done(self, writes: Sequence[LaneWrite]) -> None:
        with self._lock:
            for write in writes:
                self._pending[write.shard] -= 1

    def _run(self) -> None:
        try:
            while not self.queue.closed:
                taken = self.queue.take(_IDLE_S)
                if taken is None or isinstance(taken, Release):
                    self._producer.idle()
                    self._rehearsal.idle()
                    continue
                self.under_way = taken
                for group in self._groups(taken):
                    self._write(group)
                    self._done(group)
                    self._producer.demand_unworn()
                self.under_way = ()
        except ProducerFailedError as error:
            self._on_failure(error, self.under_way)
        except Exception as error:
            log.exception("suspects_thread_failed")
            self._on_failure(ProducerFailedError("suspects", repr(error)), self.under_way)
        finally:
            self._producer.abandon()
            self._rehearsal.close()

    def _groups(self, batch: Sequence[LaneWrite]) -> list[list[LaneWrite]]:
        """Group suspects; each suspect that failed together with others gets a group of its own."""
        together: list[LaneWrite] = []
        alone: list[list[LaneWrite]] = []
        now = time.monotonic()
        for write in batch:
            route = self._context.quarantine.route(write.id, {}, now)
            if route is Route.ALONE:
                alone.append([write])
            else:
                together.append(write)
        return [together, *alone] if together else alone

    def _write(self, group: Sequence[LaneWrite]) -> None:
        """Rehearse a group, refuse the bad writes, and write the others in one Kafka transaction."""
        refused: list[LaneAnswer] = []
        try:
            good = self._rehearse(admit(self._context, group, refused, self._producer.shows), refused)
        except KafkaUnavailableError as error:
            good = []
            refused.extend((write, TopicUnavailableError(str(error))) for write in group)
        wanted = {id(write) for write in still_wanted(self._context, [work.write for work in good], refused)}
        writes = [work for work in good if id(work.write) in wanted]
        if refused:
            self._context.loop.post(self._context.answer, refused)
        if writes:
            self._commit(writes)

    def _commit(self, writes: Sequence[Encoded]) -> None:
        """Write one Kafka transaction on `.q`. A failure ends the incarnation, as in the other lane."""
        quarantine, ids = self._context.quarantine, [work.write.id for work in writes]
        try:
            transaction = write_transaction(self._producer, self._context.config, writes)
        except ProducerFailedError as failure:
            now = time.monotonic()
            if failure.fenced:
                pass
            elif len(writes) == 1:
                detail = f"it could not be written: {failure}"
                blame = Blame(
                    refusal=TopicUnavailableError,
                    topic=self._context.config.op_topic,
                    detail=detail,
                    of_internal_records=True,
                )
                quarantine.blame_id(ids[0], blame, now)
            else:
                quarantine.isolate(ids, now)
            raise
        quarantine.clear_ids(ids)
        transaction.answer(self._context)

    def _rehearse(self, writes: Sequence[Encoded], refused: list[LaneAnswer]) -> list[Encoded]:
        """Rehearse the messages topic by topic, and return the writes without a bad message."""
        bad: set[str] = set()
        for topic in dict.fromkeys(message.topic for work in writes for message in work.real):
            to_topic = [
                work for work in writes if work.write.id not in bad and any(m.topic == topic for m in work.real)
            ]
            for work, failure in self._culprits(topic, to_topic):
                bad.add(work.write.id)
                refused.append((work.write, self._blame(work, failure)))
        return [work for work in writes if work.write.id not in bad]

    def _blame(self, work: Encoded, failure: RehearsalFailure) -> HalfwayError:
        write, now = work.write, time.monotonic()
        _refused.note({"topic": failure.topic, "group": write.group}, id=write.id, detail=failure.detail)
        if failure.of_the_topic:
            return failure.blame().error(self._context.quarantine.backoff_of(failure.topic, now))
        return self._context.quarantine.blame_id(write.id, failure.blame(), now)

    def _culprits(self, topic: str, writes: Sequence[Encoded]) -> list[tuple[Encoded, RehearsalFailure]]:
        """Find the bad writes to one topic: all of them if the topic is bad, else by bisection."""
        if not writes:
            return []
        quarantine = self._context.quarantine
        largest = max(largest_by_topic(work.write)[topic] for work in writes)
        failure = self._rehearsal.attempt(topic, [m for work in writes for m in _messages_for(work, topic)])
        if failure is None:
            quarantine.clear_topic(topic, largest, time.monotonic())
            return []
        if failure.of_the_topic:
            quarantine.blame_topic(failure.blame(), time.monotonic())
            return [(work, failure) for work in writes]
        if len(writes) == 1:
            quarantine.watch(topic, largest if failure.of_the_size else 0, time.monotonic())
            return [(writes[0], failure)]
        middle = len(writes) // 2
        return self._culprits(topic, writes[:middle]) + self._culprits(topic, writes[middle:])


def _messages_for(encoded: Encoded, topic: str) -> list[UserRecord]:
    return [message for message in encoded.real if message.topic == topic]
