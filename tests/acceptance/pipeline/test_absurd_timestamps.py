"""Every producer chooses the timestamps of its records: none of them stops a job on Spark."""

from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # they are there

from halfway.pipeline.access import KafkaAccess
from halfway.pipeline.sources.pinned import KafkaSource
from halfway.pipeline.sources.spark import SparkReader
from tests.support.brokers.fixtures import Kafka

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ANSWERED_WITHIN_S = 120
NOW = 1_700_000_000_000
ABSURD = (1 << 63) - 1


@pytest.fixture(scope="module")
def topic(kafka: Kafka) -> str:
    """Return a topic with an absurd record among others, as brokers before 4.0 take them by default.

    Its other records are years old. Retention would remove them at the broker's next look, every five minutes.
    """
    name = f"absurd-{uuid4().hex[:10]}"
    config = {"message.timestamp.after.max.ms": f"{ABSURD}", "retention.ms": "-1"}
    new = NewTopic(name, num_partitions=2, config=config)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([new])[name].result(ANSWERED_WITHIN_S)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for partition, timestamps in ((0, (NOW, NOW, ABSURD, NOW, ABSURD)), (1, (NOW,))):
        for number, timestamp in enumerate(timestamps):
            producer.produce(name, b"v", None, partition, timestamp=timestamp, headers=[("n", f"{number}".encode())])
    assert producer.flush(ANSWERED_WITHIN_S) == 0
    return name


def test_records_with_absurd_timestamps_are_read_with_the_latest_that_spark_holds(
    spark: "SparkSession", kafka: Kafka, topic: str
) -> None:
    """And all others as they are, each once."""
    servers = {"bootstrap.servers": kafka.bootstrap_servers}
    source = KafkaSource(SparkReader(spark), KafkaAccess(librdkafka=servers))
    source.pin([topic])
    found = source.committed([topic]).selectExpr(
        "partition", "offset", "unix_millis(timestamp) as at", "cast(headers[0].value as string) as number", "key",
        "cast(value as string) as value",
    )  # fmt: skip
    rows = sorted(tuple(row) for row in found.collect())
    latest = (1 << 63) // 1000 - 1
    assert rows == [
        (0, 0, NOW, "0", None, "v"),
        (0, 1, NOW, "1", None, "v"),
        (0, 2, latest, "2", None, "v"),
        (0, 3, NOW, "3", None, "v"),
        (0, 4, latest, "4", None, "v"),
        (1, 0, NOW, "0", None, "v"),
    ]
