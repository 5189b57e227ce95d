"""Where the records come from: the topics in Kafka, or an archive of them in Parquet. Both give the same columns."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Final, Protocol

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from halfway.pipeline.brokers import Brokers
from halfway.pipeline.errors import SourceError
from halfway.pipeline.pins import Pins, TopicPin

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from halfway.pipeline.access import KafkaAccess
    from halfway.pipeline.engines import Frame
    from halfway.pipeline.folders import Folder

RECORD: Final = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
    "headers array<struct<key: string, value: binary>>"
)
"""The columns of a record, whatever it came from."""
COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")
_PINS: Final = "offsets.json"
_ABOUT: Final = "archive.json"
_COMMITTED: Final = "committed"
_UNSETTLED: Final = "unsettled"
_LATER: Final = "later"


class Source(Protocol):
    """Records of pinned topics."""

    @property
    def prefix(self) -> str:
        """How the names of halfway's own topics begin."""

    @property
    def pins(self) -> Pins:
        """Everything pinned so far."""

    def pin(self, topics: Sequence[str]) -> None:
        """Pin topics as of now. One that is pinned already stays as it is; one that does not exist is left out."""

    def settle(self, topic: str) -> None:
        """Let the unsettled part of a pinned topic reach to its end as of now."""

    def anew(self) -> Source:
        """Return the same source with nothing pinned: what has been removed since can be told from both."""

    def go_on(self, pins: Pins) -> None:
        """Let what is pinned from now on begin where earlier pins end, for what is about transactions."""

    def repeat(self, pins: Pins) -> None:
        """Read, in place of all up to now, what earlier pins and those before them cover, as far as it is there."""

    def committed(self, topics: Sequence[str]) -> Frame:
        """Return what is committed in the pinned ones of these topics, with the columns RECORD."""

    def unsettled(self, topics: Sequence[str]) -> Frame:
        """Return what stands behind the committed part, of open and aborted Kafka transactions too."""

    def later(self, topics: Sequence[str], now: Pins) -> Frame:
        """Return what was committed in these topics behind their pins, up to others that were taken since."""


class KafkaSource:
    """The topics themselves, through Spark's Kafka connector under `read_committed`."""

    def __init__(self, spark: SparkSession, access: KafkaAccess, pins: Pins | None = None) -> None:
        """Read anew, or, with the pins of an earlier run, exactly what that run read."""
        self._spark = spark
        self._access = access
        self._again = pins is not None
        self._begun = Pins(at=0, topics={})
        self._pins = pins or Pins(at=round(time.time() * 1000), topics={})

    @property
    def prefix(self) -> str:
        """How the names of halfway's own topics begin."""
        return self._access.prefix

    @property
    def pins(self) -> Pins:
        """Everything pinned so far."""
        return self._pins

    def pin(self, topics: Sequence[str]) -> None:
        """Pin topics as of now; an earlier run's pins are never added to."""
        wanted = [topic for topic in topics if topic not in self._pins.topics]
        if self._again or not wanted:
            return
        brokers = Brokers(self._spark, self._access)
        try:
            found = brokers.pin(wanted)
        finally:
            brokers.close()
        added = {pin.topic: self._begun.followed_by(pin) for pin in found}
        self._pins = replace(self._pins, topics={**self._pins.topics, **added})

    def go_on(self, pins: Pins) -> None:
        """Begin where earlier pins end."""
        self._begun = pins.without(self.prefix + "groups", self.prefix + "owners")

    def repeat(self, pins: Pins) -> None:
        """Read what earlier pins and those before them cover, as far as it is there."""
        now = self.anew()
        now.pin(list(pins.topics))
        self._pins = pins.again(now.pins)
        self._again = True

    def settle(self, topic: str) -> None:
        """Let the unsettled part of a pinned topic reach to its end as of now."""
        pin = self._pins.topics.get(topic)
        if self._again or pin is None:
            return
        brokers = Brokers(self._spark, self._access)
        try:
            raised = brokers.raise_high(pin)
        finally:
            brokers.close()
        self._pins = replace(self._pins, topics={**self._pins.topics, topic: raised})

    def anew(self) -> Source:
        """Return the same topics with nothing pinned."""
        return KafkaSource(self._spark, self._access)

    def committed(self, topics: Sequence[str]) -> DataFrame:
        """Return the records below the last stable offset, those of aborted transactions left out."""
        ranges = {
            pin.topic: {each.partition: (each.start, each.end) for each in pin.partitions} for pin in self._of(topics)
        }
        return self._read(ranges, "read_committed")

    def unsettled(self, topics: Sequence[str]) -> DataFrame:
        """Return the records from the last stable offset to the true end."""
        ranges = {
            pin.topic: {each.partition: (each.end, each.high) for each in pin.partitions} for pin in self._of(topics)
        }
        return self._read(ranges, "read_uncommitted")

    def later(self, topics: Sequence[str], now: Pins) -> DataFrame:
        """Return the records from the last stable offset to that of other pins."""
        return self._read(self._pins.behind(topics, now), "read_committed")

    def _of(self, topics: Sequence[str]) -> list[TopicPin]:
        return [self._pins.topics[topic] for topic in topics if topic in self._pins.topics]

    def _read(self, ranges: dict[str, dict[int, tuple[int, int]]], level: str) -> DataFrame:
        ranges = {
            topic: {number: (start, end) for number, (start, end) in partitions.items() if start < end}
            for topic, partitions in ranges.items()
        }
        ranges = {topic: partitions for topic, partitions in ranges.items() if partitions}
        if not ranges:
            return nothing(self._spark)
        reader = self._spark.read.format("kafka").options(**kafka_options(self._access, level))
        reader = reader.option("assign", json.dumps({topic: list(parts) for topic, parts in ranges.items()}))
        for option, which in (("startingOffsets", 0), ("endingOffsets", 1)):
            offsets = {topic: {str(n): pair[which] for n, pair in parts.items()} for topic, parts in ranges.items()}
            reader = reader.option(option, json.dumps(offsets))
        # What retention removes before it is read is not there: whoever reads asks afterwards what has gone.
        reader = reader.option("failOnDataLoss", "false")
        return reader.load().select(*COLUMNS)


