"""The lane on a real broker: its transactions are atomic, and one bad end does not affect others."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace

import pytest
from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]  # it is there
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType
from msgspec import structs

from halfway.coordinator import changes
from halfway.coordinator.access import OpenAccess
from halfway.coordinator.changes import Change, Record, write_of
from halfway.coordinator.operations import Path
from halfway.coordinator.ports import Written
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.lane import quarantine
from halfway.kafka.records.codec import decode_op
from halfway.protocol.entries import ParkedEntry, Pending
from halfway.protocol.errors import (
    MessageTooLargeError,
    NotWrittenError,
    OverloadedError,
    TopicUnavailableError,
)
from halfway.protocol.records import Half, Message, OpKind, Parked
from halfway.protocol.transactions import Cause, State, partition_for_key
from tests.support.brokers.fixtures import Kafka
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
    prepare,
    read_topic,
    running,
)
from tests.support.replies import submitted
from tests.support.waiting import until_true


@pytest.fixture
def config(kafka: Kafka) -> KafkaConfig:
    made = config_for(kafka.bootstrap_servers)
    create_internal_topics(made)
    create_topics(made, {made.prefix + "orders": 3, made.prefix + "points": 3})
    return made


async def test_commit_writes_messages_marker_and_tombstone_in_one_kafka_transaction(config: KafkaConfig) -> None:
    """Every record of a commit is visible once it is answered, at the offsets that the answer gives."""
    orders, points = config.prefix + "orders", config.prefix + "points"
    messages = (
        Message(topic=orders, key=b"o-1", value=b"paid", headers=(("trace", b"1"), ("empty", None))),
        Message(topic=points, key=b"c-1", value=b"same"),
        Message(topic=points, key=b"c-1", value=b"same"),
    )
    one = half("a-1", *messages)
    [offset] = prepare(config, 1, one)
    before = time.time_ns() // 1_000_000
    async with running(config) as instance:
        written = await instance.write(commit_of(1, one, offset))

    [order] = read_topic(config, orders)
    assert (order.key, order.value) == (b"o-1", b"paid")
    assert order.headers == (
        ("trace", b"1"),
        ("empty", None),
        ("halfway-transaction-id", b"a-1"),
        ("halfway-message", b"1/3"),
        ("halfway-prepared-at", str(one.prepared_at).encode()),
        ("halfway-prefix", config.prefix.encode()),
    )
    assert order.timestamp >= before
    told_apart = [dict(seen.headers)["halfway-message"] for seen in read_topic(config, points)]
    assert told_apart == [b"2/3", b"3/3"]

    [op] = [seen for seen in read_topic(config, config.op_topic) if seen.key == b"a-1"]
    assert (op.partition, op.offset) == (1, written.op)
    assert decode_op(op.value).half_offset == offset
    [stored, tombstone] = [seen for seen in read_topic(config, config.half_topic) if seen.key == b"a-1"]
    assert stored.offset == offset
    assert (tombstone.partition, tombstone.offset, tombstone.value) == (1, written.half, None)
    assert written.parked is None
    for seen in (op, tombstone):
        expected = {"halfway-group": b"orders", "halfway-state": State.COMMITTED.value.encode()}
        assert expected.items() <= dict(seen.headers).items()


async def test_ends_that_wait_together_share_kafka_transactions_and_keep_their_own_offsets(config: KafkaConfig) -> None:
    """Natural group commit: fewer Kafka transactions than ends, each message once, each offset its own."""
    orders = config.prefix + "orders"
    halves = [half(f"g-{number}", Message(topic=orders, key=b"%d" % number, value=b"v")) for number in range(300)]
    async with running(config) as instance:
        writes = [commit_of(number % 2, one, 0) for number, one in enumerate(halves)]
        written = await asyncio.gather(*(instance.write(write) for write in writes))
        assert sum(instance.observer.batches) == 300
        assert len(instance.observer.batches) < 30
    expected = {(write.shard, result.op): write.id.encode() for write, result in zip(writes, written, strict=True)}
    stands = {
        (seen.partition, seen.offset): seen.key
        for seen in read_topic(config, config.op_topic)
        if seen.key != b"!barrier"
    }
    assert stands == expected
    ids = Counter(dict(seen.headers)["halfway-transaction-id"] for seen in read_topic(config, orders))
    assert ids == Counter(one.id.encode() for one in halves)


async def test_messages_arrive_as_they_were_prepared(config: KafkaConfig) -> None:
    """Keys are partitioned as in a Java client; explicit partitions, empty and null keys and values are kept."""
    orders = config.prefix + "orders"
    keyed = [Message(topic=orders, key=b"key-%d" % number, value=b"keyed") for number in range(20)]
    odd = [
        Message(topic=orders, key=b"", value=b"", partition=2),
        Message(topic=orders, key=None, value=b"\x00\xff", partition=1),
        Message(topic=orders, key=b"gone", value=None, partition=0),
    ]
    async with running(config) as instance:
        await instance.write(commit_of(0, half("a-1", *keyed, *odd), 0))
    seen = read_topic(config, orders)
    for record in seen:
        if record.value == b"keyed":
            assert record.partition == partition_for_key(record.key or b"", 3)
    assert {(record.partition, record.key, record.value) for record in seen if record.value != b"keyed"} == {
        (2, b"", b""),
        (1, None, b"\x00\xff"),
        (0, b"gone", None),
    }


async def test_what_may_no_longer_be_written_is_dropped_before_it_begins(config: KafkaConfig) -> None:
    """Past its deadline, no longer current, or of a shard that is not owned: NotWrittenError, nothing is written."""
    orders = config.prefix + "orders"
    one = half("a-1", Message(topic=orders, key=b"k", value=b"v"))
    async with running(config) as instance:
        with pytest.raises(NotWrittenError, match="deadline"):
            await instance.write(commit_of(0, one, 0, within=-0.001))
        with pytest.raises(NotWrittenError, match="not owned"):
            await instance.write(commit_of(7, one, 0))
        instance.service.refuse = lambda write: write.id == "a-1"
        with pytest.raises(NotWrittenError, match="current"):
            await instance.write(commit_of(0, one, 0))
        await instance.write(commit_of(0, half("a-2", Message(topic=orders, value=b"good")), 0))
    assert [seen.value for seen in read_topic(config, orders)] == [b"good"]
    assert instance.observer.failures == []


async def test_a_full_queue_refuses_at_once(kafka: Kafka) -> None:
    """The lane's queue is bounded in ends."""
    config = config_for(kafka.bootstrap_servers, lane_queue=5)
    create_internal_topics(config)
    async with running(config) as instance:
        lane, writes = instance.cluster.lane, [commit_of(0, half(f"f-{number}"), 0) for number in range(100)]
        results = await asyncio.gather(*(submitted(lane, write) for write in writes), return_exceptions=True)
        refused = [isinstance(result, OverloadedError) for result in results]
        assert any(refused)
        assert all(isinstance(result, Written) for result in results if not isinstance(result, OverloadedError))
        assert not refused[0]


