"""Acquiring shards on a real broker: what a former owner wrote is folded, what it left open is settled."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from halfway.domain.records import Message, Owner
from halfway.domain.transaction import State
from halfway.kafka.acquire import Acquired, AcquireError, Acquisition
from halfway.kafka.codec import KIND_OWNER, decode_owner, encode_owner, record_headers
from halfway.kafka.config import KafkaConfig
from halfway.kafka.cursors import KafkaCursors
from halfway.kafka.lane_producer import ProducerFailedError, TransactionalProducer, initialised
from halfway.service.ports import Cursors
from tests.fixtures_kafka import Kafka
from tests.integration.cluster_harness import (
    PATIENCE_S,
    commit_of,
    config_for,
    create_internal_topics,
    create_topics,
    half,
    prepare,
    read_topic,
    running,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(kafka: Kafka) -> KafkaConfig:
    made = config_for(kafka.bootstrap_servers)
    create_internal_topics(made)
    create_topics(made, {made.prefix + "orders": 1})
    return made


class GivenCursors:
    """Cursors that a test gives."""

    def __init__(self, cursors: dict[int, Cursors] | None = None) -> None:
        self._cursors = cursors or {}

    def load(self, shards: Sequence[int]) -> dict[int, Cursors]:
        return {shard: self._cursors[shard] for shard in shards if shard in self._cursors}


def acquisition(config: KafkaConfig, incarnation: str, shards: Sequence[int], **fields: object) -> Acquisition:
    settings: dict[str, object] = {
        "lane_ids": tuple(f"{config.prefix}{incarnation}.{name}" for name in ("0", "1", "q")),
        "cursors": GivenCursors(),
        "deadline": time.monotonic() + PATIENCE_S,
        "cancelled": lambda: False,
        "skipped": lambda _topic, _reason: None,
    }
    settings |= fields
    return Acquisition(config=config, incarnation=incarnation, shards=shards, **settings)  # type: ignore[arg-type]


def lane_of(config: KafkaConfig, incarnation: str) -> list[TransactionalProducer]:
    ids = [f"{config.prefix}{incarnation}.{name}" for name in ("0", "1", "q")]
    return initialised(config, ids, time.monotonic() + PATIENCE_S)


def acquire(config: KafkaConfig, incarnation: str, shards: Sequence[int], **fields: object) -> list[Acquired]:
    return acquisition(config, incarnation, shards, **fields).acquire()


async def test_after_a_kill_what_was_written_is_folded_and_what_was_open_is_aborted(config: KafkaConfig) -> None:
    """A kill -9 in the middle of a lane transaction: ends that were answered stand, the open one has no effect."""
    orders = config.prefix + "orders"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.crashing_instance",
        config.properties["bootstrap.servers"],
        config.prefix,
        str(config.shards),
        orders,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            while (line := await process.stdout.readline()) != b"ready\n":
                assert line, "the instance ended before it was ready"
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()

    async with running(config) as instance:
        states = instance.service.states
        for number in range(10):
            assert states[number % config.shards].state_of(f"done-{number}") is State.COMMITTED
        assert states[0].state_of("pending") is State.PREPARED
        one = half("pending", Message(topic=orders, value=b"pending"))
        await instance.write(commit_of(0, one, 0))
    values = sorted(seen.value or b"" for seen in read_topic(config, orders))
    assert values == [*(b"done-%d" % number for number in range(10)), b"pending"]


async def test_a_restart_after_a_release_fences_nobody_and_knows_everything(config: KafkaConfig) -> None:
    """A clean stop leaves tombstones in owners; the next start folds outcomes, pending and parked transactions."""
    async with running(config) as instance:
        await instance.write(commit_of(1, half("ended"), 0))
        await asyncio.to_thread(prepare, config, 1, half("pending"))
    last = {seen.partition: seen.value for seen in read_topic(config, config.owners_topic)}
    assert last == {0: None, 1: None}
    async with running(config) as instance:
        state = instance.service.states[1]
        assert state.state_of("ended") is State.COMMITTED
        assert state.state_of("pending") is State.PREPARED
        assert state.half_tail > 0


def test_the_owner_record_names_the_incarnation_and_its_lanes(config: KafkaConfig) -> None:
    """Step 4: whoever comes next finds whom to fence."""
    acquire(config, "one", [0, 1])
    for seen in read_topic(config, config.owners_topic):
        owner = decode_owner(seen.value)
        assert seen.key == str(seen.partition).encode()
        assert (owner.shard, owner.incarnation) == (seen.partition, "one")
        assert owner.lane_ids == tuple(f"{config.prefix}one.{name}" for name in ("0", "1", "q"))


def test_the_former_owner_can_write_nothing_more(config: KafkaConfig) -> None:
    """Step 3: the lane ids of an owner that did not release are fenced, its open Kafka transaction is aborted."""
    orders = config.prefix + "orders"
    former = lane_of(config, "former")
    acquire(config, "former", [0])
    for producer in former[:2]:
        producer.begin()
        producer.produce(orders, b"never", None, 0)
        producer.produce(config.half_topic, None, b"x", 0)
    acquire(config, "next", [0])
    for producer in former[:2]:
        with pytest.raises(ProducerFailedError):
            producer.commit(10)
        producer.abandon()
    former[2].begin()
    former[2].produce(orders, b"never", None, 0)
    with pytest.raises(ProducerFailedError) as failed:
        former[2].commit(10)
    assert failed.value.fenced
    former[2].abandon()
    assert read_topic(config, orders) == []


def test_an_open_release_of_a_frozen_owner_does_not_stop_the_next(config: KafkaConfig) -> None:
    """Steps 2 and 3 again: the open release holds the LSO back, its owner stands before it and is fenced."""
    former = lane_of(config, "former")
    acquire(config, "former", [0])
    former[0].begin()
    former[0].produce(config.owners_topic, None, b"0", 0, headers=record_headers(KIND_OWNER, "", "released"))
    assert former[0]._producer is not None
    former[0]._producer.flush(10)
    acquire(config, "next", [0])
    with pytest.raises(ProducerFailedError):
        former[0].commit(10)
    for producer in former:
        producer.abandon()
    assert decode_owner(read_topic(config, config.owners_topic)[-1].value).incarnation == "next"


def test_of_two_that_acquire_at_once_only_one_claims(config: KafkaConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 4: an acquirer that was fenced by another's step 1 stops, and claims nothing."""
    slow = acquisition(config, "slow", [0])
    claim = slow._claim_one

    def overtaken(shard: int, producer: TransactionalProducer) -> dict[tuple[str, int], int]:
        acquire(config, "quick", [0])
        return claim(shard, producer)

    monkeypatch.setattr(slow, "_claim_one", overtaken)
    with pytest.raises(AcquireError) as failed:
        slow.acquire()
    assert failed.value.fenced
    assert slow.claimed == set()
    assert [decode_owner(seen.value).incarnation for seen in read_topic(config, config.owners_topic)] == ["quick"]


