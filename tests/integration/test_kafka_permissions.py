"""A broker with authentication: wrong credentials and missing ACLs are named, not retried."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined] # public, but not for mypy
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from halfway.embedded import EmbeddedConfig, EmbeddedKafka
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.topics.metadata import TopicMetadata
from halfway.kafka.topics.provisioning import InternalTopics
from halfway.protocol.errors import ConfigurationError, NotAuthorisedError
from tests.support.brokers.jvm import STARTED_WITHIN_S, STEADY, short_lived
from tests.support.ownership.cluster_harness import PATIENCE_S, config_of

pytestmark = pytest.mark.xdist_group("permissions")  # one broker for all of them
USER = "User:halfway"
BROKER = {
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:SASL_PLAINTEXT",
    "sasl.enabled.mechanisms": "PLAIN",
    "sasl.mechanism.inter.broker.protocol": "PLAIN",
    "listener.name.plaintext.plain.sasl.jaas.config": (
        "org.apache.kafka.common.security.plain.PlainLoginModule required "
        'username="admin" password="right" user_admin="right" user_halfway="also-right";'
    ),
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:admin;User:ANONYMOUS",
}


def login(bootstrap_servers: str, user: str, password: str) -> dict[str, str | int | float | bool]:
    return {
        "bootstrap.servers": bootstrap_servers,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": user,
        "sasl.password": password,
    }


@contextmanager
def ask_as_admin(bootstrap_servers: str) -> Iterator[Callable[[], str | None]]:
    """Return whether the broker is ready, as `halfway.embedded` does, but with credentials."""
    client = AdminClient({**login(bootstrap_servers, "admin", "right"), "log_level": 0})

    def answer() -> str | None:
        try:
            metadata = client.list_topics(timeout=2)
        except KafkaException:
            return None
        return str(metadata.cluster_id) if metadata.brokers else None

    yield answer


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """Return the address of a broker with passwords and ACLs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("halfway.embedded.broker.cluster_id_query", ask_as_admin)
        config = EmbeddedConfig(
            jvm_options=short_lived(), properties={**STEADY, **BROKER}, startup_timeout_s=STARTED_WITHIN_S
        )
        with EmbeddedKafka(config) as broker:
            yield broker.bootstrap_servers


def allow(bootstrap_servers: str, wanted: Mapping[tuple[ResourceType, str], list[AclOperation]]) -> None:
    """Allow the user `halfway` operations on names with a prefix."""
    admin = AdminClient(login(bootstrap_servers, "admin", "right"))
    bindings = [
        AclBinding(kind, name, ResourcePatternType.PREFIXED, USER, "*", operation, AclPermissionType.ALLOW)
        for (kind, name), operations in wanted.items()
        for operation in operations
    ]
    for future in admin.create_acls(bindings).values() if bindings else ():
        future.result(PATIENCE_S)


def guarded_config(guarded: str) -> KafkaConfig:
    return config_of(guarded, properties=login(guarded, "halfway", "also-right"))


async def ensure(config: KafkaConfig) -> None:
    topics = InternalTopics(config)
    try:
        await topics.ensure(timeout_s=PATIENCE_S)
    finally:
        topics.close()


async def test_each_missing_acl_is_named_until_all_are_there(guarded: str) -> None:
    """From nothing allowed to everything: each error names the operation and the resource."""
    config = guarded_config(guarded)
    topic, group = (ResourceType.TOPIC, config.prefix), (ResourceType.GROUP, config.prefix)
    transactional = (ResourceType.TRANSACTIONAL_ID, config.prefix)
    steps = [
        ({}, f"Describe on topic {config.prefix}"),
        ({topic: [AclOperation.DESCRIBE]}, f"Create on topic {config.prefix}"),
        ({topic: [AclOperation.CREATE]}, f"Read or Write on topic {config.prefix}"),
        ({topic: [AclOperation.READ]}, f"Write on topic {config.prefix}"),
        ({topic: [AclOperation.WRITE]}, f"DescribeConfigs on topic {config.prefix}"),
        ({topic: [AclOperation.DESCRIBE_CONFIGS]}, f"Describe on consumer group {config.prefix}"),
        ({group: [AclOperation.DESCRIBE]}, f"Read on consumer group {config.prefix}"),
        ({group: [AclOperation.READ]}, f"Describe or Write on transactional ids {config.prefix}"),
        ({transactional: [AclOperation.DESCRIBE]}, f"--transactional-id '{config.prefix}'"),
    ]
    for allowed, named in steps:
        allow(guarded, allowed)
        async with asyncio.timeout(PATIENCE_S):
            while True:  # an ACL takes a moment to reach the broker
                with pytest.raises(ConfigurationError) as caught:
                    await ensure(config)
                if named in caught.value.detail:
                    break
                await asyncio.sleep(0.5)
    allow(guarded, {transactional: [AclOperation.WRITE]})
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await ensure(config)
                break
            except ConfigurationError:
                await asyncio.sleep(0.5)


async def test_a_topic_that_halfway_may_not_see_is_not_authorised(guarded: str) -> None:
    """It is distinguished from a missing topic, with the topic's name."""
    config = guarded_config(guarded)
    name = config.prefix.strip("_.")
    admin = AdminClient(login(guarded, "admin", "right"))
    admin.create_topics([NewTopic(name, 1, 1)])[name].result(PATIENCE_S)
    destinations = TopicMetadata(config)
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    with pytest.raises(NotAuthorisedError, match=name) as described:
        await destinations.describe([name], deadline=deadline)
    with pytest.raises(NotAuthorisedError, match=name) as asked:
        await asyncio.to_thread(destinations.fresh, [name], PATIENCE_S)
    assert described.value.fields["topic"] == asked.value.fields["topic"] == name
