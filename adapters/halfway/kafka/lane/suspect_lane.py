"""The suspect lane: writes ends that may have made a Kafka transaction fail, apart from all others.

`admit` cannot know what no metadata shows: a topic that hangs, a broker that refuses a record. Without this lane, each
retry of such an end would make the Kafka transactions of all others fail. Suspects (topic, then id) run on the
incarnation's third producer, `.q`, with a back-off for each topic. If a suspect fails, its caller gets the error and
the transaction stays pending. See docs/protocol.md#end-the-lane.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog
from confluent_kafka import KafkaError

from halfway.coordinator.logging import LogSummary
from halfway.coordinator.ports import LaneAnswer, LaneWrite
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.threads import OwnedThread
from halfway.kafka.clients.transactional_producer import (
    ProducerFailedError,
    TransactionalProducer,
    fence,
    initialised,
    rehearsal_id,
)
from halfway.kafka.lane.quarantine import Blame, Route
from halfway.kafka.lane.queue import BatchLimits, LaneQueue, Release
from halfway.kafka.lane.transaction import LaneContext, admit, largest_by_topic, still_wanted, write_transaction
from halfway.kafka.records.lane_records import Encoded, UserRecord
from halfway.protocol.errors import (
    HalfwayError,
    KafkaUnavailableError,
    MessageTooLargeError,
    NotAuthorisedError,
    OverloadedError,
    TopicUnavailableError,
)

log = structlog.get_logger()

_DELIVERY_S: Final = 10.0
_INITIALISE_S: Final = 10.0
_ABORT_S: Final = 5.0
_MAX_CONCURRENT_ABORTS: Final = 16
_PROPAGATION_MS: Final = 500
_TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
_NOT_AUTHORISED: Final = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED})
_MESSAGE_ERRORS: Final = _TOO_LARGE | {
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_MSG_SIZE,
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001 - the names of librdkafka's own errors start so
}
_PURGED: Final = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001 - as above


class RehearsalFailure:
    """Why a rehearsal of messages for one topic failed."""

    def __init__(self, topic: str, code: int | None, detail: str) -> None:
        """Keep the code of the Kafka error; None if time ran out without an error."""
        self.topic = topic
        self.code = code
        self.detail = detail

    @property
    def of_the_topic(self) -> bool:
        """Whether the whole topic is bad, not just one of the messages."""
        return self.code not in _MESSAGE_ERRORS

    @property
    def of_the_size(self) -> bool:
        """Whether a message is too large."""
        return self.code in _TOO_LARGE

    def blame(self) -> Blame:
        if self.code in _TOO_LARGE:
            return Blame(
                refusal=MessageTooLargeError,
                topic=self.topic,
                detail=f"a message is larger than topic {self.topic!r} takes: raise its max.message.bytes or roll back",
            )
        if self.code in _NOT_AUTHORISED:
            return Blame(
                refusal=NotAuthorisedError,
                topic=self.topic,
                detail=f"Kafka does not let halfway write to topic {self.topic!r}: grant it WRITE",
            )
        if self.code == KafkaError.INVALID_TIMESTAMP:
            return Blame(
                refusal=TopicUnavailableError,
                topic=self.topic,
                detail=f"topic {self.topic!r} does not take the time of this instance's clock: set the clock right, or "
                "raise the topic's message.timestamp.after.max.ms and message.timestamp.before.max.ms",
            )
        detail = f"topic {self.topic!r} cannot be written now: {self.detail}"
        if self.code == KafkaError.INVALID_RECORD:
            detail = (
                f"topic {self.topic!r} refuses a message ({self.detail}): if it is compacted now, it takes none "
                "without a key; set its cleanup.policy to delete, or roll back"
            )
        return Blame(refusal=TopicUnavailableError, topic=self.topic, detail=detail)


class Rehearsal:
    """Writes messages and aborts, with a producer that is replaced after each failure. Used by one thread at a time.

    A failure of `.q` ends the incarnation, so without a rehearsal every try of a bad end would end one. Its
    transactional id never commits and is in no owner record, so nothing that it writes can resolve a transaction. It
    writes to real topics only, one after the other, so that a topic that hangs does not hold back the readers of the
    others. The next owner of the shards aborts its open transaction: a paused instance delays no reader.
    """

    def __init__(self, config: KafkaConfig, transactional_id: str) -> None:
        """Keep the configuration; nothing connects before the first try."""
        self._config = config
        self._transactional_id = transactional_id
        self._producer: TransactionalProducer | None = None

    def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.abandon()

    def idle(self) -> None:
        """Serve the producer's events. If it has failed, drop it; the next try creates another."""
        if self._producer is not None:
            try:
                self._producer.idle()
            except ProducerFailedError as error:
                log.info("rehearsal_failed", error=str(error))
                self.close()

    def attempt(self, topic: str, messages: Sequence[UserRecord]) -> RehearsalFailure | None:
        """Write messages of one topic and abort; return None if every in-sync replica took them."""
        failure: RehearsalFailure | None = None
        try:
            failure = self._attempt(topic, messages)
        except ProducerFailedError as error:
            failure = RehearsalFailure(topic, error.code, str(error))
        if failure is not None:
            self.close()
        return failure

    def _attempt(self, topic: str, messages: Sequence[UserRecord]) -> RehearsalFailure | None:
        producer = self._initialised_producer()
        errors: list[KafkaError] = []
        offsets: list[int] = []
        report = _delivery_callback(errors, offsets)
        producer.begin()
        for message in messages:
            try:
                producer.produce(
                    message.topic,
                    message.value,
                    message.key,
                    message.partition,
                    on_delivery=report,
                    headers=message.headers,
                )
            except Exception as error:  # noqa: BLE001 - confluent-kafka raises many kinds, and each is a failure
                failed = producer.failure("produce", error)
                self._abort_failed(producer)
                return RehearsalFailure(topic, failed.code, str(failed))
        delivered = producer.flush(time.monotonic() + _DELIVERY_S, lambda: bool(errors))
        if errors:
            self._abort_failed(producer)
            return RehearsalFailure(topic, errors[0].code(), f"{errors[0].name()}: {errors[0].str()}")
        if not delivered:
            self._abort_failed(producer)
            return RehearsalFailure(topic, None, f"no acknowledgement in {_DELIVERY_S:g} s")
        producer.abort(_ABORT_S)
        if len(offsets) < len(messages):
            # librdkafka gave up the Kafka transaction and purged the messages; only its log contains the reason.
            return RehearsalFailure(topic, None, "Kafka refuses it in a transaction")
        return None

    def _abort_failed(self, producer: TransactionalProducer) -> None:
        """Abort a failed transaction; else the next `init_transactions` or the transaction time-out does."""
        try:
            producer.abort(_ABORT_S)
        except ProducerFailedError as error:
            log.info("rehearsal_not_aborted", error=str(error))

    def _initialised_producer(self) -> TransactionalProducer:
        if self._producer is None:
            overrides: dict[str, Any] = {"topic.metadata.propagation.max.ms": _PROPAGATION_MS}
            [self._producer] = initialised(
                self._config,
                [self._transactional_id],
                time.monotonic() + _INITIALISE_S,
                message_timeout_s=_DELIVERY_S,
                **overrides,
            )
        return self._producer


