"""The lane on a real broker: its transactions are atomic, and one bad end does not affect others."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]  # it is there
from msgspec import structs

from halfway.coordinator import changes
from halfway.coordinator.access import OpenAccess
from halfway.coordinator.changes import Change, Record, write_of
from halfway.coordinator.logging import flush_all
from halfway.coordinator.operations import Path
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.lane import quarantine
from halfway.protocol.entries import ParkedEntry, Pending
from halfway.protocol.errors import MessageTooLargeError, TopicUnavailableError
from halfway.protocol.records import Half, Message, OpKind, Parked
from halfway.protocol.transactions import Cause, State
from tests.support.brokers.fixtures import Kafka
from tests.support.contract.backend import prepare
from tests.support.domain.states import state_of
from tests.support.ownership.cluster_harness import (
    PATIENCE_S,
    admin_of,
    commit_of,
    config_for,
    create_internal_topics,
    create_topics,
    delete_topics,
    half,
    in_shard,
    read_topic,
    running,
)
from tests.support.waiting import until_true


@pytest.fixture
def config(kafka: Kafka) -> KafkaConfig:
    made = config_for(kafka.bootstrap_servers)
    create_internal_topics(made)
    create_topics(made, {made.prefix + "orders": 3, made.prefix + "points": 3})
    return made


async def test_ends_that_wait_together_share_kafka_transactions_and_keep_their_own_offsets(config: KafkaConfig) -> None:
    """Natural group commit: fewer Kafka transactions than ends, each message once, each offset its own."""
    orders = config.prefix + "orders"
    halves = [half(f"g-{number}", Message(topic=orders, key=b"%d" % number, value=b"v")) for number in range(300)]
    async with running(config) as instance:
        writes = [commit_of(number % 2, one, 0) for number, one in enumerate(halves)]
        written = await asyncio.gather(*(instance.write(write) for write in writes))
        assert sum(instance.observer.told("lane_committed", "ends")) == 300
        assert len(instance.observer.told("lane_committed", "ends")) < 30
    expected = {(write.shard, result.op): write.id.encode() for write, result in zip(writes, written, strict=True)}
    stands = {
        (seen.partition, seen.offset): seen.key
        for seen in read_topic(config, config.op_topic)
        if seen.key != b"!barrier"
    }
    assert stands == expected
    ids = Counter(dict(seen.headers)["halfway-transaction-id"] for seen in read_topic(config, orders))
    assert ids == Counter(one.id.encode() for one in halves)


async def test_a_partition_that_the_lane_has_not_seen_or_that_has_gone_costs_no_incarnation(
    config: KafkaConfig,
) -> None:
    """A topic grows after the lane has written to it, and is then created again with fewer partitions."""
    admin, grown = admin_of(config), config.prefix + "grown"
    create_topics(config, {grown: 1})

    def to(partition: int, name: str) -> Half:
        return half(in_shard(0, name), Message(topic=grown, value=name.encode(), partition=partition))

    def shown() -> int:
        openings = instance.destinations.fresh([grown], PATIENCE_S)[grown]
        return 0 if openings is None else openings.partitions

    async with running(config) as instance:
        for number in range(4):  # both producers of the lane know the topic afterwards
            await instance.write(commit_of(0, to(0, f"old-{number}"), 0))
        admin.create_partitions([NewPartitions(grown, 3)])[grown].result(PATIENCE_S)
        for number in range(4):
            await instance.write_until_taken(commit_of(0, to(2, f"new-{number}"), 0))
        assert Counter(seen.partition for seen in read_topic(config, grown)) == {0: 4, 2: 4}
        delete_topics(config, [grown])
        create_topics(config, {grown: 1})
        await until_true(lambda: shown() == 1, "the topic is seen to have one partition")
        with pytest.raises(TopicUnavailableError, match="no partition 2"):
            await instance.write(commit_of(0, to(2, "beyond"), 0))
        assert instance.observer.told("lane_failed", "reason") == []


async def test_an_end_that_was_refused_can_be_rolled_back_at_once(
    config: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad real message blocks commits of its id, not a write without messages."""
    monkeypatch.setattr(quarantine, "FIRST_BACKOFF_S", 3600.0)
    small = config.prefix + "small"
    create_topics(config, {small: 1}, **{"max.message.bytes": "70000"})
    bad = half("bad", Message(topic=small, value=b"x" * 100_000))
    async with running(config) as instance:
        commit = commit_of(0, bad, 0)
        for _ in range(2):  # the second is refused by the back-off alone
            with pytest.raises(MessageTooLargeError):
                await instance.write_until_known(commit)
        assert commit.op is not None
        op = structs.replace(commit.op, kind=OpKind.ROLLED_BACK, messages=())
        written = await instance.write(structs.replace(commit, state=State.ROLLED_BACK, messages=(), op=op))
        assert written.op is not None
        assert state_of(instance.service.states[0], "bad") is State.ROLLED_BACK
        assert len(instance.observer.told("lane_failed", "reason")) == 1
    assert read_topic(config, small) == []


