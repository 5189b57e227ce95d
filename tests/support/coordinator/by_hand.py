"""What anybody who may write to Kafka can put into halfway's topics and group, and what halfway says about it."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from prometheus_client.parser import text_string_to_metric_families

from halfway.kafka.records.codec import KIND_HALF, Headers, encode_half, record_headers
from halfway.protocol.records import Half
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.rest_client import Rest
from tests.support.coordinator.topics import Cluster

_DELIVERED_WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a record stands."""

    topic: str
    partition: int
    offset: int


Keyed = tuple[bytes | None, bytes | None]
"""Key and value."""


async def append_all(
    cluster: Cluster, topic: str, partition: int, records: Sequence[Keyed], headers: Headers | None = None
) -> list[Place]:
    """Append records with a plain producer."""
    places: list[Place] = []

    def delivered(error: object, message: Any) -> None:
        assert error is None, error
        places.append(Place(topic=message.topic(), partition=message.partition(), offset=message.offset()))

    def produce() -> None:
        producer = Producer({"bootstrap.servers": cluster.bootstrap_servers})
        for key, value in records:
            producer.produce(topic, value, key, partition, on_delivery=delivered, headers=headers)
        assert producer.flush(_DELIVERED_WITHIN_S) == 0

    await asyncio.to_thread(produce)
    return places


async def append_half(cluster: Cluster, topic: str, partition: int, half: Half) -> Place:
    """Append a half record as a first prepare does."""
    headers = record_headers(KIND_HALF, half.group, "prepared")
    [place] = await append_all(cluster, topic, partition, [(half.id.encode(), encode_half(half))], headers)
    return place


async def set_offsets(cluster: Cluster, group: str, offsets: dict[tuple[str, int], int]) -> None:
    """Set the committed offsets of a group, as `kafka-consumer-groups.sh --reset-offsets` does."""
    places = [TopicPartition(*place, offset) for place, offset in offsets.items()]
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    for done in admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, places)]).values():
        result: Any = await asyncio.to_thread(done.result, _DELIVERED_WITHIN_S)
        assert all(place.error is None for place in result.topic_partitions), result


async def total(rest: Rest, metric: str, **labels: str) -> float:
    """Add up the samples of a metric that have these labels."""
    status, text = await rest.health("/metrics")
    assert status == 200
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == metric and labels.items() <= sample.labels.items()
    )


def skipped(coordinator: CoordinatorProcess, since: int = 0) -> list[Place]:
    """Give where the records stand that the coordinator said it skips, from a position of its log on."""
    told = [json.loads(line) for line in coordinator.log[since:].splitlines() if '"record_skipped"' in line]
    return [Place(topic=line["topic"], partition=line["partition"], offset=line["offset"]) for line in told]
