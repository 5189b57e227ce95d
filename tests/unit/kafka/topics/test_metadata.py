"""Every waiting caller gets the result of a request about a topic, and the next one sends a new request."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AclOperation  # type: ignore[attr-defined]  # it is there

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.seam import Clients
from halfway.kafka.topics.metadata import TopicMetadata, WritablePartitions
from halfway.protocol.errors import KafkaUnavailableError, NotAuthorisedError

LONG_S = 30.0
CONFIG = KafkaConfig(properties={"bootstrap.servers": "unused:1"}, max_prepare_bytes=1_000)
SOUND = {
    "max.message.bytes": SimpleNamespace(value="1000"),
    "min.insync.replicas": SimpleNamespace(value="2"),
    "cleanup.policy": SimpleNamespace(value="delete"),
}


class ScriptedAdmin:
    """Returns the answers that a test sets, including errors."""

    def __init__(self) -> None:
        self.shape: Any = SimpleNamespace(partitions=[partition(0), partition(1)], authorized_operations=[])
        self.settings: Any = SOUND
        self.config_requests = 0

    def describe_topics(self, names: Any, **_options: Any) -> dict[str, Future[Any]]:
        assert names is not None
        return {"orders": answered(self.shape)}

    def describe_configs(self, resources: list[Any], **_options: Any) -> dict[Any, Future[Any]]:
        self.config_requests += 1
        return {resource: answered(self.settings) for resource in resources}

    def poll(self, _timeout: float) -> int:
        return 0


def partition(number: int, *, leader: int | None = 1, in_sync: int = 3, replicas: int = 3) -> Any:
    """Return the description of a partition as confluent-kafka's."""
    nodes = [SimpleNamespace(id=broker) for broker in range(1, replicas + 1)]
    led_by = None if leader is None else SimpleNamespace(id=leader)
    return SimpleNamespace(id=number, leader=led_by, isr=nodes[:in_sync], replicas=nodes)


