"""The librdkafka configuration of each client."""

import re

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.topics.admin_requests import admin_client, demand_properties
from halfway.protocol.errors import ConfigurationError

SERVERS = {"bootstrap.servers": "127.0.0.1:1"}


def make(**over: object) -> KafkaConfig:
    """Return a valid configuration with the given fields changed."""
    return KafkaConfig(**{"properties": SERVERS, "max_prepare_bytes": 1_000_000, **over})  # type: ignore[arg-type]


def test_secrets_are_not_shown() -> None:
    """Neither repr nor str shows the operator's properties."""
    config = make(properties={**SERVERS, "sasl.password": "hunter2"})
    assert "hunter2" not in repr(config) + str(config)


def test_the_operators_properties_reach_every_client() -> None:
    """The operator's properties override our preferences."""
    config = make(properties={**SERVERS, "client.id": "mine", "sasl.password": "hunter2"})
    for client in (config.producer(), config.consumer(), config.admin()):
        assert client["bootstrap.servers"] == "127.0.0.1:1"
        assert client["client.id"] == "mine"
        assert client["sasl.password"] == "hunter2"


SAFETY = (
    "acks request.required.acks enable.idempotence transactional.id isolation.level partitioner group.id"
    " enable.auto.commit auto.offset.reset message.timeout.ms delivery.timeout.ms delivery.report.only.error"
    " max.in.flight batch.size allow.auto.create.topics test.mock.num.brokers error_cb"
)


VOID = "linger.ms queue.buffering.max.ms queue.buffering.max.messages queue.buffering.max.kbytes statistics.interval.ms"
"""Each client has its own value of these."""


@pytest.mark.parametrize("name", [*SAFETY.split(), *VOID.split()])
def test_a_property_that_safety_rests_on_or_that_would_have_no_effect_is_refused_by_name(name: str) -> None:
    """The error names the property and the environment variable to remove."""
    variable = "HALFWAY_KAFKA__" + name.upper().replace(".", "_")
    with pytest.raises(ConfigurationError, match=rf"{re.escape(name)}.*{variable}"):
        make(properties={**SERVERS, name: "1"})


def test_producers_are_idempotent_and_place_keys_as_java_clients_do() -> None:
    """Librdkafka's defaults for these would lose or misplace messages."""
    producer = make().producer()
    assert producer["acks"] == "all"
    assert producer["enable.idempotence"] is True
    assert producer["partitioner"] == "murmur2_random"
    assert producer["message.timeout.ms"] == 5_000


def test_consumers_never_skip_and_never_commit_by_themselves() -> None:
    """Cursors do not depend on librdkafka's defaults."""
    consumer = make().consumer()
    assert consumer["enable.auto.commit"] is False
    assert consumer["auto.offset.reset"] == "earliest"
    assert consumer["isolation.level"] == "read_committed"
    assert consumer["group.id"] == "_halfway.cursors"
    assert make().consumer(**{"group.id": "x"})["group.id"] == "x"


def test_librdkafka_takes_every_configuration() -> None:
    """Librdkafka knows every name and value."""
    config = make()
    Producer(config.producer())
    Producer(config.producer(**{"transactional.id": "t"}))
    Consumer(config.consumer()).close()
    AdminClient(config.admin())


@pytest.mark.parametrize(
    "over, named",
    [
        ({"properties": {}}, "bootstrap.servers"),
        ({"prefix": "a b"}, "prefix"),
        ({"op_retention_ms": 60_000}, "op_retention_ms"),
    ],
)
def test_a_value_that_cannot_work_is_named(over: dict[str, object], named: str) -> None:
    """The error names the setting."""
    with pytest.raises(ConfigurationError, match=named):
        make(**over)


def test_what_is_accepted_can_be_stored_and_parked() -> None:
    """Half takes the largest prepare with the lane's additions, and parked takes more than half."""
    config = make(max_prepare_bytes=3_000_000)
    assert config.max_prepare_bytes < config.half_record_bytes < config.half_max_message_bytes
    assert config.half_max_message_bytes < config.parked_max_message_bytes
    assert config.producer()["message.max.bytes"] > config.parked_max_message_bytes
    assert config.producer()["batch.size"] < config.half_max_message_bytes


