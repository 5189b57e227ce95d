"""The reader of Spark: topics through its Kafka connector, and archives of them in Parquet, with the same columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import reduce
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from halfway.pipeline.access import KafkaAccess
from halfway.pipeline.engines.dialect import Frame
from halfway.pipeline.engines.engine import SparkEngine
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.sources.duckdb import LATEST_MS
from halfway.pipeline.sources.pinned import RECORD, Part, Rows
from halfway.pipeline.sources.pins import Brokers

_OF_A_TASK: Final = 2_000_000
COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")


class SparkReader:
    """Reads for Spark."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def topics(self, access: KafkaAccess, parts: Sequence[Part], level: str, rows: Rows) -> Frame:
        """Return rows of parts of topics.

        PipelineError if a real topic has a record whose timestamp Spark's connector cannot hold, where every task that
        reads it would fail: its microseconds do not fit into 64 bits. Producers choose timestamps.
        """
        ends = {part[:2]: part[3] for part in parts if not part[0].startswith(access.prefix)}
        late = Brokers(access).offsets(ends, LATEST_MS + 1) if ends else {}
        for (topic, number), (offset, _) in late.items():
            if 0 <= offset < ends[topic, number]:
                raise PipelineError(
                    f"{topic}, partition {number}, offset {offset}: Spark cannot hold the record's timestamp: audit "
                    "with --engine duckdb, and set the topic's message.timestamp.after.max.ms (Kafka 4 has an hour)"
                )
        records = self._through_connector(access, parts, level) if parts else nothing(self._spark)
        return SparkEngine(self._spark).query(rows.sql, records=records)

    def files(self, folders: Sequence[tuple[str, str]], rows: Rows) -> Frame:
        schema = RECORD.replace("topic string, ", "")
        records = [
            self._spark.read.schema(schema).parquet(folder).withColumn("topic", F.lit(topic)).select(*COLUMNS)
            for topic, folder in folders
        ]
        whole = reduce(DataFrame.unionAll, records) if records else nothing(self._spark)
        return SparkEngine(self._spark).query(rows.sql, records=whole)

    def _through_connector(self, access: KafkaAccess, parts: Sequence[Part], level: str) -> DataFrame:
        """Return records as Spark's Kafka connector reads them."""
        starts: dict[str, dict[int, int]] = {}
        ends: dict[str, dict[int, int]] = {}
        for topic, number, start, end in parts:
            starts.setdefault(topic, {})[number], ends.setdefault(topic, {})[number] = start, end
        options = {
            "assign": json.dumps({topic: list(numbers) for topic, numbers in starts.items()}),
            "startingOffsets": json.dumps(starts),
            "endingOffsets": json.dumps(ends),
            # A partition of Kafka that has many more records than a task takes is read by several.
            "maxRecordsPerPartition": str(_OF_A_TASK),
            # Retention can remove records before they are read: the reader asks afterwards what has gone.
            "failOnDataLoss": "false",
        }
        reader = self._spark.read.format("kafka").options(**kafka_options(access, level), **options)
        return reader.load().select(*COLUMNS)


def nothing(spark: SparkSession) -> DataFrame:
    """Return no records, in a form that the optimizer does not remove: observations of them must still be reported."""
    return spark.createDataFrame(spark.sparkContext.emptyRDD(), RECORD)


def kafka_options(access: KafkaAccess, level: str) -> dict[str, str]:
    """Return the options of Spark's Kafka source. Some are secret; the session hides these."""
    # A range that ends with the marker of a Kafka transaction ends only when a fetch has returned nothing more.
    options = {"kafka.fetch.max.wait.ms": "20"} | {f"kafka.{name}": value for name, value in access.java.items()}
    return options | {"kafka.isolation.level": level, "includeHeaders": "true"}
