"""Fixtures of the Kafka adapter's tests: a new prefix, and an observer."""

from typing import Any, cast
from uuid import uuid4

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from halfway.coordinator.ports import Observer
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.records.codec import Headers

PATIENCE_S = 180.0


def config_of(bootstrap_servers: str, **fields: Any) -> KafkaConfig:
    """Return a configuration with a prefix that no other test uses."""
    settings: dict[str, Any] = {
        "properties": {"bootstrap.servers": bootstrap_servers},
        "prefix": f"_k{uuid4().hex[:8]}.",
        "shards": 3,
        "max_prepare_bytes": 1_000_000,
    }
    return KafkaConfig(**(settings | fields))


def admin_of(config: KafkaConfig) -> AdminClient:
    return AdminClient({"bootstrap.servers": config.properties["bootstrap.servers"]})


def delete_all(config: KafkaConfig) -> None:
    """Delete every topic that starts with the configuration's prefix."""
    admin = admin_of(config)
    names = [name for name in admin.list_topics(timeout=PATIENCE_S).topics if name.startswith(config.prefix)]
    for future in admin.delete_topics(names).values() if names else ():
        future.result(PATIENCE_S)


def produce(
    config: KafkaConfig,
    topic: str,
    partition: int,
    key: bytes | None,
    value: bytes | None,
    headers: Headers | None = None,
) -> int:
    """Append a record as any client could, and return its offset."""
    offsets: list[int] = []

    def delivered(error: object, message: Any) -> None:
        assert error is None, error
        offsets.append(message.offset())

    producer = Producer({"bootstrap.servers": config.properties["bootstrap.servers"]})
    producer.produce(topic, value, key, partition, on_delivery=delivered, headers=headers)
    assert producer.flush(PATIENCE_S) == 0
    return offsets[0]


class SkippedRecords:
    """The part of an observer that counts skipped records."""

    def __init__(self) -> None:
        self.skipped: list[tuple[str, str]] = []

    def skipped_record(self, topic: str, reason: str) -> None:
        self.skipped.append((topic, reason))

    @property
    def observer(self) -> Observer:
        """Return itself, as the adapters expect it."""
        return cast("Observer", self)
