"""The ends of partitions, also of those that were created just now."""

import time

from confluent_kafka import Consumer, KafkaException, TopicPartition

from tests.support.waiting import GENEROUS_S


def end_of(consumer: Consumer, partition: TopicPartition) -> int:
    """Return the end of a partition. A new topic is listed before its partitions have leaders: it waits for them."""
    until = time.monotonic() + GENEROUS_S
    while True:
        try:
            return consumer.get_watermark_offsets(partition, 10)[1]
        except KafkaException:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
