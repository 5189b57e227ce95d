"""A broker with authentication: missing ACLs are named, not retried."""

import asyncio
import dataclasses
import time

import pytest
from confluent_kafka.admin import AclOperation, ResourceType  # type: ignore[attr-defined]  # public, but not for mypy

from halfway.embedded import EmbeddedConfig, EmbeddedKafka
from halfway.embedded.broker import HOST, Listener, Node, pick_port
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.topics.admin_requests import AdminRequests
from halfway.kafka.topics.metadata import TopicMetadata
from halfway.kafka.topics.provisioning import Finding, InternalTopics
from halfway.protocol.errors import ConfigurationError, KafkaUnavailableError, NotAuthorisedError
from tests.support.brokers.guarded import USERS, GuardedKafka
from tests.support.brokers.jvm import STARTED_WITHIN_S, short_lived
from tests.support.coordinator.topics import Cluster
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


def test_a_broker_that_wants_a_login_is_said_to_close_connections(guarded_kafka: GuardedKafka) -> None:
    """As librdkafka tells, all that is known is that all brokers are down."""
    until = time.monotonic() + PATIENCE_S
    requests = AdminRequests(config_of(guarded_kafka.guarded_servers), 0, cancelled=lambda: False)
    said = ""
    while "closes the connection" not in said:
        assert time.monotonic() < until, said
        with pytest.raises(KafkaUnavailableError) as caught:
            requests.brokers()
        said = caught.value.detail
    assert "HALFWAY_KAFKA__SECURITY_PROTOCOL" in said


async def test_a_broker_that_is_not_reached_at_its_advertised_address_denies_nothing() -> None:
    """Where the client begins, it answers: of all other requests nothing would be known, least of all permissions."""
    port = pick_port()

    class Elsewhere(EmbeddedKafka):
        def _pick_node(self) -> Node:
            node = super()._pick_node()
            elsewhere = Listener(port=port, advertised_port=pick_port({port, *node.ports}))
            return dataclasses.replace(node, listeners={**node.listeners, "ELSEWHERE": elsewhere})

    with Elsewhere(EmbeddedConfig(jvm_options=short_lived(), startup_timeout_s=STARTED_WITHIN_S)):
        topics = InternalTopics(config_of(f"{HOST}:{port}"))
        try:
            *well, wrong = await topics.examine(["orders"], timeout_s=10)
        finally:
            topics.close()
    assert [one.ok for one in well] == [True, True]
    assert (wrong.check, wrong.ok) == ("broker 1", False)
    assert "advertised.listeners" in wrong.detail


async def examined(config: KafkaConfig, *destinations: str) -> dict[str, Finding]:
    topics = InternalTopics(config)
    try:
        return {one.check: one for one in await topics.examine(destinations, timeout_s=PATIENCE_S)}
    finally:
        topics.close()


async def test_a_look_at_everything_names_each_missing_acl_with_its_command_and_changes_nothing(
    guarded_kafka: GuardedKafka,
) -> None:
    """Where a start ends with the first. What Kafka shows only of existing topics is unknown before there are any."""
    config = guarded_config(guarded_kafka)
    destination = config.prefix.strip("_.")
    create_topics(config_of(guarded_kafka.bootstrap_servers), {destination: 1})
    found = await examined(config, destination)
    own, others = f"topics {config.prefix}*", f"topic {destination}"
    operations = ("Describe", "DescribeConfigs", "Write")
    for check in (*(f"{operation} on {what}" for operation in operations for what in (own, others)), f"Read on {own}"):
        assert found[check].ok is False, check
        assert f"--operation {check.split()[0]}" in found[check].detail
        assert f"{guarded_kafka.guarded_servers} --command-config admin.properties --add" in found[check].detail
        assert f"'{destination}'" in found[check].detail or "prefixed" in found[check].detail
    for check in (f"Read and Describe on group {config.cursors_group}", f"topic {config.half_topic}"):
        assert "kafka-acls.sh" in found[check].detail
    assert "--transactional-id" in found[f"Write and Describe on transactional ids {config.prefix}*"].detail

    topic, group, transactional = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID
    operation = AclOperation
    guarded_kafka.allow(USER, topic, config.prefix, operation.CREATE, operation.DESCRIBE, operation.DESCRIBE_CONFIGS)
    guarded_kafka.allow(USER, topic, config.prefix, operation.WRITE)
    guarded_kafka.allow(USER, topic, destination, operation.WRITE, operation.DESCRIBE_CONFIGS)
    guarded_kafka.allow(USER, group, config.prefix, operation.READ)
    guarded_kafka.allow(USER, transactional, config.prefix, operation.WRITE)
    missing = f"{destination}-missing"
    found = await examined(config, destination, missing)
    assert [one for one in found.values() if one.ok is False] == []
    assert "min.insync.replicas is 1" in found[f"limits of topic {destination}"].detail
    unknown = {f"Read on {own}", f"Write on {own}", f"Write on topic {missing}", f"limits of topic {missing}"}
    assert {one.check for one in found.values() if one.ok is None} == unknown
    assert "first start creates it" in found[f"topic {config.half_topic}"].detail

    guarded_kafka.allow(USER, topic, config.prefix, operation.READ)
    await ensure(config)
    assert {one.ok for one in (await examined(config, destination)).values()} == {True}
    fewer = dataclasses.replace(config, shards=config.shards - 1)
    assert f"HALFWAY_SHARDS={config.shards}" in (await examined(fewer))["HALFWAY_SHARDS"].detail

    await Cluster(guarded_kafka.bootstrap_servers).delete_topic(config.parked_topic)
    lost = (await examined(config))[f"topic {config.parked_topic}"]
    assert (lost.ok, "what the topic held is lost" in lost.detail) == (False, True)


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
