"""The job `ledger`: a stream that writes one row for each transaction when it ends, and what has not ended."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from pyspark.sql import functions as F

from halfway.pipeline import decoding, delta, records
from halfway.pipeline.errors import SourceError
from halfway.pipeline.jobs import reading
from halfway.pipeline.sources import COLUMNS, KafkaSource, kafka_options
from halfway.pipeline.transforms import ledger as transform

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from halfway.pipeline.access import KafkaAccess
    from halfway.pipeline.folders import Folder

Format = Literal["parquet", "delta"]
ENDED: Final = "ended"
PENDING: Final = "pending"
QUARANTINE: Final = "quarantine"
CHECKPOINT: Final = "_checkpoint"
"""Beside the tables, so that nobody keeps the one and loses the other."""
_BATCH: Final = "batch="
_KINDS: Final = ("half", "op", "parked")
_PENDING_COLUMNS: Final = "id string, `group` string, state string, since bigint, shard int, `offset` bigint"


@dataclass(frozen=True, kw_only=True)
class LedgerOptions:
    """What the command line says; `once` stops when what is there now has been read."""

    once: bool = False
    every_s: float = 10
    max_records: int = 1_000_000
    """Records of one batch at most."""
    format: Format = "parquet"


def start(spark: SparkSession, access: KafkaAccess, output: Folder, options: LedgerOptions) -> StreamingQuery:
    """Start the stream.

    Each batch stands in the tables once, whenever the job was killed: Spark's checkpoint repeats a batch that was not
    finished with the same records. In Parquet a batch has folders of its own and overwrites what an attempt at it has
    left there; a Delta table knows the last batch that was appended, and is not given it again.
    """
    topics = [access.topic(kind) for kind in _KINDS]
    source = KafkaSource(spark, access)
    source.pin(topics)
    reading.demand(source, _KINDS)
    tables = Tables(spark, output, access.prefix, options.format)
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

    def __init__(self, spark: SparkSession, output: Folder, prefix: str, table_format: Format = "parquet") -> None:
        """Take the folder; nothing is written before the first batch.

        Raises:
            SourceError: the folder holds a ledger of the other format, or the one asked for cannot be written.

        """
        self._spark = spark
        self._output = output
        self._prefix = prefix
        self._delta = table_format == "delta"
        there = output.names(ENDED)
        if self._delta:
            delta.demand()
        if any(name.startswith(_BATCH) for name in there) if self._delta else delta.LOG in there:
            raise SourceError(f"{output.uri!r} holds a ledger of another format than {table_format}")

    def write(self, batch: DataFrame, number: int) -> None:
        """Write one batch; doing it again, whole or after a part of it, leaves the same."""
        kept = self._without_payloads(batch).persist()
        try:
            told = {kind: records.internal(self._of(kept, kind), kind) for kind in _KINDS}
            outcomes = reading.decoded_outcomes(told["op"].where(F.col("fault").isNull()))
            self._add(transform.ledger(outcomes), ENDED, number)
            self._overwrite(self._pending_after(number, told["half"], told["parked"]), PENDING, number)
            wrong = reading.all_of([*map(decoding.faulty, told.values()), decoding.quarantined(outcomes)])
            if wrong is not None and not wrong.isEmpty():
                self._add(wrong, QUARANTINE, number)
            outcomes.unpersist()
        finally:
            kept.unpersist()
        # The one before stays: the batch that follows may have to be done again from this one, and this from that.
        for name in self._output.names(PENDING):
            if name.startswith(_BATCH) and int(name.removeprefix(_BATCH)) < number - 1:
                self._output.delete(PENDING, name)

    def _without_payloads(self, batch: DataFrame) -> DataFrame:
        """Keep the values of op only: of the others it matters whether there is one."""
        nothing = F.when(F.col("value").isNotNull(), F.lit(bytearray()))
        is_op = F.col("topic") == self._prefix + "op"
        return batch.withColumn("value", F.when(is_op, F.col("value")).otherwise(nothing))

    def _of(self, batch: DataFrame, kind: str) -> DataFrame:
        return batch.where(F.col("topic") == self._prefix + kind)

    def _pending_after(self, number: int, halves: DataFrame, parked: DataFrame) -> DataFrame:
        folder = f"{_BATCH}{number - 1}"
        if number and self._output.exists(PENDING, folder):
            before = self._spark.read.schema(_PENDING_COLUMNS).parquet(self._output.path(PENDING, folder))
        else:
            before = self._spark.createDataFrame([], _PENDING_COLUMNS)
        return transform.pending(before, halves, parked)

    def _add(self, table: DataFrame, name: str, number: int) -> None:
        if self._delta:
            # Spark's own name for the stream, kept with its progress: another checkpoint counts batches anew.
            stream = str(json.loads(self._output.read(CHECKPOINT, "metadata"))["id"])
            delta.append(table, self._output.path(name), writer=stream, batch=number)
        else:
            self._overwrite(table, name, number)

    def _overwrite(self, table: DataFrame, name: str, number: int) -> None:
        table.coalesce(2).write.mode("overwrite").parquet(self._output.path(name, f"{_BATCH}{number}"))


def ended(spark: SparkSession, output: Folder) -> DataFrame | None:
    """Return the ledger's rows so far, None before its first batch."""
    if delta.LOG in output.names(ENDED):
        return delta.read(spark, output.path(ENDED))
    done = _done(output, ENDED)
    return spark.read.parquet(*(output.path(ENDED, name) for name in done)) if done else None


def pending(spark: SparkSession, output: Folder) -> DataFrame | None:
    """Return what had not ended at the last batch that was finished, None before the first."""
    done = _done(output, PENDING)
    return spark.read.parquet(output.path(PENDING, done[-1])) if done else None


def _done(output: Folder, table: str) -> list[str]:
    """Return the folders of batches that were written whole, in order."""
    done = [name for name in output.names(table) if output.exists(table, name, "_SUCCESS")]
    return sorted(done, key=lambda name: int(name.removeprefix(_BATCH)))


def progress(query: StreamingQuery) -> dict[str, Any]:
    """Return batch, records and rate of the last batch, for a log line."""
    last: Any = query.lastProgress
    if last is None:
        return {}
    return {
        "batch": last["batchId"],
        "records": last["numInputRows"],
        "records_per_s": round(last.get("processedRowsPerSecond") or 0),
    }
