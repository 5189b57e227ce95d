"""One Kafka transaction of the lane: what may be in it, its records, and their offsets (docs/protocol.md#end-the-lane).

`admit` refuses what metadata shows cannot be written, before anything is produced. Only this keeps a known bad end from
costing a Kafka transaction.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import structlog
from msgspec import structs

from halfway.coordinator import tracing
from halfway.coordinator.ports import LaneAnswer, LaneAnswers, LaneWrite, Observer, ShardListener, Written
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.threads import Loop
from halfway.kafka.clients.transactional_producer import ProducerFailedError, TransactionalProducer
from halfway.kafka.lane.quarantine import Quarantine
from halfway.kafka.records.lane_records import (
    ANY_PARTITION,
    Encoded,
    InternalRecord,
    RecordLimits,
    UserRecord,
    encode,
    oversized,
)
from halfway.kafka.topics.metadata import TopicMetadata, WritablePartitions
from halfway.protocol.errors import (
    HalfwayError,
    KafkaUnavailableError,
    MessageTooLargeError,
    NotAuthorisedError,
    NotWrittenError,
    TopicUnavailableError,
)

log = structlog.get_logger()

_METADATA_TIMEOUT_S: Final = 5.0
_DOES_NOT_EXIST: Final = "topic {!r} does not exist: create it, and the end can be done"
_NOT_SHOWN: Final = "topic {!r} has just changed its partitions: try again"

ShowsPartitions = Callable[[str, int], bool]
"""Returns whether the writing producer knows this many partitions of a topic; it cannot write to a partition beyond."""


@dataclass(frozen=True, kw_only=True)
class LaneContext:
    """What the two writers of an incarnation share: the lane and the suspect lane."""

    config: KafkaConfig
    loop: Loop
    listener: ShardListener
    answer: Callable[[LaneAnswers], None]
    """Answers writes, on the loop's thread."""
    observer: Observer
    destinations: TopicMetadata
    quarantine: Quarantine
    shards: set[int]
    """The shards whose ends may be written; changed on the loop's thread only."""
    limits: RecordLimits


def largest_by_topic(write: LaneWrite) -> dict[str, int]:
    """Return the real topics of a write, each with the size of its largest message in bytes."""
    largest: dict[str, int] = {}
    for message in write.messages:
        largest[message.topic] = max(largest.get(message.topic, 0), message.size)
    return largest


def admit(
    context: LaneContext, batch: Sequence[LaneWrite], answers: list[LaneAnswer], shows: ShowsPartitions
) -> list[Encoded]:
    """Encode the writes that may be written now and return them; add the others to `answers`, each with its error.

    After this, `produce` cannot fail half way, and a closed partition holds up no other write. Refused are:

    - writes past their deadline, of a released shard, or no longer current (NotWrittenError);
    - writes to a topic or partition that does not exist or takes no records now (TopicUnavailableError);
    - writes with a record that its internal topic would refuse (MessageTooLargeError);
    - writes that cannot be encoded.

    The topics are looked up first, because that may take seconds: in the meantime a check can say commit, and then the
    write of a policy is no longer current.
    """
    targets = _targets(context, batch, shows)
    admitted: list[Encoded] = []
    for write in still_wanted(context, batch, answers):
        result = _encode(context, write, targets)
        if isinstance(result, Encoded):
            admitted.append(result)
        else:
            answers.append((write, result))
    return admitted


def still_wanted(context: LaneContext, batch: Sequence[LaneWrite], answers: list[LaneAnswer]) -> list[LaneWrite]:
    """Return the writes that their deadline, shard and the service still allow; the others get NotWrittenError."""
    now, shards, may_still_be_written = context.loop.time(), context.shards, context.listener.may_still_be_written
    wanted: list[LaneWrite] = []
    for write in batch:
        if write.deadline < now:
            reason = "its deadline passed before it could begin"
        elif write.shard not in shards:
            reason = f"shard {write.shard} was given up"
        elif not may_still_be_written(write):
            reason = "it is no longer current"
        else:
            wanted.append(write)
            continue
        answers.append((write, NotWrittenError(f"{write.id}: {reason}", id=write.id)))
    return wanted