def test_an_acquisition_gives_up_when_it_is_no_longer_wanted_or_out_of_time(config: KafkaConfig) -> None:
    """Waits are bounded, and a revoked shard is not claimed."""
    unwanted = acquisition(config, "one", [0], cancelled=lambda: True)
    with pytest.raises(AcquireError, match="no longer wanted"):
        unwanted.acquire()
    late = acquisition(config, "two", [0], deadline=time.monotonic())
    with pytest.raises(AcquireError):
        late.acquire()
    assert read_topic(config, config.owners_topic) == []


def test_an_owner_record_that_cannot_be_read_is_never_passed_over(config: KafkaConfig) -> None:
    """Serving without knowing whom to fence would not be safe."""
    [producer] = initialised(config, [f"{config.prefix}rubbish"], time.monotonic() + PATIENCE_S)
    producer.begin()
    producer.produce(config.owners_topic, b"rubbish", b"0", 0)
    producer.commit(10)
    producer.abandon()
    with pytest.raises(AcquireError, match="cannot be decoded"):
        acquire(config, "one", [0])


async def test_the_fold_starts_at_the_cursors_but_reads_outcomes_back_to_the_horizon(config: KafkaConfig) -> None:
    """Recovery reads half from its cursor, op from the lower of its cursor and the horizon, and knows its outcomes."""
    first, second = prepare(config, 0, half("before"), half("after"))
    async with running(config) as instance:
        written = await instance.write(commit_of(0, half("ended"), 0))
        assert written.op is not None
        cursors = KafkaCursors(config)
        await cursors.start()
        await cursors.commit({0: Cursors(half=second, op=written.op + 2)})
        await cursors.stop()
    assert second > first
    async with running(config) as instance:
        state = instance.service.states[0]
        assert state.state_of("before") is None
        assert state.state_of("after") is State.PREPARED
        assert state.state_of("ended") is State.COMMITTED


def test_every_lane_id_of_the_former_owner_is_fenced(config: KafkaConfig) -> None:
    """Whatever number of lane ids an owner record names, each is fenced."""
    ids = [f"{config.prefix}wide.{number}" for number in range(5)]
    lanes = initialised(config, ids, time.monotonic() + PATIENCE_S)
    lanes[0].begin()
    owner = Owner(shard=0, incarnation="wide", lane_ids=tuple(ids), url="", acquired_at=1)
    lanes[0].produce(config.owners_topic, encode_owner(owner), b"0", 0, headers=record_headers(KIND_OWNER, "", ""))
    lanes[0].commit(10)
    acquire(config, "next", [0])
    for lane in lanes:
        lane.begin()
        lane.produce(config.prefix + "orders", b"never", None, 0)
        with pytest.raises(ProducerFailedError):
            lane.commit(10)
        lane.abandon()
