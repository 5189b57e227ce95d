"""The job `ledger`: a stream that writes one row for each transaction when it ends, and what has not ended."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from pyspark.sql import Observation
from pyspark.sql import functions as F

from halfway.pipeline import decoding, delta, records
from halfway.pipeline.errors import SourceError
from halfway.pipeline.jobs import reading
from halfway.pipeline.sources import COLUMNS, KafkaSource, kafka_options
from halfway.pipeline.transforms import ledger as transform

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from halfway.pipeline.access import KafkaAccess
    from halfway.pipeline.folders import Folder
    from halfway.pipeline.pins import TopicPin

Format = Literal["parquet", "delta"]
ENDED: Final = "ended"
PENDING: Final = "pending"
QUARANTINE: Final = "quarantine"
CHECKPOINT: Final = "_checkpoint"
"""Beside the tables, so that nobody keeps the one and loses the other."""
KINDS: Final = ("half", "op", "parked")
_BATCH: Final = re.compile(r"\Abatch=(\d+)(?:-(\d+))?\Z")
_DONE: Final = "_SUCCESS"
WIDTHS: Final = (100, 10_000)
"""Finished batches are merged into folders of so many: at 10 s a batch, of a quarter of an hour and of a day."""
LARGE_BYTES: Final = 16 << 20
"""Folders that hold more on average are not worth being merged."""
_FILE_BYTES: Final = 256 << 20
_SMALL_BATCH: Final = 250_000
_STREAM: Final = "metadata"
_LOOKS: Final = 10
_PENDING_COLUMNS: Final = "id string, `group` string, state string, since bigint, shard int, `offset` bigint"


@dataclass(frozen=True, kw_only=True)
class LedgerOptions:
    """What the command line says; `once` stops when what is there now has been read."""

    once: bool = False
    every_s: float = 10
    max_records: int = 1_000_000
    """Records of one batch at most."""
    format: Format = "parquet"
    horizon_ms: int = 900_000
    """What is prepared so long after an outcome of its id is another transaction."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A batch that was done: the records read, the outcomes written, and what has not ended since."""

    batch: int
    records: int
    seconds: float
    ended: int
    pending: int