def _targets(
    context: LaneContext, batch: Sequence[LaneWrite], shows: ShowsPartitions
) -> dict[str, _Refusal | WritablePartitions]:
    """Return the topics that may not take every message of a batch, each with the error or its writable partitions.

    Usually there are none, and then no message is checked further.
    """
    names: set[str] = set()
    with_partition: set[str] = set()
    for write in batch:
        for message in write.messages:
            names.add(message.topic)
            if message.partition is not None:
                with_partition.add(message.topic)
    if not names:
        return {}
    targets: dict[str, _Refusal | WritablePartitions] = {}
    for name, partitions in _look_up(context, names).items():
        if partitions is None:
            targets[name] = _Refusal(TopicUnavailableError, name, _DOES_NOT_EXIST.format(name))
        elif isinstance(partitions, _Refusal):
            targets[name] = partitions
        elif name in with_partition and not shows(name, partitions.partitions):
            targets[name] = _Refusal(TopicUnavailableError, name, _NOT_SHOWN.format(name))
        elif partitions.closed or name in with_partition:
            targets[name] = partitions
    return targets


def _look_up(context: LaneContext, names: set[str]) -> Mapping[str, WritablePartitions | _Refusal | None]:
    """Look topics up: all in one request, or one by one if one of them makes that request fail."""
    deadline = time.monotonic() + _METADATA_TIMEOUT_S
    try:
        return context.destinations.fresh(names, _METADATA_TIMEOUT_S)
    except (NotAuthorisedError, KafkaUnavailableError) as error:
        if "topic" not in error.fields:
            raise
    results: dict[str, WritablePartitions | _Refusal | None] = {}
    for name in names:
        try:
            results |= context.destinations.fresh([name], max(0.0, deadline - time.monotonic()))
        except NotAuthorisedError as error:
            results[name] = _Refusal(NotAuthorisedError, name, error.detail)
        except KafkaUnavailableError as error:
            # When time is up, only the topics that Kafka has not described are refused.
            if "topic" not in error.fields and time.monotonic() < deadline:
                raise
            results[name] = _Refusal(TopicUnavailableError, name, error.detail)
    return results


class _Refusal(NamedTuple):
    error: type[TopicUnavailableError | NotAuthorisedError]
    topic: str
    detail: str


def _first_refusal(write: LaneWrite, targets: Mapping[str, _Refusal | WritablePartitions]) -> HalfwayError | None:
    """Return the error of a message that cannot be written now, None if all of them can."""
    for message in write.messages:
        target = targets.get(message.topic)
        if isinstance(target, _Refusal):
            return target.error(target.detail, topic=target.topic)
        detail = None if target is None else target.refusal(message.partition, message.key)
        if detail is not None:
            return TopicUnavailableError(detail, topic=message.topic)
    return None


def _with_open_partition(message: UserRecord, targets: Mapping[str, _Refusal | WritablePartitions]) -> UserRecord:
    """Choose an open partition for a message that may go to any partition of its topic."""
    target = targets.get(message.topic)
    if (
        message.partition == ANY_PARTITION
        and message.key is None
        and isinstance(target, WritablePartitions)
        and target.closed
    ):
        return structs.replace(message, partition=target.any_open())
    return message


def _encode(
    context: LaneContext, write: LaneWrite, targets: Mapping[str, _Refusal | WritablePartitions]
) -> Encoded | HalfwayError:
    if targets:
        refusal = _first_refusal(write, targets)
        if refusal is not None:
            return refusal
    try:
        encoded = encode(write, context.config, context.limits)
        if targets:
            real = [_with_open_partition(message, targets) for message in encoded.real]
            encoded = structs.replace(encoded, real=real)
    except Exception:
        # A retry would fail in the same way, so the error is not retryable. It must not contain parts of the payload.
        log.exception("lane_write_not_encoded", id=write.id, shard=write.shard)
        return HalfwayError(f"a record of {write.id!r} cannot be encoded: the log of the coordinator says why")
    topic = oversized(encoded, context.config, context.limits)
    if topic is not None:
        detail = f"a record of {write.id} is larger than topic {topic!r} takes: raise its max.message.bytes"
        return MessageTooLargeError(detail, topic=topic)
    return encoded


_MOST_AHEAD_MS: Final = 50 * 60_000
"""Kafka's default limit is an hour ahead of the broker's clock, which may differ from this one."""

Report = Callable[[Any, Any], None]
Place = tuple[str, int]


