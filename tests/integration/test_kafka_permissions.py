"""A broker with authentication: missing ACLs are named, not retried."""

import asyncio

import pytest
from confluent_kafka.admin import AclOperation, ResourceType  # type: ignore[attr-defined]  # public, but not for mypy

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.topics.metadata import TopicMetadata
from halfway.kafka.topics.provisioning import InternalTopics
from halfway.protocol.errors import ConfigurationError, NotAuthorisedError
from tests.support.brokers.guarded import USERS, GuardedKafka
from tests.support.ownership.cluster_harness import PATIENCE_S, config_of, create_topics

pytestmark = pytest.mark.xdist_group("guarded_kafka")
USER = "stranger"


def guarded_config(guarded: GuardedKafka) -> KafkaConfig:
    login = {
        "bootstrap.servers": guarded.guarded_servers,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": USER,
        "sasl.password": USERS[USER],
    }
    return config_of(guarded.guarded_servers, properties=login)


async def ensure(config: KafkaConfig) -> None:
    topics = InternalTopics(config)
    try:
        await topics.ensure(timeout_s=PATIENCE_S)
    finally:
        topics.close()


async def test_each_missing_acl_is_named_until_all_are_there(guarded_kafka: GuardedKafka) -> None:
    """From nothing allowed to everything: each error names the operation and the resource."""
    config = guarded_config(guarded_kafka)
    topic, group, transactional = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID
    with pytest.raises(ConfigurationError, match=f"Describe on topic {config.prefix}"):
        await ensure(config)
    for resource, allowed, named in (
        (topic, AclOperation.DESCRIBE, f"Create on topic {config.prefix}"),
        (topic, AclOperation.CREATE, f"Read or Write on topic {config.prefix}"),
        (topic, AclOperation.READ, f"Write on topic {config.prefix}"),
        (topic, AclOperation.WRITE, f"DescribeConfigs on topic {config.prefix}"),
        (topic, AclOperation.DESCRIBE_CONFIGS, f"Describe on consumer group {config.prefix}"),
        (group, AclOperation.DESCRIBE, f"Read on consumer group {config.prefix}"),
        (group, AclOperation.READ, f"Describe or Write on transactional ids {config.prefix}"),
        (transactional, AclOperation.DESCRIBE, f"--transactional-id '{config.prefix}'"),
    ):
        guarded_kafka.allow(USER, resource, config.prefix, allowed)
        with pytest.raises(ConfigurationError) as caught:
            await ensure(config)
        assert named in caught.value.detail
    guarded_kafka.allow(USER, transactional, config.prefix, AclOperation.WRITE)
    await ensure(config)


async def test_a_topic_that_halfway_may_not_see_is_not_authorised(guarded_kafka: GuardedKafka) -> None:
    """It is distinguished from a missing topic, with the topic's name."""
    config = guarded_config(guarded_kafka)
    name = config.prefix.strip("_.")
    create_topics(config_of(guarded_kafka.bootstrap_servers), {name: 1})
    destinations = TopicMetadata(config)
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    with pytest.raises(NotAuthorisedError, match=name) as described:
        await destinations.describe([name], deadline=deadline)
    with pytest.raises(NotAuthorisedError, match=name) as asked:
        await asyncio.to_thread(destinations.fresh, [name], PATIENCE_S)
    assert described.value.fields["topic"] == asked.value.fields["topic"] == name
