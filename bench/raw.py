"""The raw limit: `python -m bench.raw PLAN RESULT`, two files of JSON (`plan.RawPlan`, `plan.RawResult`).

librdkafka alone, through confluent-kafka, on one thread of a process of its own, with the very producer settings of
the coordinator. For a group of n transactions, of one message each, it writes what the coordinator writes, byte for
byte but for ids and times:

1. n half records by an idempotent producer, acks=all, and waits until all are acknowledged;
2. one Kafka transaction with n real messages, n op markers and n tombstones, by two transactional producers in turn,
   as in the lane; the next begins when it has committed.

Where more than one caller was at work, the half records of the next group are given to librdkafka before the Kafka
transaction of this one begins, and so travel meanwhile (`ahead`); with a single caller each waits for the other.

n is the mean of ends in a Kafka transaction that the coordinator's lane reached in the same scenario, and a group
belongs to one shard, as ids that the coordinator makes at one time do. So the ratio tells what HTTP, JSON,
validation, the fold and the hand-over between threads cost, and not what a larger group would bring. It can be above
1 where the coordinator has more half records under way at once than this loop.
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
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined] # public, but not for mypy

from bench.figures import cpu_us
from bench.plan import GROUP, KEYS, PARTITIONS, SHARDS, VALUE_BYTES, RawPlan, RawResult
from halfway.domain.ids import partition_for_key, server_id
from halfway.domain.records import Half, Message, fingerprint
from halfway.domain.shard import Pending
from halfway.domain.transaction import Cause, State
from halfway.kafka.clients.config import MIB, KafkaConfig
from halfway.kafka.clients.transactional_producer import TransactionalProducer, initialised
from halfway.kafka.records.codec import encode_half, half_headers
from halfway.kafka.records.lane_records import Encoded, encode
from halfway.service.resolve import changes

_ASK_S: Final = 30.0
_STALL_S: Final = 30.0


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """One transaction's records, encoded beforehand as the coordinator encodes them."""

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
    _create_topics(config, plan.topic)
    Path(result_path).write_bytes(msgspec.json.encode(_measure(config, plan)))


def _create_topics(config: KafkaConfig, topic: str) -> None:
    wanted = {topic: (PARTITIONS, "delete"), config.half_topic: (SHARDS, "compact")}
    wanted[config.op_topic] = (SHARDS, "compact,delete")
    admin = AdminClient({"bootstrap.servers": config.properties["bootstrap.servers"]})
    new = [NewTopic(name, count, 1, config={"cleanup.policy": policy}) for name, (count, policy) in wanted.items()]
    for made in admin.create_topics(new, operation_timeout=_ASK_S, request_timeout=_ASK_S).values():
        try:
            made.result(_ASK_S)
        except KafkaException as error:
            if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
                raise


def _measure(config: KafkaConfig, plan: RawPlan) -> RawResult:
    """Measure over `run_s`, after `lead_s` that do not count."""
    groups = cycle(_groups(config, plan))
    half_producer = Producer(config.producer(**{"linger.ms": 0, "queue.buffering.max.messages": 1_000_000}))
    run = uuid4().hex
    lanes = cycle(initialised(config, [f"raw-{run}.0", f"raw-{run}.1"], time.monotonic() + _ASK_S))
    counted, began, cpu = 0, time.perf_counter(), _cpu(plan)
    measured_from, until = began + plan.lead_s, began + plan.lead_s + plan.run_s
    group = next(groups)
    _prepare(config, half_producer, group)
    while (now := time.perf_counter()) < until:
        if now < measured_from:
            began, counted, cpu = now, 0, _cpu(plan)
        following = next(groups)
        half_producer.flush()
        if plan.ahead:
            _prepare(config, half_producer, following)
        _end(config, next(lanes), group)
        if not plan.ahead:
            _prepare(config, half_producer, following)
        group = following
        counted += 1
    used = {name: after - cpu[name] for name, after in _cpu(plan).items()}
    return RawResult(tx_per_s=counted * plan.ends / (now - began), kafka_transactions=counted, cpu_us=used)


def _cpu(plan: RawPlan) -> dict[str, float]:
    return {name: cpu_us(pid) for name, pid in plan.pids.items()}


def _prepare(config: KafkaConfig, producer: Producer, group: Sequence[Records]) -> None:
    produce: Any = producer.produce  # its annotations know no bytes in headers
    topic = config.half_topic
    for one in group:
        produce(topic, one.half, one.ended.key, one.shard, headers=one.half_headers)


def _end(config: KafkaConfig, producer: TransactionalProducer, group: Sequence[Records]) -> None:
    half_topic, op_topic = config.half_topic, config.op_topic
    producer.begin()
    produce = producer.produce
    for one in group:
        for real in one.ended.real:
            produce(real.topic, real.value, real.key, real.partition, headers=real.headers)
        for topic, kept in ((op_topic, one.ended.op), (half_topic, one.ended.half)):
            if kept is not None:
                produce(topic, kept.value, one.ended.key, one.shard, headers=kept.headers)
    producer.commit(_STALL_S)


def _groups(config: KafkaConfig, plan: RawPlan) -> list[list[Records]]:
    """Return one group for each shard that groups begin with."""
    keys = _keys(plan.partitions)
    return [
        [
            _one(config, plan.topic, (first + number % plan.shards) % SHARDS, keys[number % len(keys)])
            for number in range(plan.ends)
        ]
        for first in range(SHARDS)
    ]


def _keys(partitions: int) -> list[bytes]:
    """Return keys that go to so many partitions of the real topic."""
    keys = [b"key-%05d" % number for number in range(KEYS)]
    return [key for key in keys if partition_for_key(key, PARTITIONS) < partitions]


def _one(config: KafkaConfig, topic: str, shard: int, key: bytes) -> Records:
    now = time.time_ns() // 1_000_000
    messages = (Message(topic=topic, key=key, value=b"x" * VALUE_BYTES),)
    half = Half(
        id=server_id(shard, uuid4()),
        group=GROUP,
        messages=messages,
        prepared_at=now,
        since=now,
        fingerprint=fingerprint(GROUP, messages, None),
    )
    told = changes.OpFields(cause=Cause.PRODUCER, at=now, deadline=0, checks=0)
    return Records(
        shard=shard,
        half=encode_half(half),
        half_headers=half_headers(half, State.PREPARED.value),
        ended=encode(changes.committed(shard, Pending.of(0, half), half, told), config),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
