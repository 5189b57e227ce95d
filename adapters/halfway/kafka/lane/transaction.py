"""One Kafka transaction of the lane: its records and their offsets."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from halfway.coordinator.ports import LaneAnswers, Written
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.transactional_producer import ProducerFailedError, TransactionalProducer
from halfway.kafka.lane.preflight import LaneContext
from halfway.kafka.records.lane_records import Encoded, InternalRecord

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

        Raises:
            ProducerFailedError: a report is missing or has no offset; the Kafka transaction is committed nevertheless.

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

    Raises:
        ProducerFailedError: at any step: whether it stands is not known, and the producer must not be used again.

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


def _collector(offsets: list[int]) -> Report:
    def report(error: Any, message: Any) -> None:
        if error is None:
            offsets.append(message.offset())

    return report
