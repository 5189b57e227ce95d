"""Compacted topics whose tombstones Kafka removes almost at once."""

from collections.abc import Iterator, Mapping
from typing import Final

from confluent_kafka import Consumer, KafkaError, TopicPartition

EAGER: Final = {
    "min.compaction.lag.ms": "0",
    "delete.retention.ms": "0",
    "min.cleanable.dirty.ratio": "0.0",
    "segment.ms": "200",
}
_READ_S: Final = 60.0


def names_left(properties: Mapping[str, str | int | float | bool], topic: str) -> Iterator[str | bytes | None]:
    """Yield the key of each record that Kafka still has of a topic with one partition."""
    consumer = Consumer({"group.id": "names-left", **properties, "enable.partition.eof": True})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        while (message := consumer.poll(_READ_S)) is not None:
            if (error := message.error()) is None:
                yield message.key()
            elif error.code() == KafkaError._PARTITION_EOF:
                return
        raise AssertionError(f"{topic} was not read to its end")
    finally:
        consumer.close()
