"""What an audit keeps of topics on a real broker."""

from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # it is there

from halfway.pipeline.access import KafkaAccess
from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.engines.engine import SparkEngine
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.jobs.audit import rows_in
from halfway.pipeline.sources import duckdb as duckdb_sources
from halfway.pipeline.sources import headers
from halfway.pipeline.sources.duckdb import DuckReader
from halfway.pipeline.sources.pinned import KafkaSource, Rows
from halfway.pipeline.sources.spark import SparkReader
from tests.support.brokers.fixtures import Kafka
from tests.support.pipeline.ledgers import ANSWERED_WITHIN_S

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_records_of_other_producers_take_no_room(
    spark: "SparkSession", kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much they write to the topic of a message. DuckDB's processes read each partition together."""
    monkeypatch.setattr(duckdb_sources, "_SHARE", 7_000)
    topic, foreign = f"shared-{uuid4().hex[:8]}", b"of another producer" * 50
    servers: dict[str, Any] = {"bootstrap.servers": kafka.bootstrap_servers}
    admin = AdminClient(servers)
    for made in admin.create_topics([NewTopic(topic, num_partitions=3)]).values():
        made.result(ANSWERED_WITHIN_S)
    producer = Producer(servers)
    for number in range(25_000):
        mine: dict[str, str | bytes | None] = {} if number % 2 else {"trace": b"1"}
        if number % 1_000 == 7:
            mine = {"halfway-transaction-id": f"id-{number}", "halfway-message": "1/1"}
        producer.produce(topic, foreign, f"key-{number}", headers=mine)
        producer.poll(0)
    assert producer.flush(ANSWERED_WITHIN_S) == 0
    engine, on_spark = DuckEngine(), SparkEngine(spark)
    try:
        for each, reader in ((engine, DuckReader(engine)), (on_spark, SparkReader(spark))):
            source = KafkaSource(reader, KafkaAccess(librdkafka=servers))
            source.pin([topic])
            found = each.keep(source.committed([topic], headers.messages(each.dialect, source.prefix)))
            ids = sorted(row["id"] for row in each.rows(found))
            assert ids == sorted(f"id-{number}" for number in range(7, 25_000, 1_000))
        held = sum(file.stat().st_size for file in Path(engine.scratch).rglob("*") if file.is_file())
        assert held < 100 * len(foreign)
        source = KafkaSource(DuckReader(engine), KafkaAccess(librdkafka=servers))
        source.pin([topic])
        whole = source.committed([topic], Rows(sql='select "partition" * 100000 + "offset" as place from $records'))
        assert len({row["place"] for row in engine.rows(whole)}) == rows_in(engine, whole) == 25_000
    finally:
        engine.close()
        on_spark.close()


def test_a_timestamp_beyond_64_bits_of_microseconds_is_refused_on_spark_only(
    spark: "SparkSession", kafka: Kafka
) -> None:
    """Every producer chooses timestamps, and brokers before 4.0 take any. DuckDB reads it as the latest possible."""
    topic, absurd = f"absurd-{uuid4().hex[:8]}", (1 << 63) - 1
    servers: dict[str, Any] = {"bootstrap.servers": kafka.bootstrap_servers}
    new = NewTopic(
        topic, num_partitions=2, config={"message.timestamp.after.max.ms": f"{absurd}", "retention.ms": "-1"}
    )
    admin = AdminClient(servers)
    admin.create_topics([new])[topic].result(ANSWERED_WITHIN_S)
    producer = Producer(servers)
    for timestamp in (1, absurd, 1):
        producer.produce(topic, b"v", partition=1, timestamp=timestamp)
    assert producer.flush(ANSWERED_WITHIN_S) == 0
    engine = DuckEngine()
    try:
        sources = [
            KafkaSource(each, KafkaAccess(librdkafka=servers)) for each in (DuckReader(engine), SparkReader(spark))
        ]
        for source in sources:
            source.pin([topic])
        read = sources[0].committed([topic], Rows(sql='select unix_millis("timestamp") as at from $records'))
        assert sorted(row["at"] for row in engine.rows(read)) == [1, 1, absurd // 1_000 - 1]
        with pytest.raises(PipelineError, match=f"{topic}, partition 1, offset 1: .*--engine duckdb"):
            sources[1].committed([topic])
    finally:
        engine.close()