async def test_what_has_more_messages_than_a_prepare_may_have_now_can_still_be_ended(
    kafka: Kafka, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its op marker would exceed the limit of op: it is written without the messages, and no incarnation ends.

    That is said once: if somebody lowers the limit of op, it is so for each transaction.
    """
    config = config_for(kafka.bootstrap_servers)
    create_topics(
        config, dict.fromkeys((config.half_topic, config.parked_topic), 2), **{"max.message.bytes": "2000000"}
    )
    create_topics(config, dict.fromkeys((config.op_topic, config.owners_topic), 2))
    orders = config.prefix + "orders"
    create_topics(config, {orders: 3})
    messages = [Message(topic=orders, key=b"k%d" % number, value=b"v") for number in range(26_000)]
    many, never = half(in_shard(0, "many"), *messages), half(in_shard(1, "never"), *messages)
    flush_all()  # another test may have said it within this minute
    capsys.readouterr()
    [committed] = await asyncio.to_thread(prepare, config, 0, many)
    [rolled_back] = await asyncio.to_thread(prepare, config, 1, never)
    async with running(config) as instance:
        await instance.write(commit_of(0, many, committed))
        back = commit_of(1, never, rolled_back)
        assert back.op is not None
        op = structs.replace(back.op, kind=OpKind.ROLLED_BACK)
        await instance.write(structs.replace(back, messages=(), state=State.ROLLED_BACK, op=op))
        assert instance.observer.told("lane_failed", "reason") == []
    assert len(read_topic(config, orders)) == len(messages)
    assert capsys.readouterr().out.count("op_marker_shortened") == 1


async def test_what_is_larger_than_a_prepare_may_be_now_can_still_be_ended_parked_and_resumed(kafka: Kafka) -> None:
    """The limits of the topics apply to the lane: those of the configuration are for new prepares."""
    config = config_for(kafka.bootstrap_servers, max_prepare_bytes=100_000)
    orders = config.prefix + "orders"
    create_topics(config, dict.fromkeys((config.op_topic, config.owners_topic), 2))
    large = dict.fromkeys((config.half_topic, config.parked_topic), 2) | {orders: 3}
    create_topics(config, large, **{"max.message.bytes": "8000000"})
    messages = [Message(topic=orders, key=b"k%d" % number, value=b"v" * 700_000) for number in range(5)]
    names = [half(in_shard(0, name), *messages) for name in ("committed", "parked", "again")]
    committed, parking, again = names
    offsets = await asyncio.to_thread(prepare, replace(config, max_prepare_bytes=8_000_000), 0, *names)
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    fields = changes.OpFields(cause=Cause.OPERATOR, at=2, deadline=deadline, checks=0)
    async with running(config) as instance:
        await instance.write(commit_of(0, committed, offsets[0]))
        parked_one = changes.parked(0, Pending.of(offsets[1], parking), parking, fields)
        stands = await instance.write(parked_one)
        assert isinstance(parked_one.parked, Parked)
        entry = ParkedEntry.of(stands.parked or 0, parked_one.parked)
        await instance.write(changes.resumed(0, entry, parking, fields, since=3))
        held = Pending.of(offsets[2], again)
        change = Change(path=Path(OpenAccess()), id=again.id, action=Record.HALF, cause=Cause.POLICY, deadline=deadline)
        change.shard, change.begin_by = 0, deadline
        await instance.write(write_of(change, held, again, at=3, now=3))
        assert instance.observer.told("lane_failed", "reason") == []
    assert len(read_topic(config, orders)) == len(messages)
    assert {record.key for record in read_topic(config, config.op_topic) if record.value} >= {
        committed.id.encode(),
        parking.id.encode(),
    }