async def test_a_missing_topic_is_refused_without_touching_the_others(config: KafkaConfig) -> None:
    """An end to a topic that does not exist gets its error; ends of the same batch commit; no incarnation ends."""
    orders, gone = config.prefix + "orders", config.prefix + "gone"
    bad = half("bad", Message(topic=orders, value=b"never"), Message(topic=gone, value=b"never"))
    good = [half(f"good-{number}", Message(topic=orders, value=b"good")) for number in range(20)]
    async with running(config) as instance:
        results = await asyncio.gather(
            *(instance.write(commit_of(0, one, 0)) for one in [*good[:10], bad, *good[10:]]), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, Exception)]
        assert [type(error) for error in refused] == [TopicUnavailableError]
        assert gone in str(refused[0])
        create_topics(config, {gone: 1})
        await instance.write_until_taken(commit_of(0, bad, 0))
        assert instance.observer.failures == []
    assert sorted(seen.value or b"" for seen in read_topic(config, orders)) == [b"good"] * 20 + [b"never"]


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
        assert instance.observer.failures == []


async def test_a_topic_deleted_under_the_lane_ends_at_most_one_incarnation(config: KafkaConfig) -> None:
    """Ends to a topic that was just deleted get its error while ends to other topics continue."""
    orders, doomed = config.prefix + "orders", config.prefix + "doomed"
    create_topics(config, {doomed: 1})
    async with running(config) as instance:
        await instance.write(commit_of(0, half("first", Message(topic=doomed, value=b"v")), 0))
        delete_topics(config, [doomed])
        refused = 0
        for number in range(5):
            bad = half(f"bad-{number}", Message(topic=doomed, value=b"v"))
            good = half(f"good-{number}", Message(topic=orders, value=b"good-%d" % number))
            writes = (commit_of(0, bad, 0), commit_of(1, good, 0))
            failed, written = await asyncio.gather(
                instance.write_until_known(writes[0]), instance.write_until_known(writes[1]), return_exceptions=True
            )
            assert not isinstance(written, BaseException)
            refused += isinstance(failed, TopicUnavailableError)
        assert refused == 5
        assert len(instance.observer.failures) <= 1
    assert sorted(seen.value or b"" for seen in read_topic(config, orders)) == [b"good-%d" % n for n in range(5)]


