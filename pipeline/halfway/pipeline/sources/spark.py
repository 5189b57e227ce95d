"""The reader of Spark: topics through its Kafka connector, and archives of them in Parquet, with the same columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from halfway.pipeline.access import KafkaAccess
from halfway.pipeline.engines.dialect import Frame
from halfway.pipeline.engines.engine import SparkEngine
from halfway.pipeline.sources.duckdb import LATEST_MS, client_settings, read_part
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

        Every producer chooses the timestamps of its records. Spark's connector fails if the microseconds of one do not
        fit into 64 bits. From the first such record on, librdkafka reads the partition.
        """
        open_to_all = [part[:2] for part in parts if not part[0].startswith(access.prefix)]
        latest = Brokers(access).offsets(open_to_all, LATEST_MS + 1) if open_to_all else {}
        undated = {place: offset for place, (offset, _) in latest.items() if offset >= 0}
        dated = [
            (topic, number, start, last)
            for topic, number, start, end in parts
            if start < (last := min(end, undated.get((topic, number), end)))
        ]
        rest = [
            (topic, number, max(start, undated[topic, number]), end)
            for topic, number, start, end in parts
            if undated.get((topic, number), end) < end
        ]
        found = self._through_connector(access, dated, level) if dated else nothing(self._spark)
        whole = found.unionAll(self._through_client(access, rest, level)) if rest else found
        return SparkEngine(self._spark).query(rows.sql, records=whole)

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

    def _through_client(self, access: KafkaAccess, parts: Sequence[Part], level: str) -> DataFrame:
        """Return records as DuckDB's reader reads them, with timestamps that Spark holds. One task reads each part."""
        settings = client_settings(access, level)

        def records(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for part in batch.to_pylist():
                    yield from read_part(settings, (part["topic"], part["partition"], part["start"], part["end"]))

        table = self._spark.createDataFrame(list(parts), "topic string, partition int, `start` bigint, `end` bigint")
        return table.repartition(len(parts)).mapInArrow(records, RECORD).select(*COLUMNS)


def nothing(spark: SparkSession) -> DataFrame:
    """Return no records, in a form that the optimizer does not remove: observations of them must still be reported."""
    return spark.createDataFrame(spark.sparkContext.emptyRDD(), RECORD)


def kafka_options(access: KafkaAccess, level: str) -> dict[str, str]:
    """Return the options of Spark's Kafka source. Some are secret; the session hides these."""
    # A range that ends with the marker of a Kafka transaction ends only when a fetch has returned nothing more.
    options = {"kafka.fetch.max.wait.ms": "20"} | {f"kafka.{name}": value for name, value in access.java.items()}
    return options | {"kafka.isolation.level": level, "includeHeaders": "true"}
