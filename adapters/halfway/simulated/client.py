"""What all simulated clients share: properties, metadata, and waiting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined] # public, but not for mypy
    BrokerMetadata,
    ClusterMetadata,
    PartitionMetadata,
    TopicMetadata,
)

from halfway.simulated.cluster import Cluster
from halfway.simulated.log import RefusedError

HOST: Final = "simulated.invalid"
PORT: Final = 9092


class Client:
    """A client of a simulated cluster."""

    def __init__(self, cluster: Cluster, properties: Mapping[str, Any]) -> None:
        """Keep librdkafka's properties; unknown ones are ignored."""
        self._cluster = cluster
        self._schedule = cluster.schedule
        self._properties = properties
        self._condition = self._schedule.condition()

    def _number(self, name: str, default: float) -> float:
        return float(self._properties.get(name, default))

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        """Return the metadata of one topic or of all; a topic that is not there has an error."""
        with self._schedule:
            metadata: Any = ClusterMetadata()
            metadata.brokers = {number: self._broker(number) for number in self._cluster.brokers}
            metadata.topics = {
                name: self._topic(name) for name in (sorted(self._cluster.topics) if topic is None else [topic])
            }
            return metadata

    @staticmethod
    def _broker(number: int) -> Any:
        broker: Any = BrokerMetadata()
        broker.id, broker.host, broker.port = number, HOST, PORT
        return broker

    def _topic(self, name: str) -> Any:
        metadata: Any = TopicMetadata()
        metadata.topic = name
        try:
            topic = self._cluster.topic(name)
        except RefusedError as refused:
            metadata.error = KafkaError(refused.code)
            return metadata
        for number, partition in enumerate(topic.partitions):
            one: Any = PartitionMetadata()
            one.id, one.leader = number, -1 if partition.leader is None else partition.leader
            one.replicas, one.isrs = list(partition.replicas), list(partition.isr)
            metadata.partitions[number] = one
        return metadata


def failure(
    code: int, reason: str | None = None, *, retriable: bool = False, requires_abort: bool = False
) -> Exception:
    """Return what a client raises."""
    return KafkaException(KafkaError(code, reason, False, retriable, requires_abort))
