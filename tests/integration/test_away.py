"""An instance that was away for longer than a tombstone lives learns what was deleted meanwhile."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from confluent_kafka import Message, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined] # public, but not for mypy
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.reader import Reader
from halfway.kafka.log.compacted_table import CompactedTable
from halfway.kafka.log.registries import KafkaGroups, KafkaKeys
from halfway.kafka.topics.provisioning import InternalTopics
from halfway.protocol.keys import Key
from halfway.protocol.records import CheckMode, Group, PolicyOverrides
from tests.support.brokers.compaction import EAGER, names_left
from tests.support.brokers.fixtures import Kafka
from tests.support.contract.groups import put, remove
from tests.support.ownership.cluster_harness import PATIENCE_S, admin_of, config_of, delete_all
from tests.support.records.samples import RECORDS
from tests.support.surroundings import RecordingObserver
from tests.support.waiting import until_true

HORIZON_S = 2.0
QUICK_CLEANER = {"log.cleaner.backoff.ms": "100"}


def patience() -> float:
    return asyncio.get_running_loop().time() + PATIENCE_S


async def alter(admin: AdminClient, resource: ConfigResource, settings: Mapping[str, str | None]) -> None:
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET if value else AlterConfigOpType.DELETE)
        for name, value in settings.items()
    ]
    asked = ConfigResource(resource.restype, resource.name, incremental_configs=entries)
    for done in admin.incremental_alter_configs([asked]).values():
        await asyncio.to_thread(done.result, PATIENCE_S)


@pytest.fixture
async def config(kafka: Kafka) -> AsyncIterator[KafkaConfig]:
    """Return a new prefix whose tables the broker compacts as eagerly as it can."""
    config = config_of(kafka.bootstrap_servers, outcome_horizon_s=HORIZON_S, has_keys=True)
    topics = InternalTopics(config)
    await topics.ensure(timeout_s=PATIENCE_S)
    topics.close()
    admin = admin_of(config)
    broker = ConfigResource(ResourceType.BROKER, str(next(iter(admin.list_topics(timeout=PATIENCE_S).brokers))))
    await alter(admin, broker, QUICK_CLEANER)
    for kind in ("groups", "keys"):
        await alter(admin, ConfigResource(ResourceType.TOPIC, config.topic(kind)), EAGER)
    yield config
    await alter(admin, broker, dict.fromkeys(QUICK_CLEANER))
    delete_all(config)


class Away:
    """Keeps one table from reading, as a cut does, from the next record on. Its client drops what it has fetched."""

    def __init__(self, table: CompactedTable[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self._back = threading.Event()
        self._back.set()
        self._held = threading.Event()
        self.deletions: set[bytes | None] = set()
        """The keys of the tombstones that it has read."""
        handle, read, partition = table._handle, table._read, [TopicPartition(table._topic, 0)]

        def held(place: Any, message: Message) -> None:
            if not self._back.is_set():
                consumer: Any = self._reader._consumer  # the seam has no `resume`
                consumer.pause(partition)
                self._held.set()
                self._back.wait(PATIENCE_S)
                consumer.resume(partition)
            self.deletions |= {message.key()} if message.value() is None else set()
            handle(place, message)

        def noted(reader: Reader) -> None:
            self._reader = reader
            read(reader)

        monkeypatch.setattr(table, "_handle", held)
        monkeypatch.setattr(table, "_read", noted)

    @asynccontextmanager
    async def __call__(self, write: Callable[[str], Awaitable[None]]) -> AsyncIterator[None]:
        """`write` adds a record of a name."""
        self._held.clear()
        self._back.clear()
        await write("filler")
        await until_true(self._held.is_set)
        try:
            yield
        finally:
            self._back.set()


async def compacted(config: KafkaConfig, kind: str, name: str, write: Callable[[str], Awaitable[None]]) -> None:
    """Return once Kafka has removed every record of a name; `write` adds others, so that segments are closed."""
    until = time.monotonic() + PATIENCE_S
    number = 0
    while name.encode() in await asyncio.to_thread(lambda: list(names_left(config.consumer(), config.topic(kind)))):
        assert time.monotonic() < until
        number += 1
        await write(f"other{number}")
        await asyncio.sleep(0.25)


def sample_key() -> Key:
    key = RECORDS["key"]
    assert isinstance(key, Key)
    return key


def group(name: str) -> Group:
    return Group(
        name=name,
        mode=CheckMode.PULL,
        urls=(),
        topics=("coupon",),
        policy=PolicyOverrides(max_checks=3),
        created_at=1,
        updated_at=1,
    )


@asynccontextmanager
async def following(table: CompactedTable[Key] | CompactedTable[Group]) -> AsyncIterator[None]:
    try:
        await table.start(deadline=patience())
        yield
    finally:
        await table.stop()


async def test_a_key_that_was_revoked_meanwhile_is_refused(
    config: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tombstone is gone: only reading the topic anew shows it. Keys are not fresh before that."""
    key, kept = sample_key(), msgspec.structs.replace(sample_key(), id="kept")
    here, there = (KafkaKeys(config, RecordingObserver()) for _ in range(2))
    away = Away(there, monkeypatch)

    async def write(name: str) -> None:
        await here.put(msgspec.structs.replace(key, id=name), deadline=patience())

    async with following(here), following(there):
        for one in (key, kept):
            await here.put(one, deadline=patience())
        await until_true(lambda: there.table.get("kept") == kept)
        assert there.table.get(key.id) == key
        async with away(write):
            await here.delete(key.id, deadline=patience())
            await compacted(config, "keys", key.id, write)
            await until_true(lambda: there.age_s > 2 * HORIZON_S)
        await until_true(lambda: there.age_s < HORIZON_S)
        assert there.table.get(key.id) is None
        assert there.table.is_revoked(key.id)
        assert [one.id for one in there.table.all()] == [one.id for one in here.table.all()]
        assert key.id.encode() not in away.deletions
        await write("late")
        await until_true(lambda: there.table.get("late") is not None)


async def test_a_group_that_was_deleted_meanwhile_is_gone(config: KafkaConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to call: each table is confirmed at short intervals."""
    here, there = (KafkaGroups(config, RecordingObserver()) for _ in range(2))
    away = Away(there, monkeypatch)

    async def write(name: str) -> None:
        await put(here, group(name), deadline=patience())

    async with following(here), following(there):
        for name in ("shop", "kept"):
            await put(here, group(name), deadline=patience())
        await until_true(lambda: there.get("kept") is not None)
        began = time.monotonic()
        async with away(write):
            await remove(here, "shop", deadline=patience())
            await compacted(config, "groups", "shop", write)
            await until_true(lambda: time.monotonic() - began > 2 * HORIZON_S)
        await until_true(lambda: there.get("shop") is None)
        await until_true(lambda: there.all() == here.all())
        assert b"shop" not in away.deletions
        await write("late")
        await until_true(lambda: there.get("late") is not None)