def nothing(spark: SparkSession) -> DataFrame:
    """Return no records, of a kind that the optimizer does not see through: counts on the way must still be told."""
    return spark.createDataFrame(spark.sparkContext.emptyRDD(), RECORD)


def kafka_options(access: KafkaAccess, level: str) -> dict[str, str]:
    """Return the options of Spark's Kafka source; some are secret, and the session hides those."""
    # What ends with the marker of a Kafka transaction is read to its end only when a fetch has found nothing more.
    options = {"kafka.fetch.max.wait.ms": "20"} | {f"kafka.{name}": value for name, value in access.java.items()}
    return options | dict(access.reading) | {"kafka.isolation.level": level, "includeHeaders": "true"}


class SnapshotSource:
    """An archive that `archive` wrote."""

    def __init__(self, spark: SparkSession, folder: Folder, *, with_later: bool = False) -> None:
        """Open it; SourceError where the folder holds none, or one that was not finished."""
        self._spark = spark
        self._folder = folder
        self._with_later = with_later
        self._pins = Pins.from_json(folder.read(_PINS))
        self._prefix = str(json.loads(folder.read(_ABOUT))["prefix"])

    @property
    def prefix(self) -> str:
        """How the names of halfway's own topics begin."""
        return self._prefix

    @property
    def pins(self) -> Pins:
        """What was archived."""
        return self._pins

    def pin(self, topics: Sequence[str]) -> None:
        """Change nothing: an archive is what it is."""

    def settle(self, topic: str) -> None:
        """Change nothing: an archive is what it is."""

    def go_on(self, pins: Pins) -> None:  # noqa: ARG002 - as of every source
        """Refuse: in an archive nothing is new."""
        raise SourceError("an archive cannot be gone on with")

    def repeat(self, pins: Pins) -> None:  # noqa: ARG002 - as of every source
        """Refuse: an archive is what it is."""
        raise SourceError("an archive cannot be read as of another time")

    def anew(self) -> Source:
        """Return it with what was written while it was made."""
        return SnapshotSource(self._spark, self._folder, with_later=True)

    def committed(self, topics: Sequence[str]) -> DataFrame:
        """Return what was committed."""
        kept = self._read(_COMMITTED, topics)
        return kept.unionAll(self._read(_LATER, topics)) if self._with_later else kept

    def unsettled(self, topics: Sequence[str]) -> DataFrame:
        """Return what was not settled."""
        return self._read(_UNSETTLED, topics)

    def later(self, topics: Sequence[str], now: Pins) -> DataFrame:
        """Return what was written while the archive was made, without values."""
        del now
        return self._read(_LATER, topics)

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
    """Return a pin with what has been removed until now."""
    later = {each.partition: each for each in now.partitions}
    partitions = tuple(
        replace(each, start=max(each.start, later[each.partition].start), first_at=later[each.partition].first_at)
        for each in pin.partitions
        if each.partition in later
    )
    return replace(now, partitions=partitions)


def archive(source: Source, topics: Sequence[str], folder: Folder) -> Pins:
    """Write pinned topics as Parquet, one folder a topic, so that they can be audited after Kafka has let go of them.

    The offsets are written last: a folder without them is an archive that was not finished.
    """
    if folder.exists(_PINS):
        raise SourceError(f"{folder.uri!r} holds an archive already: choose another folder")
    for part, records in ((_COMMITTED, source.committed), (_UNSETTLED, source.unsettled)):
        records(topics).write.mode("overwrite").partitionBy("topic").parquet(folder.path(part))
    now = source.anew()
    now.pin(topics)
    # A topic that was deleted meanwhile is left out: it proves nothing.
    kept = {name: _trimmed(source.pins.topics[name], pin) for name, pin in now.pins.topics.items() if name in topics}
    pins = replace(source.pins, topics=kept)
    # Of what compaction removes, a later record of the key is the only trace.
    compacted = [name for name, pin in kept.items() if pin.compacted]
    without_values = source.later(compacted, now.pins).withColumn("value", F.lit(None).cast("binary"))
    without_values.write.mode("overwrite").partitionBy("topic").parquet(folder.path(_LATER))
    folder.write(json.dumps({"prefix": source.prefix}) + "\n", _ABOUT)
    folder.write(pins.to_json(), _PINS)
    return pins
