"""The sources of records for Spark: topics in Kafka, and archives of them in Parquet, with the same columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from halfway.pipeline.errors import AccessError, SourceError
from halfway.pipeline.sources.brokers import Brokers
from halfway.pipeline.sources.duckdb import LATEST_MS, client_settings, read_part
from halfway.pipeline.sources.pinned import ABOUT, COMMITTED, LATER, PINS, UNSETTLED, PinnedArchive, PinnedKafka, Ranges
from halfway.pipeline.sources.pins import Pins, TopicPin

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from halfway.pipeline.access import KafkaAccess
    from halfway.pipeline.sources.pinned import Source
    from halfway.pipeline.tables.folders import Folder

RECORD: Final = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
    "headers array<struct<key: string, value: binary>>"
)
"""The columns of a record of any source."""
COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")


class KafkaSource(PinnedKafka):
    """The topics themselves, through Spark's Kafka connector under `read_committed`."""

    def __init__(self, spark: SparkSession, access: KafkaAccess, pins: Pins | None = None) -> None:
        """Read up to the present ends or, given the pins of an earlier run, exactly what that run read."""
        super().__init__(access, pins)
        self._spark = spark

    def reopened(self) -> KafkaSource:
        """Return the same topics with nothing pinned."""
        return KafkaSource(self._spark, self._access)

    def _find(self, topics: Sequence[str]) -> list[TopicPin]:
        brokers = Brokers(self._spark, self._access)
        try:
            return brokers.pin(topics)
        finally:
            brokers.close()

    def _read(self, ranges: Ranges, isolation_level: str) -> DataFrame:
        parts = {
            (topic, number): (start, end)
            for topic, partitions in ranges.items()
            for number, (start, end) in partitions.items()
            if start < end
        }
        undated = self._first_undated([place for place in parts if not place[0].startswith(self.prefix)])
        dated = {place: (start, min(end, undated.get(place, end))) for place, (start, end) in parts.items()}
        frames = [self._through_connector({place: (start, end) for place, (start, end) in dated.items() if start < end},
                                          isolation_level)]  # fmt: skip
        rest = [
            (topic, number, max(start, undated[topic, number]), end)
            for (topic, number), (start, end) in parts.items()
            if undated.get((topic, number), end) < end
        ]
        if rest:
            frames.append(self._through_client(rest, isolation_level))
        return reduce(DataFrame.unionAll, frames)

    def _first_undated(self, partitions: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Return the first offset of each partition whose timestamp Spark cannot hold, if there is one.

        Every producer chooses the timestamps of its records. Spark's connector fails if the microseconds of one do not
        fit into 64 bits.
        """
        if not partitions:
            return {}
        brokers = Brokers(self._spark, self._access)
        try:
            return brokers.first_dated_after(partitions, LATEST_MS)
        finally:
            brokers.close()

    def _through_connector(self, parts: Mapping[tuple[str, int], tuple[int, int]], isolation_level: str) -> DataFrame:
        """Return records as Spark's Kafka connector reads them."""
        if not parts:
            return nothing(self._spark)
        reader = self._spark.read.format("kafka").options(**kafka_options(self._access, isolation_level))
        topics: dict[str, list[int]] = {}
        for topic, number in parts:
            topics.setdefault(topic, []).append(number)
        reader = reader.option("assign", json.dumps(topics))
        for option, which in (("startingOffsets", 0), ("endingOffsets", 1)):
            offsets = {
                topic: {str(number): parts[topic, number][which] for number in numbers}
                for topic, numbers in topics.items()
            }
            reader = reader.option(option, json.dumps(offsets))
        # Retention can remove records before they are read: the reader asks afterwards what has gone.
        reader = reader.option("failOnDataLoss", "false")
        return reader.load().select(*COLUMNS)

    def _through_client(self, parts: Sequence[tuple[str, int, int, int]], isolation_level: str) -> DataFrame:
        """Return records as DuckDB's source reads them, with timestamps that Spark holds. One task reads each part."""
        if not self._access.librdkafka:
            topic, number, start, _ = parts[0]
            raise AccessError(
                f"{topic}, partition {number}, has a record at offset {start} with a timestamp that Spark cannot hold. "
                "It is read with the settings HALFWAY_KAFKA__…: give them in place of HALFWAY_PIPELINE_KAFKA__…"
            )
        settings = client_settings(self._access, isolation_level)

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
    return options | dict(access.reading) | {"kafka.isolation.level": level, "includeHeaders": "true"}


class SnapshotSource(PinnedArchive):
    """An archive that the job `archive` wrote."""

    def __init__(self, spark: SparkSession, folder: Folder, *, with_later: bool = False) -> None:
        """Open an archive; SourceError if the folder holds none, or one that was not finished."""
        super().__init__(folder, with_later=with_later)
        self._spark = spark
        self._files = folder

    def reopened(self) -> SnapshotSource:
        """Return the same archive with what was written while it was made."""
        return SnapshotSource(self._spark, self._files, with_later=True)

    def committed(self, topics: Sequence[str]) -> DataFrame:
        """Return the committed records."""
        kept = self._read(COMMITTED, topics)
        return kept.unionAll(self._read(LATER, topics)) if self._with_later else kept

    def _read(self, part: str, topics: Sequence[str]) -> DataFrame:
        present = [name for name in topics if name in self._pins.topics and self._folder.exists(part, f"topic={name}")]
        schema = RECORD.replace("topic string, ", "")
        records = [
            self._spark.read.schema(schema)
            .parquet(self._folder.path(part, f"topic={name}"))
            .withColumn("topic", F.lit(name))
            .select(*COLUMNS)
            for name in present
        ]
        return reduce(DataFrame.unionAll, records) if records else nothing(self._spark)


def _trimmed(pin: TopicPin, now: TopicPin) -> TopicPin:
    """Return a pin without the records that have been removed until now."""
    later = {each.partition: each for each in now.partitions}
    partitions = tuple(
        replace(each, start=max(each.start, later[each.partition].start), first_at=later[each.partition].first_at)
        for each in pin.partitions
        if each.partition in later
    )
    return replace(now, partitions=partitions)


def archive(source: Source, topics: Sequence[str], folder: Folder) -> Pins:
    """Write pinned topics as Parquet, one folder for each, so that they can be audited after Kafka has removed them.

    The offsets are written last. A folder without them is not a finished archive.
    """
    if folder.exists(PINS):
        raise SourceError(f"{folder.uri!r} holds an archive already: choose another folder")
    for part, records in ((COMMITTED, source.committed), (UNSETTLED, source.unsettled)):
        records(topics).write.mode("overwrite").partitionBy("topic").parquet(folder.path(part))
    now = source.reopened()
    now.pin(topics)
    # A topic that was deleted in the meantime is left out: it proves nothing.
    kept = {name: _trimmed(source.pins.topics[name], pin) for name, pin in now.pins.topics.items() if name in topics}
    pins = replace(source.pins, topics=kept)
    # A later record of the key is the only trace of a record that compaction removes.
    compacted = [name for name, pin in kept.items() if pin.compacted]
    without_values = source.later(compacted, now.pins).withColumn("value", F.lit(None).cast("binary"))
    without_values.write.mode("overwrite").partitionBy("topic").parquet(folder.path(LATER))
    folder.write(json.dumps({"prefix": source.prefix}) + "\n", ABOUT)
    folder.write(pins.to_json(), PINS)
    return pins