def start(
    spark: SparkSession,
    access: KafkaAccess,
    output: Folder,
    options: LedgerOptions,
    *,
    done: Callable[[Progress], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
) -> StreamingQuery:
    """Start the stream; `done` is called after each batch.

    Each batch stands in the tables once, whenever the job was killed: Spark's checkpoint repeats a batch that was not
    finished with the same records, or with fewer where Kafka has removed some meanwhile. So what a table has of it
    whole stays: in Parquet a batch has folders of its own, and overwrites only what is unfinished there; a Delta table
    knows the last batch that was appended, and is not given it again.

    Raises:
        SourceError: the folder's tables cannot be gone on with, or a topic is not there.

    """
    tables = Tables(spark, output, access.prefix, options, done)
    topics = [access.topic(kind) for kind in KINDS]
    source = KafkaSource(spark, access)
    source.pin(topics)
    reading.demand(source, KINDS)
    gone = _removed_unread(output, source.pins.topics[access.topic("op")])
    if gone:
        warn(
            f"retention has removed up to {gone:,} records of {access.topic('op')} before they were read: "
            "the outcomes among them are missing from the ledger"
        )
    reader = spark.readStream.format("kafka").options(**kafka_options(access, "read_committed"))
    reader = reader.option("subscribe", ",".join(topics)).option("startingOffsets", "earliest")
    # What retention and compaction have removed before it was read is gone; a ledger goes on with what there is.
    reader = reader.option("failOnDataLoss", "false")
    reader = reader.option("maxOffsetsPerTrigger", options.max_records)
    writer = reader.load().select(*COLUMNS).writeStream.foreachBatch(tables.write)
    writer = writer.option("checkpointLocation", output.path(CHECKPOINT)).queryName("halfway-ledger")
    if options.once:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{round(options.every_s * 1000)} milliseconds").start()


class Tables:
    """The ledger's tables in one folder: `ended` and `quarantine` grow by batches, of `pending` the last one counts."""

    def __init__(
        self,
        spark: SparkSession,
        output: Folder,
        prefix: str,
        options: LedgerOptions,
        done: Callable[[Progress], None],
    ) -> None:
        """Take the folder; nothing is written before the first batch.

        Raises:
            SourceError: the folder holds a ledger of the other format, tables and checkpoint that do not belong
                together, or the format asked for cannot be written.

        """
        self._spark = spark
        self._output = output
        self._prefix = prefix
        self._horizon_ms = options.horizon_ms
        self._delta = options.format == "delta"
        self._report = done
        self._started = False
        if self._delta:
            delta.demand(output.qualified(ENDED))
        there = output.names(ENDED)
        if any(map(_BATCH.match, there)) if self._delta else delta.LOG in there:
            raise SourceError(f"{output.uri!r} holds a ledger of another format than {options.format}")
        _demand_whole(output, in_delta=self._delta)

    def write(self, batch: DataFrame, number: int) -> None:
        """Write one batch; doing it again, whole or after a part of it, leaves the same."""
        began = time.monotonic()
        if not self._delta and (not self._started or number % WIDTHS[0] == 0):
            self._merge(number)
        kept = self._without_payloads(batch).persist()
        try:
            count = kept.count()
            files = 1 if count <= _SMALL_BATCH else 2
            kind = F.substr("topic", F.lit(len(self._prefix) + 1))
            op = reading.InternalRecords(kept.where(self._is_op()), "op")
            others = reading.InternalRecords(kept.where(~self._is_op()), kind)
            outcomes, has_errors = reading.noting(reading.decoded_outcomes(op.records), "error")
            ended = self._add(transform.ledger(outcomes).coalesce(files), ENDED, number)
            open_still = self._pending_after(number, others.records, records.outcomes(op.records).select("id", "at"))
            pending = self._overwrite(open_still.coalesce(files), PENDING, number)
            undecoded = decoding.quarantined(outcomes) if has_errors() else None
            wrong = reading.all_of([op.faulty(), others.faulty(), undecoded])
            if wrong is not None:
                self._add(wrong.coalesce(files), QUARANTINE, number)
        finally:
            kept.unpersist()
        # The one before stays: the batch that follows may have to be done again from this one, and this from that.
        for name in self._output.names(PENDING):
            span = Span.of(name)
            if span is not None and span.last < number - 1:
                self._output.delete(PENDING, name)
        self._started = True
        seconds = time.monotonic() - began
        self._report(Progress(batch=number, records=count, seconds=seconds, ended=ended, pending=pending))

    def _without_payloads(self, batch: DataFrame) -> DataFrame:
        """Keep the values of op only: of the others it matters whether there is one."""
        nothing = F.when(F.col("value").isNotNull(), F.lit(bytearray()))
        return batch.withColumn("value", F.when(self._is_op(), F.col("value")).otherwise(nothing))

    def _is_op(self) -> Column:
        return F.col("topic") == self._prefix + "op"

    def _pending_after(self, number: int, told: DataFrame, outcomes: DataFrame) -> DataFrame:
        # The stream's own session: what is noted in it is told only to what runs in it.
        spark = told.sparkSession
        if number == 0:
            before = spark.createDataFrame([], _PENDING_COLUMNS)
        else:
            folder = f"batch={number - 1}"
            if not self._output.exists(PENDING, folder, _DONE):
                raise SourceError(
                    f"there is no {self._output.path(PENDING, folder)}, which batch {number} goes on from"
                )
            before = spark.read.schema(_PENDING_COLUMNS).parquet(self._output.path(PENDING, folder))
            if not self._started:
                outcomes = outcomes.unionAll(self._outcomes_since(before))
        return transform.pending(before, told, outcomes, horizon_ms=self._horizon_ms)

    def _outcomes_since(self, pending: DataFrame) -> DataFrame:
        """Return the outcomes in the table that can be those of what is pending.

        A ledger that did not run for longer than Kafka keeps a tombstone never sees it, wherever it stood in op.
        """
        spark = pending.sparkSession
        oldest = pending.agg(F.min("since")).collect()[0][0]
        table = None if oldest is None else self._ended(spark)
        if table is None:
            return spark.createDataFrame([], "id string, at bigint")
        recent = F.col("ended_at") > F.timestamp_millis(F.lit(oldest - self._horizon_ms))
        return table.where(recent).select("id", F.unix_millis("ended_at").alias("at"))

    def _ended(self, spark: SparkSession) -> DataFrame | None:
        if self._delta:
            return delta.read(spark, self._output.qualified(ENDED))
        return _read(spark, self._output, ENDED, standing(_whole(self._output, ENDED)))

    def _add(self, table: DataFrame, name: str, number: int) -> int:
        if self._delta:
            # Spark's own name for the stream, kept with its progress: another checkpoint counts batches anew.
            stream = _stream(self._output)
            return delta.append(table, self._output.qualified(name), writer=stream, batch=number)
        if not self._started and self._output.exists(name, f"batch={number}", _DONE):
            # What is noted while the rows are made has to be told all the same.
            return _counted(table, lambda rows: rows.write.format("noop").mode("overwrite").save())
        return self._overwrite(table, name, number)

    def _overwrite(self, table: DataFrame, name: str, number: int) -> int:
        folder = self._output.path(name, f"batch={number}")
        return _counted(table, lambda rows: rows.write.mode("overwrite").parquet(folder))

    def _merge(self, number: int) -> None:
        """Merge what was finished before a batch into folders of many batches, so that there are never too many.

        A merged folder counts when it is whole, in place of those that it contains. They are deleted a round later: a
        reader that has found them has so much time, and what stands in both is read once. Before it goes on, a ledger
        has done each round whole, so only the last two are looked at, again where it was killed then.
        """
        for width in WIDTHS:
            rounds = number // width
            if not rounds or (self._started and number % width):
                continue
            whole = _whole(self._output, ENDED)
            merged = Span((rounds - 1) * width, rounds * width - 1)
            spans = [span for span in standing(whole) if merged.contains(span)]
            if spans:
                self._merge_into(merged, spans)
            settled = Span(merged.first - width, merged.first - 1)
            for name in self._output.names(ENDED) if settled in whole else ():
                small = Span.of(name)
                if small is not None and settled.contains(small):
                    self._output.delete(ENDED, name)

    def _merge_into(self, merged: Span, spans: list[Span]) -> None:
        size = sum(self._output.size(ENDED, span.name) for span in spans)
        if size > len(spans) * LARGE_BYTES:
            return
        table = self._spark.read.parquet(*(self._output.path(ENDED, span.name) for span in spans))
        table.coalesce(1 + size // _FILE_BYTES).write.mode("overwrite").parquet(self._output.path(ENDED, merged.name))


def _counted(table: DataFrame, write: Callable[[DataFrame], None]) -> int:
    """Write a table and return how many rows it has."""
    written = Observation()
    write(table.observe(written, F.count(F.lit(1)).alias("rows")))
    return int(written.get["rows"])


def tables(spark: SparkSession, output: Folder) -> tuple[DataFrame, DataFrame] | None:
    """Return `ended` and `pending` as of one batch, the last one that both have whole; None before the first.

    Raises:
        SourceError: there is no such batch, though there are batches of both.

    """
    in_delta = delta.LOG in output.names(ENDED)
    stream = _stream(output) if in_delta and output.exists(CHECKPOINT, _STREAM) else None
    for _ in range(_LOOKS):
        # In this order: what is found in `ended` first is in `pending` then, unless it has been replaced meanwhile.
        whole = [] if in_delta else _whole(output, ENDED)
        newest = delta.newest(output.qualified(ENDED), writer=stream) if in_delta else _newest(whole)
        ready = [span.last for span in _whole(output, PENDING)]
        if not ready or newest < 0:
            return None
        batch = max((number for number in ready if number <= newest), default=None)
        if batch is not None:
            break
    else:
        raise SourceError(f"{output.uri!r} has no batch that stands both in {ENDED} and in {PENDING}")
    pending = spark.read.schema(_PENDING_COLUMNS).parquet(output.path(PENDING, f"batch={batch}"))
    if in_delta:
        return delta.read(spark, output.qualified(ENDED), writer=stream, upto=batch), pending
    ended = _read(spark, output, ENDED, [span for span in standing(whole) if span.last <= batch])
    return None if ended is None else (ended, pending)


def quarantine(spark: SparkSession, output: Folder) -> DataFrame | None:
    """Return the records that could not be read, None where there are none."""
    if delta.LOG in output.names(QUARANTINE):
        return delta.read(spark, output.qualified(QUARANTINE))
    return _read(spark, output, QUARANTINE, _whole(output, QUARANTINE))


@dataclass(frozen=True, order=True)
class Span:
    """The batches of one folder: one, or all from a first to a last."""

    first: int
    last: int

    @classmethod
    def of(cls, name: str) -> Span | None:
        """Tell it from a folder's name, None where that is no name of a batch."""
        found = _BATCH.match(name)
        return None if found is None else cls(int(found[1]), int(found[2] or found[1]))

    @property
    def name(self) -> str:
        """The folder's name."""
        return f"batch={self.first}" if self.first == self.last else f"batch={self.first}-{self.last}"

    @property
    def width(self) -> int:
        """How many batches it has."""
        return self.last - self.first + 1

    def contains(self, other: Span) -> bool:
        """Whether it has all that another has, and more."""
        return self != other and self.first <= other.first and other.last <= self.last


def standing(whole: Iterable[Span]) -> list[Span]:
    """Return, of the folders that are whole, those that are to be read: each batch once, in order."""
    found: list[Span] = []
    for span in sorted(whole, key=lambda each: (each.first, -each.last)):
        if not found or span.first > found[-1].last:
            found.append(span)
    return found


def _whole(output: Folder, table: str) -> list[Span]:
    """Return the folders that were written to their end."""
    spans = map(Span.of, output.holding(table, "batch=*", _DONE))
    return [span for span in spans if span is not None]


def _newest(spans: Iterable[Span]) -> int:
    return max((span.last for span in spans), default=-1)


def _read(spark: SparkSession, output: Folder, table: str, spans: list[Span]) -> DataFrame | None:
    return spark.read.parquet(*(output.path(table, span.name) for span in spans)) if spans else None


def _stream(output: Folder) -> str:
    return str(json.loads(output.read(CHECKPOINT, _STREAM))["id"])


def _numbers(output: Folder, log: str) -> list[int]:
    """Return the batches in one of the checkpoint's logs."""
    return [int(name) for name in output.names(CHECKPOINT, log) if name.isdigit()]


def _demand_whole(output: Folder, *, in_delta: bool) -> None:
    """Raise SourceError where tables and checkpoint are not those that were written together."""
    there = [name for name in (ENDED, PENDING, QUARANTINE) if output.names(name)]
    begun = max(_numbers(output, "offsets"), default=-1)
    known = output.exists(CHECKPOINT, _STREAM)
    remedy = f"take another folder, or delete {', '.join([*there, CHECKPOINT])} there and begin anew"
    if there and (begun < 0 or not known):
        raise SourceError(f"{output.uri!r} holds {' and '.join(there)} without their {CHECKPOINT}: {remedy}")
    if begun < 0:
        return
    pending = _newest(_whole(output, PENDING))
    ended = delta.appended(output.qualified(ENDED), writer=_stream(output)) if in_delta else _without_gap(output, ENDED)
    if not begun - 1 <= pending <= ended <= begun:
        raise SourceError(
            f"{output.uri!r} holds a {CHECKPOINT} of {begun + 1} batches, {ENDED} of {ended + 1} and {PENDING} of "
            f"{pending + 1}: {remedy}"
        )


def _without_gap(output: Folder, table: str) -> int:
    """Return the last batch before which, in folders that are whole, none is missing; -1 where the first one is."""
    last = -1
    for span in standing(_whole(output, table)):
        if span.first != last + 1:
            break
        last = span.last
    return last


def _removed_unread(output: Folder, op: TopicPin) -> int:
    """Return how many offsets of op were removed, not by compaction, after where the ledger had got to."""
    done = max(_numbers(output, "commits"), default=None)
    if done is None:
        return 0
    read = json.loads(output.read(CHECKPOINT, "offsets", str(done)).splitlines()[-1]).get(op.topic, {})
    return sum(max(0, each.start - int(read.get(str(each.partition), 0))) for each in op.partitions)
