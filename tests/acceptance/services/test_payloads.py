"""What services send in practice, through the client, halfway and Kafka, is what consumers get."""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext, StringSerializer
from google.type.money_pb2 import Money

from halfway.client import Message, SyncHalfway
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.topics import Cluster
from tests.support.registry import run_registry

AVRO = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "order", "type": "string"}, {"name": "total", "type": "double"}],
    }
)
JSON_SCHEMA = json.dumps(
    {
        "title": "Order",
        "type": "object",
        "properties": {"order": {"type": "string"}, "total": {"type": "number"}},
        "required": ["order"],
    }
)
ORDER = {"order": "42", "total": 9.5}


async def sent(coordinator: CoordinatorProcess, group: str, messages: Sequence[Message]) -> None:
    """Send messages as one transaction, from a thread as a service does."""

    def send() -> None:
        with SyncHalfway(coordinator.url, group) as client:
            client.register(topics=sorted({message.topic for message in messages}))
            with client.transaction(messages):
                pass

    await asyncio.to_thread(send)


@pytest.mark.xdist_group("registry")
async def test_values_and_keys_in_the_wire_format_of_confluent(
    coordinator: CoordinatorProcess, cluster: Cluster, group: str, tmp_path: Path
) -> None:
    """With the serializers of confluent_kafka, in a real registry, and read by its deserializers."""
    topics = await cluster.make_topics("avro", "json", "protobuf", "keyed")
    with run_registry(tmp_path) as url, closing(SchemaRegistryClient({"url": url})) as registry:
        serializers: dict[str, Any] = {
            "avro": AvroSerializer(registry, AVRO),
            "json": JSONSerializer(JSON_SCHEMA, registry),
            "protobuf": ProtobufSerializer(Money, registry, {"use.deprecated.format": False}),
        }
        deserializers: dict[str, Any] = {
            "avro": AvroDeserializer(registry),
            "json": JSONDeserializer(JSON_SCHEMA),
            "protobuf": ProtobufDeserializer(Money, {"use.deprecated.format": False}),
        }
        values = {"avro": ORDER, "json": ORDER, "protobuf": Money(currency_code="EUR", units=9)}
        messages = [
            Message(topic=topic, key="42", value=value, serializer=serializers[kind], key_serializer=StringSerializer())
            for topic, (kind, value) in zip(topics, values.items(), strict=False)
        ]
        avro = serializers["avro"]
        keyed = Message(topic=topics[-1], key=ORDER, value=None, key_serializer=avro, serializer=avro)
        await sent(coordinator, group, [*messages, keyed])

        for topic, (kind, value) in zip(topics, values.items(), strict=False):
            (record,) = await cluster.read(topic)
            schema_id = registry.get_latest_version(f"{topic}-value").schema_id
            assert (record.value or b"")[:5] == b"\0" + (schema_id or 0).to_bytes(4, "big")
            assert deserializers[kind](record.value, SerializationContext(topic, MessageField.VALUE)) == value
            assert record.key == b"42"
        (record,) = await cluster.read(keyed.topic)
        assert deserializers["avro"](record.key, SerializationContext(keyed.topic, MessageField.KEY)) == ORDER
        assert record.value is None
        assert f"{keyed.topic}-key" in registry.get_subjects()


async def test_what_is_not_json_arrives_as_it_is(
    coordinator: CoordinatorProcess, cluster: Cluster, group: str, topic: str
) -> None:
    """CloudEvents, a tombstone, a binary key, an explicit partition, and the time of the commit."""
    every_byte = bytes(range(256))
    event = {
        "ce_specversion": "1.0",
        "ce_id": "6f1c",
        "ce_source": "/shop",
        "ce_type": "order.placed",
        "content-type": "application/json",
    }
    before_ms = time.time_ns() // 1_000_000
    await sent(
        coordinator,
        group,
        [
            Message(topic=topic, key="cloud event", value=ORDER, headers=event),
            Message(topic=topic, key="tombstone", value=None),
            Message(topic=topic, key=every_byte, value=every_byte, headers={"bytes": every_byte, "null": None}),
            *(Message(topic=topic, key="partition", value=str(number), partition=number) for number in range(3)),
        ],
    )
    after_ms = time.time_ns() // 1_000_000
    records = {
        (record.key, record.partition if record.key == b"partition" else None): record
        for record in await cluster.read(topic)
    }
    cloud_event = records[b"cloud event", None]
    assert json.loads(cloud_event.value or b"") == ORDER
    assert {name: value.decode() for name, value in cloud_event.headers if value and name in event} == event
    assert records[b"tombstone", None].value is None
    binary = records[every_byte, None]
    assert (binary.value, binary.header("bytes"), dict(binary.headers)["null"]) == (every_byte, every_byte, None)
    assert [records[b"partition", number].value for number in range(3)] == [b"0", b"1", b"2"]
    assert all(before_ms <= record.timestamp_ms <= after_ms for record in records.values())
