"""Whatever a request about a topic ends with, whoever waits for it hears so and the next one asks anew."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka.admin import AclOperation  # type: ignore[attr-defined]  # it is there

from halfway.domain.errors import KafkaUnavailableError, NotAuthorisedError
from halfway.kafka.config import KafkaConfig
from halfway.kafka.destinations import Destinations

LONG_S = 30.0
SOUND = {
    "max.message.bytes": SimpleNamespace(value="1000"),
    "cleanup.policy": SimpleNamespace(value="delete"),
}


class ScriptedAdmin:
    """Answers what a test puts down, errors included."""

    def __init__(self) -> None:
        self.shape: Any = SimpleNamespace(partitions=[0, 1], authorized_operations=[])
        self.settings: Any = SOUND

    def describe_topics(self, names: Any, **_options: Any) -> dict[str, Future[Any]]:
        assert names is not None
        return {"orders": answered(self.shape)}

    def describe_configs(self, resources: list[Any], **_options: Any) -> dict[Any, Future[Any]]:
        return {resource: answered(self.settings) for resource in resources}

    def poll(self, _timeout: float) -> int:
        return 0


def answered(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


@pytest.fixture
def admin() -> ScriptedAdmin:
    return ScriptedAdmin()


@pytest.fixture
def destinations(admin: ScriptedAdmin, monkeypatch: pytest.MonkeyPatch) -> Destinations:
    monkeypatch.setattr(Destinations, "_admin", lambda _self: admin)
    return Destinations(KafkaConfig(properties={"bootstrap.servers": "unused:1"}, max_prepare_bytes=1_000))


def test_a_description_that_fails_in_any_way_is_an_error_and_is_asked_for_again(
    destinations: Destinations, admin: ScriptedAdmin
) -> None:
    """An error that is not Kafka's does not leave the next caller waiting for an answer that never comes."""
    sound, admin.shape = admin.shape, RuntimeError("scripted")
    with pytest.raises(KafkaUnavailableError, match="scripted") as caught:
        destinations.fresh(["orders"], LONG_S)
    assert caught.value.fields["topic"] == "orders"
    admin.shape = sound
    assert destinations.fresh(["orders"], LONG_S) == set()


@pytest.mark.parametrize("settings", [RuntimeError("scripted"), {}, SOUND | {"cleanup.policy": None}])
async def test_settings_that_cannot_be_used_are_an_error_and_are_asked_for_again(
    destinations: Destinations, admin: ScriptedAdmin, settings: Any
) -> None:
    """As for a description, and where the answer lacks what is needed."""
    deadline = asyncio.get_running_loop().time() + LONG_S
    admin.settings = settings
    with pytest.raises(KafkaUnavailableError, match="orders"):
        await destinations.describe(["orders"], deadline=deadline)
    admin.settings = SOUND
    facts = (await destinations.describe(["orders"], deadline=deadline))["orders"]
    assert facts is not None
    assert (facts.partitions, facts.max_message_bytes, facts.compacted) == (2, 1000, False)


@pytest.mark.parametrize("allowed", [[AclOperation.WRITE, AclOperation.DESCRIBE], [AclOperation.ALL], [], None])
def test_a_topic_that_may_be_written_is_there(
    destinations: Destinations, admin: ScriptedAdmin, allowed: list[AclOperation] | None
) -> None:
    """Also where the broker tells of no operation at all, as it has no access control."""
    admin.shape.authorized_operations = allowed
    assert destinations.fresh(["orders"], LONG_S) == set()


def test_a_topic_that_may_only_be_seen_is_refused_before_anything_is_written(
    destinations: Destinations, admin: ScriptedAdmin
) -> None:
    admin.shape.authorized_operations = [AclOperation.DESCRIBE, AclOperation.READ]
    with pytest.raises(NotAuthorisedError, match="Write") as caught:
        destinations.fresh(["orders"], LONG_S)
    assert caught.value.fields["topic"] == "orders"
