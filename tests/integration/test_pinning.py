"""What an audit's two Kafka clients find on a real broker."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # it is there

from halfway.pipeline.access import KafkaAccess
from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.sources import headers
from halfway.pipeline.sources.brokers import ClientBrokers, pin
from halfway.pipeline.sources.duckdb import DuckReader
from halfway.pipeline.sources.pinned import KafkaSource
from halfway.pipeline.sources.spark import SparkReader
from tests.support.brokers.fixtures import Kafka
from tests.support.pipeline.ledgers import ANSWERED_WITHIN_S, Topics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_both_clients_tell_a_topic_by_the_same_id(spark: "SparkSession", topics: Topics) -> None:
    """An audit continues on either engine; both leave out a missing topic."""
    topics.write(0, 3)
    access = replace(topics.access, librdkafka={"bootstrap.servers": topics.access.bootstrap_servers})
    names = [access.topic(kind) for kind in ("half", "op", "missing")]
    of_spark = SparkReader(spark).pin(access, names)
    made = {each.topic: each.made for each in of_spark}
    assert made.keys() == {*names[:2]}
    assert len({*made.values()} - {None}) == 2
    of_client = pin(ClientBrokers(access), names)
    assert [replace(each, at=0) for each in of_client] == [replace(each, at=0) for each in of_spark]


def test_duckdb_keeps_nothing_of_what_other_producers_write(kafka: Kafka) -> None:
    """However much they write to the topic of a message: they are counted, and take no room on the disk."""
    topic, foreign = f"shared-{uuid4().hex[:8]}", b"of another producer" * 50
    servers: dict[str, Any] = {"bootstrap.servers": kafka.bootstrap_servers}
    admin = AdminClient(servers)
    for made in admin.create_topics([NewTopic(topic, num_partitions=3)]).values():
        made.result(ANSWERED_WITHIN_S)
    producer = Producer(servers)
    for number in range(25_000):
        mine: dict[str, str | bytes | None] = {}
        if number % 1_000 == 7:
            mine = {"halfway-transaction-id": f"id-{number}", "halfway-message": "1/1"}
        producer.produce(topic, foreign, f"key-{number}", headers=mine)
        producer.poll(0)
    assert producer.flush(ANSWERED_WITHIN_S) == 0
    engine = DuckEngine()
    try:
        reader = DuckReader(engine)
        source = KafkaSource(reader, KafkaAccess(java=servers, librdkafka=servers))
        source.pin([topic])
        found = engine.rows(source.committed([topic], headers.messages(engine.dialect, source.prefix)))
        assert {row["id"] for row in found} == {f"id-{number}" for number in range(7, 25_000, 1_000)}
        assert reader.others == 25_000 - len(found)
        held = sum(file.stat().st_size for file in Path(engine.scratch).rglob("*") if file.is_file())
        assert held < 100 * len(foreign)
    finally:
        engine.close()
