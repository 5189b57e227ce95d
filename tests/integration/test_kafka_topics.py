"""The internal topics are created once, verified always, and never altered."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
from confluent_kafka import TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined] # public, but not for mypy
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.records.codec import LAYOUT_KEY, decode_layout
from halfway.kafka.topics.provisioning import InternalTopics
from halfway.kafka.topics.required_config import Problem
from halfway.protocol.errors import ConfigurationError, KafkaUnavailableError
from tests.support.brokers.fixtures import Kafka
from tests.support.ownership.cluster_harness import (
    PATIENCE_S,
    add_partitions,
    admin_of,
    config_of,
    create_topics,
    delete_all,
    produce,
    read_topic,
)
from tests.support.waiting import until_true


@pytest.fixture
def config(kafka: Kafka) -> Iterator[KafkaConfig]:
    """Return a new prefix, whose topics are deleted at the end."""
    config = config_of(kafka.bootstrap_servers)
    yield config
    delete_all(config)


async def ensure(config: KafkaConfig, timeout_s: float = PATIENCE_S) -> None:
    topics = InternalTopics(config)
    try:
        await topics.ensure(timeout_s=timeout_s)
    finally:
        topics.close()


async def watch(config: KafkaConfig) -> list[Problem]:
    topics = InternalTopics(config)
    try:
        return await topics.watch(timeout_s=PATIENCE_S)
    finally:
        topics.close()


async def test_looking_at_the_topics_again_and_again_leaves_no_thread_behind(config: KafkaConfig) -> None:
    """Each call has its own client, whose threads end with it, not with the next garbage collection."""
    topics = InternalTopics(config)
    try:
        await topics.ensure(timeout_s=PATIENCE_S)
        gc.collect()
        gc.disable()
        await topics.watch(timeout_s=PATIENCE_S)
        before = native_threads()
        for _ in range(3):
            await topics.watch(timeout_s=PATIENCE_S)
        await until_true(lambda: native_threads() <= before, what="the threads of each look have ended")
    finally:
        gc.enable()
        topics.close()


def native_threads() -> int:
    """Count the threads of this process, including librdkafka's."""
    return len(list(Path("/proc/self/task").iterdir()))


async def test_closing_ends_a_call_that_is_under_way_and_one_that_waits() -> None:
    """If Kafka does not answer, their callers and the thread do not wait for their time-out."""
    topics = InternalTopics(config_of("127.0.0.1:9"))
    calls = [asyncio.create_task(topics.ensure(timeout_s=50 * PATIENCE_S)) for _ in range(2)]
    threads = await asyncio.to_thread(topics_threads, 1)
    topics.close()
    async with asyncio.timeout(PATIENCE_S):
        for call in calls:
            with pytest.raises(KafkaUnavailableError, match="no longer wanted"):
                await call
        for thread in threads:
            await asyncio.to_thread(thread.join)


def topics_threads(count: int) -> list[threading.Thread]:
    """Return the running threads of InternalTopics, as soon as there are `count`."""
    while True:
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("halfway-topics")]
        if len(threads) >= count:
            return threads


def describe(config: KafkaConfig, name: str) -> tuple[int, dict[str, str]]:
    """Return a topic's partitions and settings from the broker."""
    admin = admin_of(config)
    shape = admin.describe_topics(TopicCollection([name]))[name].result(PATIENCE_S)
    resource = ConfigResource(ResourceType.TOPIC, name)
    entries = admin.describe_configs([resource])[resource].result(PATIENCE_S)
    return len(shape.partitions), {entry.name: entry.value for entry in entries.values()}


def alter(config: KafkaConfig, name: str, setting: str, value: str) -> None:
    admin = admin_of(config)
    change = ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=[change])
    admin.incremental_alter_configs([resource])[resource].result(PATIENCE_S)
    until = time.monotonic() + PATIENCE_S
    while describe(config, name)[1][setting] != value:  # the controller has it, the broker learns of it
        assert time.monotonic() < until, f"{setting} of {name} does not become {value}"


async def delete(config: KafkaConfig, name: str) -> None:
    """Delete a topic and wait until the broker no longer returns it."""
    admin = admin_of(config)
    admin.delete_topics([name])[name].result(PATIENCE_S)
    await until_true(lambda: name not in existing(config))


def existing(config: KafkaConfig) -> set[str]:
    return {name for name in admin_of(config).list_topics(timeout=PATIENCE_S).topics if name.startswith(config.prefix)}


async def test_topics_are_created_as_the_design_says(config: KafkaConfig) -> None:
    """The broker itself returns the settings of all five."""
    await ensure(config)
    half, op, parked, groups, owners = [
        describe(config, config.topic(kind)) for kind in ("half", "op", "parked", "groups", "owners")
    ]
    assert [partitions for partitions, _ in (half, op, parked, groups, owners)] == [3, 3, 3, 1, 3]
    for _, settings in (half, parked, groups, owners):
        assert settings["cleanup.policy"] == "compact"
    assert set(op[1]["cleanup.policy"].split(",")) == {"compact", "delete"}
    assert op[1]["retention.ms"] == str(7 * 24 * 3_600_000)
    for _, settings in (half, op, parked, groups, owners):
        assert settings["min.compaction.lag.ms"] == "900000"
        assert settings["segment.ms"] == "3600000"
        assert settings["unclean.leader.election.enable"] == "false"
        assert settings["message.timestamp.type"] == "CreateTime"
        limit = 3_600_000 if settings is owners[1] else 2**63 - 1
        assert {settings[f"message.timestamp.{way}.max.ms"] for way in ("before", "after")} == {str(limit)}
    assert int(parked[1]["max.message.bytes"]) > int(half[1]["max.message.bytes"]) > config.max_prepare_bytes