async def test_a_message_that_its_topic_refuses_ends_one_incarnation_and_stays_alone(config: KafkaConfig) -> None:
    """A message that is too large always gets MessageTooLargeError; once its topic allows it, it commits."""
    orders, small = config.prefix + "orders", config.prefix + "small"
    create_topics(config, {small: 1}, **{"max.message.bytes": "70000"})
    bad = half("bad", Message(topic=orders, value=b"with the bad one"), Message(topic=small, value=b"x" * 100_000))
    good = [half(f"good-{number}", Message(topic=small, value=b"good-%02d" % number)) for number in range(20)]
    async with running(config) as instance:
        results = await asyncio.gather(
            *(instance.write_until_known(commit_of(0, one, 0)) for one in [*good[:10], bad, *good[10:]]),
            return_exceptions=True,
        )
        refused = [result for result in results if isinstance(result, BaseException)]
        assert [type(error) for error in refused] == [MessageTooLargeError]
        assert small in str(refused[0])
        for number in range(20, 30):
            more = half(f"good-{number}", Message(topic=small, value=b"good-%02d" % number))
            another = half(f"bad-{number}", Message(topic=small, value=b"x" * (100_000 + number)))
            for one in (bad, another):
                with pytest.raises(MessageTooLargeError):
                    await instance.write_until_known(commit_of(0, one, 0))
            await instance.write_until_known(commit_of(0, more, 0))
        assert len(instance.observer.failures) == 1
        _set_topic(config, small, "max.message.bytes", "200000")
        await instance.write_until_taken(commit_of(0, bad, 0))
        assert len(instance.observer.failures) == 1
    values = [seen.value or b"" for seen in read_topic(config, small)]
    assert sorted(values) == [b"good-%02d" % number for number in range(30)] + [b"x" * 100_000]
    assert [seen.value for seen in read_topic(config, orders)] == [b"with the bad one"]


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
        assert len(instance.observer.failures) == 1
    assert read_topic(config, small) == []


def _set_topic(config: KafkaConfig, topic: str, name: str, value: str) -> None:
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    admin = admin_of(config)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(PATIENCE_S)


async def test_what_has_more_messages_than_a_prepare_may_have_now_can_still_be_ended(kafka: Kafka) -> None:
    """Its op marker would exceed the limit of op: it is written without the messages, and no incarnation ends."""
    config = config_for(kafka.bootstrap_servers)
    create_topics(
        config, dict.fromkeys((config.half_topic, config.parked_topic), 2), **{"max.message.bytes": "2000000"}
    )
    create_topics(config, dict.fromkeys((config.op_topic, config.owners_topic), 2))
    orders = config.prefix + "orders"
    create_topics(config, {orders: 3})
    messages = [Message(topic=orders, key=b"k%d" % number, value=b"v") for number in range(26_000)]
    many, never = half(in_shard(0, "many"), *messages), half(in_shard(1, "never"), *messages)
    [committed] = await asyncio.to_thread(prepare, config, 0, many)
    [rolled_back] = await asyncio.to_thread(prepare, config, 1, never)
    async with running(config) as instance:
        await instance.write(commit_of(0, many, committed))
        back = commit_of(1, never, rolled_back)
        assert back.op is not None
        op = structs.replace(back.op, kind=OpKind.ROLLED_BACK)
        await instance.write(structs.replace(back, messages=(), state=State.ROLLED_BACK, op=op))
        assert instance.observer.failures == []
    assert len(read_topic(config, orders)) == len(messages)


async def test_what_is_larger_than_a_prepare_may_be_now_can_still_be_ended_parked_and_resumed(kafka: Kafka) -> None:
    """The limits of the topics apply to the lane: those of the configuration are for new prepares."""
    config = config_for(kafka.bootstrap_servers, max_prepare_bytes=100_000, max_messages=10)
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
        assert instance.observer.failures == []
    assert len(read_topic(config, orders)) == len(messages)
    assert {record.key for record in read_topic(config, config.op_topic) if record.value} >= {
        committed.id.encode(),
        parking.id.encode(),
    }