def test_an_op_marker_has_room_for_all_messages_of_a_prepare() -> None:
    """The default fits a topic with Kafka's defaults, so that no topic of an earlier release is refused."""
    config = make(max_prepare_bytes=4_194_304)
    assert config.op_record_bytes < config.op_max_message_bytes < 1_048_588
    many = make(max_prepare_bytes=30_000 * 4096)
    assert many.op_record_bytes > 1_048_588
    assert many.producer()["message.max.bytes"] > many.op_max_message_bytes


def test_topics_and_groups_carry_the_prefix() -> None:
    """All names of halfway in Kafka start with the prefix."""
    config = make(prefix="p.")
    assert [config.topic(kind) for kind in ("half", "op", "parked", "owners")] == [
        config.half_topic,
        config.op_topic,
        config.parked_topic,
        config.owners_topic,
    ]
    assert all(name.startswith("p.") for name in (config.half_topic, config.members_group, config.cursors_group))
    with pytest.raises(ValueError, match="other"):
        config.topic("other")


def test_no_client_keeps_an_idle_connection_or_waits_a_minute_on_a_silent_one() -> None:
    """A firewall drops what is sent on a connection that was idle for minutes; an operator may set other times."""
    config = make()
    for client in (config.producer(), config.consumer(), config.admin()):
        assert client["connections.max.idle.ms"] < 240_000
        assert client["socket.timeout.ms"] <= 10_000
    mine = make(properties={**SERVERS, "connections.max.idle.ms": "30000", "socket.timeout.ms": "20000"})
    for client in (mine.producer(), mine.consumer(), mine.admin()):
        assert (client["connections.max.idle.ms"], client["socket.timeout.ms"]) == ("30000", "20000")


def test_a_transaction_may_be_shorter_than_the_silence_of_a_socket() -> None:
    """The client refuses such a producer unless the silence is shortened."""
    config = make(properties={**SERVERS, "socket.timeout.ms": "60000"})
    over = {"transactional.id": "x", "transaction.timeout.ms": 10_000}
    assert config.producer(**over)["socket.timeout.ms"] == 10_000
    Producer(config.producer(**over))


def test_a_misspelt_property_is_answered_with_the_nearest_right_one() -> None:
    """By its variable, in the words of librdkafka."""
    config = make(properties={**SERVERS, "sasl.pasword": "sesame"})
    with pytest.raises(
        ConfigurationError, match=r"HALFWAY_KAFKA__SASL_PASWORD \(did you mean HALFWAY_KAFKA__SASL_PASSWORD\?\)"
    ):
        demand_properties(config)


def test_a_property_with_an_empty_part_is_named_by_its_variable() -> None:
    config = make(properties={**SERVERS, "sasl..password": "sesame"})
    with pytest.raises(ConfigurationError, match=r"HALFWAY_KAFKA__SASL__PASSWORD \(did you mean"):
        demand_properties(config)


@pytest.mark.parametrize(
    "properties,variables",
    [
        ({"foo.bar": "1"}, "HALFWAY_KAFKA__FOO_BAR"),
        ({"security.protocol": "x"}, "HALFWAY_KAFKA__SECURITY_PROTOCOL"),
        (
            {"sasl.mechanism": "PLAIN", "security.protocol": "sasl_plaintext"},
            "HALFWAY_KAFKA__SASL_USERNAME, HALFWAY_KAFKA__SASL_PASSWORD",
        ),
    ],
)
def test_a_property_that_cannot_be_used_is_named(properties: dict[str, str], variables: str) -> None:
    config = KafkaConfig(properties={"bootstrap.servers": "127.0.0.1:9"} | properties, max_prepare_bytes=1_000)
    with pytest.raises(ConfigurationError) as refused:
        admin_client(config)
    assert refused.value.detail.endswith(f": correct {variables}")