async def test_starting_again_and_two_at_once_is_fine(config: KafkaConfig) -> None:
    """The second instance verifies the first one's topics; nothing is unsafe."""
    await asyncio.gather(ensure(config), ensure(config))
    await ensure(config)
    assert await watch(config) == []


async def test_a_topic_that_becomes_unsafe_while_running_is_told(config: KafkaConfig) -> None:
    """The watch detects an operator's changes and a deleted topic, and creates nothing."""
    await ensure(config)
    alter(config, config.parked_topic, "min.compaction.lag.ms", "0")
    await delete(config, config.topic("groups"))
    assert {(problem.topic, problem.setting) for problem in await watch(config)} == {
        (config.parked_topic, "min.compaction.lag.ms"),
        (config.topic("groups"), "topic"),
    }
    assert config.topic("groups") not in existing(config)


async def test_another_shard_count_is_refused_before_anything_is_made(config: KafkaConfig) -> None:
    """The number is in the layout record, which outlives the other topics."""
    await ensure(config)
    await delete(config, config.half_topic)
    with pytest.raises(ConfigurationError, match=r"created for 3 shards.*set HALFWAY_SHARDS=3"):
        await ensure(replace(config, shards=5))
    assert config.half_topic not in existing(config)


async def test_partitions_that_somebody_has_added_are_ignored_with_a_warning(config: KafkaConfig) -> None:
    """Ids are hashed over the recorded number: with this one it starts as before, another is refused."""
    await ensure(config)
    for topic in (config.half_topic, config.owners_topic, config.topic("groups")):
        add_partitions(config, topic, 5)
    with structlog.testing.capture_logs() as logs:
        await ensure(config)
    ignored = {(one["topic"], one["partitions"], one["used"]) for one in logs if one["event"] == "partitions_ignored"}
    assert ignored == {(config.half_topic, 5, 3), (config.owners_topic, 5, 3), (config.topic("groups"), 5, 1)}
    assert await watch(config) == []
    with pytest.raises(ConfigurationError, match="set HALFWAY_SHARDS=3"):
        await ensure(replace(config, shards=5))


async def test_an_overwritten_layout_is_written_again(config: KafkaConfig) -> None:
    """A record that overwrites the layout record is skipped while that exists, before compaction removes it."""
    await ensure(config)
    produce(config, config.owners_topic, 0, LAYOUT_KEY, b"something else")
    await ensure(config)
    last = [seen.value for seen in read_topic(config, config.owners_topic) if seen.key == LAYOUT_KEY][-1]
    assert decode_layout(last).shards == config.shards


async def test_a_layout_record_that_is_no_record_is_refused(config: KafkaConfig) -> None:
    """A topic of another system is not used."""
    await ensure(config)
    other = replace(config, prefix=config.prefix + "x.")
    create_topics(config, {other.owners_topic: config.shards})
    produce(config, other.owners_topic, 0, LAYOUT_KEY, b"something else")
    with pytest.raises(ConfigurationError, match="layout record"):
        await ensure(other)


async def test_topics_made_by_hand_are_taken(config: KafkaConfig) -> None:
    """If halfway may not create topics, an operator does; the layout is recorded nevertheless."""
    await ensure(config)
    plan = {name: describe(config, name) for name in existing(config)}
    other = replace(config, prefix=config.prefix + "x.")
    keep = ("cleanup.policy", "min.compaction.lag.ms", "max.compaction.lag.ms", "segment.ms", "max.message.bytes")
    new = [
        NewTopic(
            name.replace(config.prefix, other.prefix),
            partitions,
            1,
            config={setting: settings[setting] for setting in keep},
        )
        for name, (partitions, settings) in plan.items()
    ]
    admin = admin_of(config)
    for future in admin.create_topics(new).values():
        future.result(PATIENCE_S)
    await ensure(other)
    with pytest.raises(ConfigurationError, match="created for 3 shards"):
        await ensure(replace(other, shards=2))


async def test_no_broker_is_an_error_to_try_again_after() -> None:
    """The error contains the address."""
    with pytest.raises(KafkaUnavailableError, match=r"127\.0\.0\.1:1"):
        await ensure(config_of("127.0.0.1:1"), timeout_s=1)


async def test_more_replicas_than_brokers_are_a_setting_to_change(config: KafkaConfig) -> None:
    """The error names the setting; a retry would not help."""
    with pytest.raises(ConfigurationError, match="HALFWAY_REPLICATION_FACTOR"):
        await ensure(replace(config, replication_factor=3))