def answered(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


def asking(admin: ScriptedAdmin) -> TopicMetadata:
    return TopicMetadata(replace(CONFIG, clients=Clients(admin=lambda _properties: cast("Any", admin))))


@pytest.fixture
def admin() -> ScriptedAdmin:
    return ScriptedAdmin()


@pytest.fixture
def destinations(admin: ScriptedAdmin) -> TopicMetadata:
    return asking(admin)


def test_a_description_that_fails_in_any_way_is_an_error_and_is_asked_for_again(
    destinations: TopicMetadata, admin: ScriptedAdmin
) -> None:
    """An error that is not Kafka's does not leave the next caller without an answer."""
    sound, admin.shape = admin.shape, RuntimeError("scripted")
    with pytest.raises(KafkaUnavailableError, match="scripted") as caught:
        destinations.fresh(["orders"], LONG_S)
    assert caught.value.fields["topic"] == "orders"
    admin.shape = sound
    assert destinations.fresh(["orders"], LONG_S) == {"orders": WritablePartitions("orders", 2)}


@pytest.mark.parametrize("settings", [RuntimeError("scripted"), {}, SOUND | {"cleanup.policy": None}])
async def test_settings_that_cannot_be_used_are_an_error_and_are_asked_for_again(
    destinations: TopicMetadata, admin: ScriptedAdmin, settings: Any
) -> None:
    """As for a description, and if the answer lacks a needed field."""
    deadline = asyncio.get_running_loop().time() + LONG_S
    admin.settings = settings
    with pytest.raises(KafkaUnavailableError, match="orders"):
        await destinations.describe(["orders"], deadline=deadline)
    admin.settings = SOUND
    facts = (await destinations.describe(["orders"], deadline=deadline))["orders"]
    assert facts is not None
    assert (facts.partitions, facts.max_message_bytes, facts.compacted) == (2, 1000, False)


async def test_settings_that_are_never_answered_are_asked_for_again(
    destinations: TopicMetadata, admin: ScriptedAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Librdkafka may forget requests of a client that is dropped: the topic would be refused for ever."""
    monkeypatch.setattr("halfway.kafka.topics.metadata._LOST_S", 0.0)
    loop = asyncio.get_running_loop()
    lost: Future[Any] = Future()
    with monkeypatch.context() as patched:
        patched.setattr(admin, "describe_configs", lambda resources, **_: dict.fromkeys(resources, lost))
        with pytest.raises(KafkaUnavailableError, match="in time"):
            await destinations.describe(["orders"], deadline=loop.time() + 0.01)
    found = await destinations.describe(["orders"], deadline=loop.time() + LONG_S)
    assert found["orders"] is not None
    lost.set_exception(RuntimeError("scripted"))  # it was late only
    assert (await destinations.describe(["orders"], deadline=loop.time() + LONG_S)) == found


@pytest.mark.parametrize("allowed", [[AclOperation.WRITE, AclOperation.DESCRIBE], [AclOperation.ALL], [], None])
def test_a_topic_that_may_be_written_is_there(
    destinations: TopicMetadata, admin: ScriptedAdmin, allowed: list[AclOperation] | None
) -> None:
    """Also if the broker lists no operation, because it has no access control."""
    admin.shape.authorized_operations = allowed
    assert destinations.fresh(["orders"], LONG_S) == {"orders": WritablePartitions("orders", 2)}


def test_a_topic_that_may_only_be_seen_is_refused_before_anything_is_written(
    destinations: TopicMetadata, admin: ScriptedAdmin
) -> None:
    admin.shape.authorized_operations = [AclOperation.DESCRIBE, AclOperation.READ]
    with pytest.raises(NotAuthorisedError, match="Write") as caught:
        destinations.fresh(["orders"], LONG_S)
    assert caught.value.fields["topic"] == "orders"


def test_partitions_that_take_nothing_are_told(destinations: TopicMetadata, admin: ScriptedAdmin) -> None:
    """Without a leader, or below min.insync.replicas; a lagging replica does not matter if enough are in sync."""
    admin.shape.partitions = [partition(0, in_sync=2), partition(1, in_sync=1), partition(2, leader=None)]
    partitions = destinations.fresh(["orders"], LONG_S)["orders"]
    assert partitions is not None
    assert sorted(partitions.closed) == [1, 2]
    assert "min.insync.replicas" in partitions.closed[1]


@pytest.mark.parametrize("settings", [RuntimeError("scripted"), {}])
def test_who_may_not_see_the_settings_may_write_wherever_there_is_a_leader(
    destinations: TopicMetadata, admin: ScriptedAdmin, settings: Any
) -> None:
    """A write that was possible before is not refused because a figure is missing."""
    admin.settings = settings
    admin.shape.partitions = [partition(0, in_sync=1), partition(1, leader=None)]
    partitions = destinations.fresh(["orders"], LONG_S)["orders"]
    assert partitions is not None
    assert sorted(partitions.closed) == [1]


def test_settings_are_asked_for_where_a_replica_is_out_of_sync_and_once(
    destinations: TopicMetadata, admin: ScriptedAdmin
) -> None:
    """A busy lane with healthy topics sends no request for settings, and one with others sends few."""
    admin.shape.partitions = [partition(0)]
    asking(admin).fresh(["orders"], LONG_S)
    assert admin.config_requests == 0
    admin.shape.partitions = [partition(0, in_sync=1)]
    for _ in range(3):
        destinations.fresh(["orders"], LONG_S)
    assert admin.config_requests == 1


def test_after_no_answer_a_topic_is_looked_up_over_new_connections() -> None:
    """The client would keep sending requests to a lost controller, or over a dead connection."""
    silent, sound = ScriptedAdmin(), ScriptedAdmin()
    silent.shape = KafkaException(KafkaError(KafkaError._TIMED_OUT))
    left: list[Any] = [silent, sound]
    destinations = TopicMetadata(replace(CONFIG, clients=Clients(admin=lambda _properties: left.pop(0))))
    with pytest.raises(KafkaUnavailableError):
        destinations.fresh(["orders"], LONG_S)
    assert destinations.fresh(["orders"], LONG_S) == {"orders": WritablePartitions("orders", 2)}
    assert left == []


async def test_a_call_looks_up_again_if_there_was_no_answer() -> None:
    """A prepare is not refused because of one dead connection."""
    silent, sound = ScriptedAdmin(), ScriptedAdmin()
    silent.shape = KafkaException(KafkaError(KafkaError._TIMED_OUT))
    left: list[Any] = [silent, sound]
    destinations = TopicMetadata(replace(CONFIG, clients=Clients(admin=lambda _properties: left.pop(0))))
    found = await destinations.describe(["orders"], deadline=asyncio.get_running_loop().time() + LONG_S)
    assert found["orders"] is not None
