"""The answers of an audit's two Kafka clients about topics on a real broker."""

from dataclasses import replace
from typing import TYPE_CHECKING

from halfway.pipeline.sources import duckdb as duckdb_sources
from halfway.pipeline.sources.brokers import Brokers
from tests.support.pipeline.ledgers import Topics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_both_clients_tell_a_topic_by_the_same_id(spark: "SparkSession", topics: Topics) -> None:
    """An audit continues on either engine; both leave out a missing topic."""
    topics.write(0, 3)
    access = replace(topics.access, librdkafka={"bootstrap.servers": topics.access.bootstrap_servers})
    names = [access.topic(kind) for kind in ("half", "op", "missing")]
    brokers = Brokers(spark, access)
    try:
        of_spark = {pin.topic: pin.made for pin in brokers.pin(names)}
    finally:
        brokers.close()
    assert {pin.topic: pin.made for pin in duckdb_sources.pin(access, names)} == of_spark
    assert of_spark.keys() == {*names[:2]}
    assert len({*of_spark.values()} - {None}) == 2
