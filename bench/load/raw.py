"""The raw limit: `python -m bench.load.raw PLAN RESULT`, two files of JSON (`plan.RawPlan`, `plan.RawResult`).

librdkafka alone, through confluent-kafka, on one thread of a separate process, with the coordinator's own producer
settings. For a group of n transactions with one message each, it writes the same bytes as the coordinator, except ids
and times:

1. n half records by an idempotent producer, acks=all, and waits until all are acknowledged;
2. one Kafka transaction with n real messages, n op markers and n tombstones, by two transactional producers in turn,
   as in the lane; the next one begins when this one has committed.

With more than one caller, the half records of the next group are produced before the Kafka transaction of this group
begins, so that they are sent in the meantime (`ahead`). With a single caller each step waits for the other.

n is the mean number of ends in the lane's Kafka transactions in the same scenario, and a group belongs to one shard, as
ids do that the coordinator creates at the same time. So the ratio is the cost of HTTP, JSON, validation, the fold and
the hand-over between threads, not the gain of larger groups. It can be above 1 if the coordinator has more half records
in flight than this loop.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import msgspec
from confluent_kafka import Producer

from bench.plan import GROUP, KEYS, SHARDS, VALUE_BYTES, RawPlan, RawResult
from bench.system import Broker
from halfway.coordinator import changes
from halfway.kafka.clients.config import MIB, KafkaConfig
from halfway.kafka.clients.transactional_producer import TransactionalProducer, initialised
from halfway.kafka.records.codec import encode_half, half_headers
from halfway.kafka.records.lane_records import Encoded, RecordLimits, encode
from halfway.protocol.entries import Pending
from halfway.protocol.ids import IdMaker
from halfway.protocol.records import Half, Message, fingerprint
from halfway.protocol.transactions import Cause, State

_REQUEST_S: Final = 30.0
_STALL_S: Final = 30.0


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """The records of one transaction, encoded in advance by the coordinator's code."""

    shard: int
    half: bytes
    half_headers: list[tuple[str, str | bytes | None]]
    ended: Encoded


def main(plan_path: str, result_path: str) -> None:
    """Carry out a plan."""
    plan = msgspec.json.decode(Path(plan_path).read_bytes(), type=RawPlan)
    config = KafkaConfig(
        properties={"bootstrap.servers": plan.bootstrap_servers},
        max_prepare_bytes=4 * MIB,
        prefix="_raw.",
        shards=SHARDS,
    )
    kafka = Broker(plan.bootstrap_servers)
    kafka.create_topic(plan.topic)
    kafka.create_topic(config.half_topic, SHARDS, **{"cleanup.policy": "compact"})
    kafka.create_topic(config.op_topic, SHARDS, **{"cleanup.policy": "compact,delete"})
    Path(result_path).write_bytes(msgspec.json.encode(_measure(config, plan)))


def _measure(config: KafkaConfig, plan: RawPlan) -> RawResult:
    """Measure for `run_s`, after an unmeasured `lead_s`."""
    groups = cycle([[_records(config, plan.topic, shard, at) for at in range(plan.ends)] for shard in range(SHARDS)])
    half_producer = Producer(config.producer(**{"linger.ms": 0, "queue.buffering.max.messages": 1_000_000}))
    run = uuid4().hex
    lanes = cycle(initialised(config, [f"raw-{run}.0", f"raw-{run}.1"], time.monotonic() + _REQUEST_S))
    counted, started = 0, time.perf_counter()
    measured_from, until = started + plan.lead_s, started + plan.lead_s + plan.run_s
    group = next(groups)
    _prepare(config, half_producer, group)
    while (now := time.perf_counter()) < until:
        if now < measured_from:
            started, counted = now, 0
        following = next(groups)
        half_producer.flush()
        if plan.ahead:
            _prepare(config, half_producer, following)
        _end(config, next(lanes), group)
        if not plan.ahead:
            _prepare(config, half_producer, following)
        group = following
        counted += 1
    return RawResult(tx_per_s=counted * plan.ends / (now - started))


def _prepare(config: KafkaConfig, producer: Producer, group: Sequence[Records]) -> None:
    produce: Any = producer.produce  # its annotations lack bytes in headers
    topic = config.half_topic
    for records in group:
        produce(topic, records.half, records.ended.key, records.shard, headers=records.half_headers)


def _end(config: KafkaConfig, producer: TransactionalProducer, group: Sequence[Records]) -> None:
    half_topic, op_topic = config.half_topic, config.op_topic
    producer.begin()
    produce = producer.produce
    for records in group:
        for real in records.ended.real:
            produce(real.topic, real.value, real.key, real.partition, headers=real.headers)
        for topic, record in ((op_topic, records.ended.op), (half_topic, records.ended.half)):
            if record is not None:
                produce(topic, record.value, records.ended.key, records.shard, headers=record.headers)
    producer.commit(_STALL_S)


_IDS: Final = IdMaker(SHARDS)


def _records(config: KafkaConfig, topic: str, shard: int, number: int) -> Records:
    now = time.time_ns() // 1_000_000
    messages = (Message(topic=topic, key=b"key-%05d" % (number % KEYS), value=b"x" * VALUE_BYTES),)
    content, name = fingerprint(GROUP, messages, None), _IDS.make(now, shard)
    half = Half(id=name, group=GROUP, messages=messages, prepared_at=now, since=now, fingerprint=content)
    fields = changes.OpFields(cause=Cause.PRODUCER, at=now, deadline=0, checks=0)
    return Records(
        shard=shard,
        half=encode_half(half),
        half_headers=half_headers(half, State.PREPARED.value),
        ended=encode(changes.committed(shard, Pending.of(0, half), half, fields), config, RecordLimits.needed(config)),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
