"""Groups, cursors and facts about real topics, on a real broker."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from confluent_kafka import TopicCollection, TopicPartition
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined] # public, but not for mypy
from confluent_kafka.cimpl import Consumer

from halfway.coordinator.logging import flush_all
from halfway.coordinator.ports import Cursors
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.reader import Reader
from halfway.kafka.clients.transactional_producer import ProducerFailedError, TransactionalProducer
from halfway.kafka.log import compacted_table
from halfway.kafka.log.cursors import KafkaCursors
from halfway.kafka.log.registries import KafkaAuditTrail, KafkaGroups, read_events
from halfway.kafka.records.codec import encode_group
from halfway.kafka.topics import metadata
from halfway.kafka.topics.metadata import TopicMetadata
from halfway.kafka.topics.provisioning import InternalTopics
from halfway.protocol.errors import ForbiddenError, KafkaUnavailableError
from halfway.protocol.outcomes import EndCounts
from halfway.protocol.records import CheckMode, Group, PolicyOverrides
from tests.support.brokers.fixtures import Kafka
from tests.support.contract.groups import put
from tests.support.ownership.cluster_harness import (
    PATIENCE_S,
    admin_of,
    config_of,
    create_topics,
    delete_all,
    delete_topics,
    produce,
)
from tests.support.records.samples import AUDIT_EVENT
from tests.support.surroundings import RecordingObserver
from tests.support.waiting import until_true


def patience() -> float:
    """Return a deadline that only a hanging call reaches."""
    return asyncio.get_running_loop().time() + PATIENCE_S


def group(name: str, updated_at: int = 1) -> Group:
    return Group(
        name=name,
        mode=CheckMode.PULL,
        urls=(),
        topics=("coupon",),
        policy=PolicyOverrides(max_checks=3),
        created_at=1,
        updated_at=updated_at,
    )


@pytest.fixture
async def config(kafka: Kafka) -> AsyncIterator[KafkaConfig]:
    """Return a new prefix with its topics."""
    config = config_of(kafka.bootstrap_servers)
    topics = InternalTopics(config)
    await topics.ensure(timeout_s=PATIENCE_S)
    topics.close()
    yield config
    delete_all(config)


@asynccontextmanager
async def running_groups(config: KafkaConfig, skipped: RecordingObserver) -> AsyncIterator[KafkaGroups]:
    groups = KafkaGroups(config, skipped)
    try:
        await groups.start(deadline=patience())
        yield groups
    finally:
        await groups.stop()


@asynccontextmanager
async def running_cursors(config: KafkaConfig) -> AsyncIterator[KafkaCursors]:
    cursors = KafkaCursors(config, RecordingObserver())
    await cursors.start()
    try:
        yield cursors
    finally:
        await cursors.stop()


async def test_groups_of_a_topic_that_was_made_again_are_followed(config: KafkaConfig) -> None:
    """What the old topic had is gone at the next change; what is written to the new one is read by all."""
    async with running_groups(config, RecordingObserver()) as one, running_groups(config, RecordingObserver()) as other:
        for number in range(5):
            await put(one, group(f"g{number}"), deadline=patience())
        await asyncio.to_thread(delete_topics, config, [config.topic("groups")])
        await asyncio.to_thread(create_topics, config, {config.topic("groups"): 1}, **{"cleanup.policy": "compact"})
        async with asyncio.timeout(PATIENCE_S):
            while one.get("new") is None:
                with suppress(KafkaUnavailableError):  # until the broker knows the new topic
                    await put(one, group("new"), deadline=patience())
        for groups in (one, other):
            await until_true(lambda groups=groups: [each.name for each in groups.all()] == ["new"])  # type: ignore[misc]


async def test_a_table_whose_consumer_stands_still_is_read_by_a_new_one(
    config: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer that gets nothing any more without an error would leave an instance with old groups for ever."""
    readers: list[Reader] = []
    begin = Reader.__enter__

    def kept(self: Reader) -> Reader:
        readers.append(self)
        return begin(self)

    monkeypatch.setattr(compacted_table, "_STILL_S", 1.0)
    async with running_groups(config, RecordingObserver()) as writer:
        monkeypatch.setattr(Reader, "__enter__", kept)
        async with running_groups(config, RecordingObserver()) as reading:
            (reader,) = readers
            monkeypatch.setattr(reader, "read", lambda timeout_s, _: time.sleep(timeout_s))
            await put(writer, group("late"), deadline=patience())
            await until_true(lambda: reading.get("late") == group("late"))