class _RehearsalAborts:
    """Aborts the open transactions of former owners' rehearsals in the background, so that no acquisition waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: set[str] = set()

    def start(self, config: KafkaConfig, transactional_id: str) -> None:
        with self._lock:
            if transactional_id in self._under_way or len(self._under_way) >= _MAX_CONCURRENT_ABORTS:
                return  # its Kafka transaction times out
            self._under_way.add(transactional_id)
        threading.Thread(
            target=self._run, args=(config, transactional_id), name="halfway-end-rehearsal", daemon=True
        ).start()

    def _run(self, config: KafkaConfig, transactional_id: str) -> None:
        try:
            fence(config, [transactional_id], time.monotonic() + config.transaction_timeout_s)
        except ProducerFailedError as error:
            log.info("rehearsal_not_aborted", error=str(error))
        finally:
            with self._lock:
                self._under_way.discard(transactional_id)


_ABORTS: Final = _RehearsalAborts()


def end_rehearsal(config: KafkaConfig, incarnation: str) -> None:
    """Start to abort the open transaction of a former owner's rehearsal, so that it holds back no consumer.

    This does not wait for the abort, which may take long: the rehearsed topic may take no writes. A rehearsal commits
    nothing, so safety does not depend on the abort.
    """
    _ABORTS.start(config, rehearsal_id(config.prefix, incarnation))


def _delivery_callback(errors: list[KafkaError], offsets: list[int]) -> Callable[[Any, Any], None]:
    """Return a delivery callback that collects errors, and the offsets of acknowledged messages."""

    def report(error: Any, message: Any) -> None:
        if error is None:
            offsets.append(message.offset())
        elif error.code() not in _PURGED:
            errors.append(error)

    return report


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