class LaneTransaction:
    """One Kafka transaction with the records of writes: a method for each step of docs/protocol.md#end-the-lane.

    They are called in the order of the steps.

    In each partition the records stand in the order in which they were produced (the producer is idempotent), so the
    offsets of a partition, sorted, belong to its records in that order: a report needs no state of its own.
    """

    def __init__(self, producer: TransactionalProducer, config: KafkaConfig, writes: Sequence[Encoded]) -> None:
        self._producer = producer
        self._produce = producer.produce
        self._writes = writes
        self._stall_s = config.lane_stall_s
        self._half, self._op, self._parked = config.half_topic, config.op_topic, config.parked_topic
        self._offsets: dict[Place, list[int]] = {}
        self._produced: dict[Place, int] = {}
        self._now = time.time_ns() // 1_000_000
        self._began = time.monotonic()

    def begin(self) -> None:
        """Step 1: begin locally; Kafka learns of it with the first record."""
        self._producer.begin()

    def produce_messages(self) -> None:
        """Step 2: for each commit, the real messages, with the time of this commit as timestamp."""
        produce, now = self._produce, self._now
        for encoded in self._writes:
            for message in encoded.real:
                produce(message.topic, message.value, message.key, message.partition, None, None, now, message.headers)

    def produce_op_markers(self) -> None:
        """Step 3: the op marker to op[s]."""
        self._produce_internal(self._op, [(encoded, encoded.op) for encoded in self._writes])

    def produce_tombstones(self) -> None:
        """Step 4: the tombstone (or record) to half[s] and to parked[s]."""
        self._produce_internal(self._half, [(encoded, encoded.half) for encoded in self._writes])
        self._produce_internal(self._parked, [(encoded, encoded.parked) for encoded in self._writes])

    def _produce_internal(self, topic: str, records: Sequence[tuple[Encoded, InternalRecord | None]]) -> None:
        """Produce records of one internal topic, and gather their offsets by partition."""
        produce, now = self._produce, self._now
        reports: dict[int, Report] = {}
        produced: Counter[int] = Counter()
        for encoded, record in records:
            if record is None:
                continue
            write = encoded.write
            shard = write.shard
            report = reports.get(shard)
            if report is None:
                report = reports[shard] = _collector(self._offsets.setdefault((topic, shard), []))
            produced[shard] += 1
            # A recovery reads op by time: no outcome may lie before its prepare, even if the clock went back. But Kafka
            # refuses records that are too far ahead, so a prepare by a wrong clock does not count for more than this.
            at = max(now, min(write.prepared_at, now + _MOST_AHEAD_MS))
            produce(topic, record.value, encoded.key, shard, report, None, at, record.headers)
        for shard, count in produced.items():
            self._produced[topic, shard] = count

    def commit(self) -> None:
        """Step 5: commit; the callers are answered only afterwards."""
        self._producer.commit(self._stall_s)

    def answer(self, context: LaneContext) -> None:
        """Step 5, once it is committed: answer the callers, on the loop's thread.

        Raises ProducerFailedError: a report is missing or has no offset; the Kafka transaction is committed
        nevertheless.
        """
        answers = list(zip([encoded.write for encoded in self._writes], self._written(), strict=True))
        size = sum([write.size for write, _ in answers])
        context.loop.post(_answer, context, answers, size, time.monotonic() - self._began)

    def _written(self) -> list[Written]:
        """Return the offsets of each write, in the order of the writes."""
        places: dict[Place, Iterator[int]] = {}
        for place, offsets in self._offsets.items():
            offsets.sort()
            if len(offsets) != self._produced[place] or offsets[0] < 0:
                raise ProducerFailedError("offsets", f"those of {place[0]}[{place[1]}] are not known")
            places[place] = iter(offsets)
        half, op, parked = self._half, self._op, self._parked
        return [
            Written(
                half=None if encoded.half is None else next(places[half, encoded.write.shard]),
                op=None if encoded.op is None else next(places[op, encoded.write.shard]),
                parked=None if encoded.parked is None else next(places[parked, encoded.write.shard]),
            )
            for encoded in self._writes
        ]


def write_transaction(
    producer: TransactionalProducer, config: KafkaConfig, writes: Sequence[Encoded]
) -> LaneTransaction:
    """Carry out the steps of docs/protocol.md#end-the-lane up to the commit; return the transaction that now stands.

    Raises ProducerFailedError: at any step: whether it stands is not known, and the producer must not be used again.
    """
    transaction = LaneTransaction(producer, config, writes)
    try:
        transaction.begin()
        transaction.produce_messages()
        transaction.produce_op_markers()
        transaction.produce_tombstones()
        transaction.commit()
    except ProducerFailedError:
        raise
    except Exception as error:
        raise producer.failure("produce", error) from error
    return transaction


def _answer(context: LaneContext, answers: LaneAnswers, size: int, seconds: float) -> None:
    context.answer(answers)
    context.observer.lane_committed(len(answers), size, seconds)
    tracing.sent(answers, seconds)


def _collector(offsets: list[int]) -> Report:
    def report(error: Any, message: Any) -> None:
        if error is None:
            offsets.append(message.offset())

    return report