async def test_what_was_decided_before_another_instances_change_is_not_written_behind_it(
    config: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is decided again, with the group that the other has written: here that decision is a refusal."""
    patterns = RecordingObserver()
    async with running_groups(config, patterns) as slow, running_groups(config, patterns) as other:
        await put(slow, group("shop"), deadline=patience())
        write = slow._exclusive.write
        seen: list[Group | None] = []

        async def outpaced(*args: Any, **fields: Any) -> int:
            monkeypatch.setattr(slow._exclusive, "write", write)
            await put(other, group("shop", updated_at=2), deadline=patience())
            return await write(*args, **fields)

        def decide(before: Group | None) -> Group:
            seen.append(before)
            if before != group("shop"):
                raise ForbiddenError("somebody has changed it")
            return group("shop", updated_at=9)

        monkeypatch.setattr(slow._exclusive, "write", outpaced)
        with pytest.raises(ForbiddenError):
            await slow.change("shop", decide, deadline=patience())
        assert seen[-1] == group("shop", updated_at=2)
    async with running_groups(config, patterns) as later:
        assert later.get("shop") == group("shop", updated_at=2)


async def test_many_instances_change_groups_at_once_and_no_change_is_lost(config: KafkaConfig) -> None:
    """Each adds its turn to the groups that it finds."""
    patterns = RecordingObserver()
    async with running_groups(config, patterns) as first, running_groups(config, patterns) as second:

        async def add(groups: KafkaGroups, name: str) -> None:
            def more(before: Group | None) -> Group:
                return group(name, updated_at=1 if before is None else before.updated_at + 1)

            await groups.change(name, more, deadline=patience())

        turns = [add(groups, name) for _ in range(5) for groups in (first, second) for name in ("a", "b")]
        await asyncio.gather(*turns)
        await first.refresh(deadline=patience())
        assert [first.get(name) for name in ("a", "b")] == [group(name, updated_at=10) for name in ("a", "b")]


async def test_an_instance_that_dies_in_a_change_holds_up_no_reader(
    config: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a later change of a group wait, longer than it takes to settle the open transaction."""
    patterns = RecordingObserver()
    async with running_groups(config, patterns) as groups:
        await put(groups, group("shop"), deadline=patience())
        dying = TransactionalProducer(config, f"{config.prefix}groups")
        await asyncio.to_thread(dying.initialise, time.monotonic() + PATIENCE_S)
        dying.begin()
        dying.produce(config.topic("groups"), encode_group(group("shop", updated_at=8)), b"shop", 0)
        assert await asyncio.to_thread(dying.flush, time.monotonic() + PATIENCE_S, lambda: False)
        await groups.refresh(deadline=patience())
        assert groups.get("shop") == group("shop")
        await put(groups, group("shop", updated_at=2), deadline=patience())
        with pytest.raises(ProducerFailedError):
            await asyncio.to_thread(dying.commit, PATIENCE_S)
        dying.abandon()
        await groups.refresh(deadline=patience())
        assert groups.get("shop") == group("shop", updated_at=2)


async def test_records_that_are_no_groups_are_skipped_counted_and_said(
    config: KafkaConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Garbage, no key, a bad key and a manual null value do not hide groups before or after them."""
    skipped = RecordingObserver()
    async with running_groups(config, skipped) as groups:
        await put(groups, group("before"), deadline=patience())
        produce(config, config.topic("groups"), 0, b"before-not", b"garbage")
        produce(config, config.topic("groups"), 0, b"\xff", None)
        produce(config, config.topic("groups"), 0, b"", encode_group(group("no key")))
        produce(config, config.topic("groups"), 0, b"another", encode_group(group("one")))
        produce(config, config.topic("groups"), 0, b"before", None)
        await put(groups, group("after"), deadline=patience())
        assert [one.name for one in groups.all()] == ["after", "before"]
    reasons = ["undecodable", *["wrong_key"] * 3, "foreign_tombstone"]
    assert [call.fields for call in skipped.calls] == [
        {"topic": config.topic("groups"), "reason": one} for one in reasons
    ]
    assert capsys.readouterr().out.count("record_skipped") == len(reasons)


async def test_groups_that_cannot_be_read_are_unavailable_by_the_deadline() -> None:
    """Without a broker start ends by its deadline, and stop still ends the threads."""
    with pytest.raises(KafkaUnavailableError):
        async with running_groups(config_of("127.0.0.1:1"), RecordingObserver()) as groups:
            pytest.fail(f"started without a broker: {groups.all()}")


async def test_cursors_come_back_as_committed_and_shards_without_any_are_left_out(config: KafkaConfig) -> None:
    """Also by another instance, with the ends that they count; the newest of many concurrent ones is kept."""
    ends = EndCounts(position=40, since=1_000, committed={"producer": 7, "check": 1}, rolled_back={"policy": 2})
    async with running_cursors(config) as cursors:
        assert await asyncio.to_thread(cursors.load, [0, 1, 2]) == {}
        await asyncio.gather(
            *(cursors.commit({0: Cursors(half=number, op=2 * number)}) for number in range(20)),
            cursors.commit({2: Cursors(half=0, op=0)}),
        )
        await cursors.commit({0: Cursors(half=19, op=38, ends=ends)})
    async with running_cursors(config) as another:
        assert await asyncio.to_thread(another.load, [0, 1, 2]) == {
            0: Cursors(half=19, op=38, ends=ends),
            2: Cursors(half=0, op=0),
        }


async def test_cursors_that_have_not_moved_are_left_alone_for_a_while(
    config: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most scans find nothing new; an unconfirmed or loaded cursor is committed again."""
    committed: list[dict[int, Cursors]] = []
    commit = KafkaCursors._commit
    fails = False

    def counting(self: KafkaCursors, consumer: Consumer, cursors: dict[int, Cursors]) -> None:
        committed.append(dict(cursors))
        if fails:
            raise KafkaUnavailableError("made up")
        commit(self, consumer, cursors)

    monkeypatch.setattr(KafkaCursors, "_commit", counting)
    still, moved = Cursors(half=1, op=1), Cursors(half=2, op=1)
    async with running_cursors(config) as cursors:
        await cursors.commit({0: still, 1: still})
        await cursors.commit({0: still, 1: still})
        await cursors.commit({0: still, 1: moved})
        assert committed == [{0: still, 1: still}, {1: moved}]
        fails = True
        await cursors.commit({0: moved})
        fails = False
        await cursors.commit({0: moved})
        assert committed[2:] == [{0: moved}] * 2
        await asyncio.to_thread(cursors.load, [0])
        await cursors.commit({0: moved, 1: moved})
        monkeypatch.setattr("halfway.kafka.log.cursors._RECOMMIT_S", 0.0)
        await cursors.commit({1: moved})
        assert committed[4:] == [{0: moved}, {1: moved}]


async def test_cursors_are_offsets_that_any_lag_tool_sees(config: KafkaConfig) -> None:
    """They are the offsets of the group `<prefix>cursors` on half and op."""
    async with running_cursors(config) as cursors:
        await cursors.commit({1: Cursors(half=5, op=7)})
    consumer = Consumer(
        {"bootstrap.servers": config.properties["bootstrap.servers"], "group.id": config.prefix + "cursors"}
    )
    places = [TopicPartition(config.half_topic, 1), TopicPartition(config.op_topic, 1)]
    assert [place.offset for place in consumer.committed(places, PATIENCE_S)] == [5, 7]
    consumer.close()


async def test_commits_that_fail_are_said_once_and_do_not_raise(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each scan of each shard tries again, several times a second, for as long as it fails."""
    monkeypatch.setattr("halfway.kafka.log.cursors._TIMEOUT_S", 0.5)
    flush_all()  # another test may have said it within this minute
    capsys.readouterr()
    async with running_cursors(config_of("127.0.0.1:1")) as cursors:
        for shard in range(3):
            await cursors.commit({shard: Cursors(half=1, op=1)})
    assert capsys.readouterr().out.count("cursors_not_committed") == 1


async def test_facts_of_topics_and_none_for_what_does_not_exist(config: KafkaConfig) -> None:
    """Partitions, the largest message, compaction; a look-up creates no topic."""
    name = config.prefix.strip("_.") + "-real"
    admin = admin_of(config)
    create_topics(config, {name: 5}, **{"max.message.bytes": "77777"})
    destinations = TopicMetadata(config)
    found = await destinations.describe(
        [name, name, config.half_topic, "no-such-topic", "not a name", "", ".", "x" * 250], deadline=patience()
    )
    facts, half = found[name], found[config.half_topic]
    assert facts is not None
    assert (facts.partitions, facts.max_message_bytes, facts.compacted) == (5, 77_777, False)
    assert half is not None
    assert half.compacted
    assert [topic for topic, known in found.items() if known is None] == [
        "no-such-topic",
        "not a name",
        "",
        ".",
        "x" * 250,
    ]
    assert "no-such-topic" not in admin.list_topics(timeout=PATIENCE_S).topics
    admin.delete_topics([name])[name].result(PATIENCE_S)


async def test_fresh_tells_of_a_topic_that_has_just_gone_or_come(config: KafkaConfig) -> None:
    """Existence is known to the second, although facts are cached for longer."""
    name = config.prefix.strip("_.") + "-real"
    admin = admin_of(config)
    destinations = TopicMetadata(config)

    def missing() -> set[str]:
        found = destinations.fresh([name, config.half_topic, "not a name"], PATIENCE_S)
        return {topic for topic, openings in found.items() if openings is None}

    async def becomes(expected: set[str]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await asyncio.to_thread(missing) != expected:  # noqa: ASYNC110 - no event reports it
                await asyncio.sleep(0.05)

    await becomes({name, "not a name"})
    admin.create_topics([NewTopic(name, 1, 1)])[name].result(PATIENCE_S)
    await becomes({"not a name"})
    assert (await destinations.describe([name], deadline=patience()))[name] is not None
    admin.delete_topics([name])[name].result(PATIENCE_S)
    await becomes({name, "not a name"})
    assert (await destinations.describe([name], deadline=patience()))[name] is None


async def test_many_who_ask_at_once_share_one_request(config: KafkaConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred callers and the lane cost one description of each topic."""
    asked: list[str] = []

    def counting(names: list[str]) -> object:
        asked.extend(names)
        return TopicCollection(names)

    monkeypatch.setattr(metadata, "TopicCollection", counting)
    monkeypatch.setattr(metadata, "EXISTENCE_S", PATIENCE_S)
    monkeypatch.setattr(metadata, "_REFRESH_S", PATIENCE_S)
    destinations = TopicMetadata(config)
    names = [config.half_topic, config.op_topic]
    await asyncio.gather(
        *(destinations.describe(names, deadline=patience()) for _ in range(100)),
        asyncio.to_thread(destinations.fresh, names, PATIENCE_S),
    )
    assert sorted(asked) == sorted(names)


async def test_the_audit_trail_is_read_back_once_each_from_a_time_on(config: KafkaConfig) -> None:
    """In order; an event that was written twice, because Kafka did not confirm it at first, is returned once."""
    observer = RecordingObserver()
    audit = KafkaAuditTrail(config, observer)
    await audit.start()
    events = [msgspec.structs.replace(AUDIT_EVENT, id=str(number), at=1000 + number) for number in range(5)]
    for event in (*events, events[3]):
        audit.record(event)
    await until_true(lambda: observer.count("audited", result="written") == 6, "all are written")
    await audit.stop()
    assert observer.count("audited", result="written") == 6
    assert await asyncio.to_thread(lambda: list(read_events(config, since_ms=0))) == events
    assert await asyncio.to_thread(lambda: list(read_events(config, since_ms=1003))) == events[3:]
