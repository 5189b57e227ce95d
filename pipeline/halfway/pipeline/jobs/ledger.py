"""The job `ledger`: a stream that writes a row for each transaction when it ends, and keeps the pending ones."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from halfway.pipeline.access import KafkaAccess
from halfway.pipeline.engines.dialect import Frame, Merge, Once
from halfway.pipeline.engines.engine import Engine, SparkEngine
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.jobs import reading
from halfway.pipeline.sources import headers
from halfway.pipeline.sources.pinned import KafkaSource
from halfway.pipeline.sources.pins import TopicPin
from halfway.pipeline.sources.spark import COLUMNS, SparkReader, kafka_options
from halfway.pipeline.tables import Files, as_of, last, versions

_IS_LATER: Final = """old.state = coalesce(new.state, 'prepared') and new."offset" >= old."offset\""""
MERGE: Final = Merge(
    same="old.id = new.id and coalesce(old.state = new.state, true)",
    deletes=f"(coalesce({_IS_LATER}, false) and not new.open) "
    f"or (not coalesce({_IS_LATER}, false) and old.since < new.horizon)",
    replaces=f"{_IS_LATER} and new.open",
    begins="new.open",
    deciding=("open", "horizon"),
)
"""How `changes` change the table of pending transactions."""
SETTINGS: Final = {
    # Each batch replaces files: those of a week would be many times the size of the table.
    "deletedFileRetentionDuration": "interval 1 hours",
    "logRetentionDuration": "interval 1 days",
}
"""The settings of that table."""


def ledger(engine: SparkEngine, decoded: DataFrame) -> DataFrame:
    """Return one row for each transaction that has ended, from decoded outcomes.

    `latency_ms` is the time from prepare to outcome, `size` the bytes of its messages (null if the op of a rollback
    does not have it), `checks` the number of checks that were sent, `ended_date` the day (UTC) of the outcome.
    """
    rows: DataFrame = engine.query(
        """select id, "group", lower(kind) as outcome, cause, timestamp_millis(prepared_at) as prepared_at,
            timestamp_millis("at") as ended_at, greatest("at" - prepared_at, 0) as latency_ms, checks,
            sort_array(array_distinct(messages.topic)) as topics, size(messages) as messages,
            case when size(messages) > 0
                then aggregate(messages, cast(0 as bigint), (total, one) -> total + one.size) end as size,
            "partition" as shard, "offset" as op_offset, to_date(timestamp_millis("at")) as ended_date
        from $decoded where error is null""",
        decoded=decoded,
    )
    # A file for each partition of op would be too many, and a shuffle costs more than this.
    return rows.coalesce(engine.spark.sparkContext.defaultParallelism)


def changes(engine: SparkEngine, records: DataFrame, outcomes: DataFrame, *, horizon_ms: int) -> DataFrame:
    """Return how new records of half and parked, and outcomes, change the pending transactions. Apply it with `MERGE`.

    In each topic the last record of an id wins, and a tombstone removes it. An outcome (id, at) removes it too, because
    Kafka deletes tombstones after a time; but not an outcome that is a horizon older than the record: then a client has
    used the id again. The topics have no order between them.

    Returns:
        The columns of the table (state: `prepared` or `parked`, null for a change of both, which has no new record that
        is open; since: ms, the time of the prepare if it is known), null without a new record; `open`, whether there is
        a new record that has not ended; and `horizon`: an older record has ended.

    """
    is_open = "coalesce({0}.alive and (horizon is null or {0}.since >= horizon), false)"
    # Most ids have only the one row. With the hint one sort by id is enough, behind the shuffle.
    found: DataFrame = engine.query(
        f"""select id, record."group" as "group", state, record.since as since, record.shard as shard,
            record."offset" as "offset", {is_open.format("record")} as open, horizon
        from (
            select id, horizon, inline(case when parked is null and not {is_open.format("prepared")}
                then array(named_struct('state', cast(null as string), 'record', prepared))
                else array(named_struct('state', 'prepared', 'record', prepared),
                    named_struct('state', 'parked', 'record', parked)) end) as (state, record)
            from (
                select id, max(record) filter (where kind <> 'parked') as prepared,
                    max(record) filter (where kind = 'parked') as parked, max(horizon) as horizon
                from (select /*+ repartition(id) */ * from (
                    select id, kind, named_struct('offset', "offset", 'alive', alive, 'group', "group",
                        'since', coalesce(prepared_at, "at"), 'shard', "partition") as record,
                        cast(null as bigint) as horizon
                    from $records where fault is null
                    union all
                    select id, null, null, "at" + {horizon_ms} from $outcomes
                ) together) by_id group by id
            ) newest
        ) of_each""",  # noqa: S608
        records=records,
        outcomes=outcomes,
    )
    return found


ENDED: Final = "ended"
PENDING: Final = "pending"
QUARANTINE: Final = "quarantine"
CHECKPOINT: Final = "_checkpoint"
"""Beside the tables, so that they are moved and deleted together."""
KINDS: Final = ("half", "op", "parked")
DAY: Final = "ended_date"
"""The column by which `ended` is partitioned."""
COMPACTED_AFTER: Final = 100
"""Batches: a quarter of an hour at 10 s a batch."""
_STREAM: Final = "metadata"
_COUNTS: Final = f"""select records, ended, faults + outcomes - ended as wrong
    from (select count(*) as records, count(fault) as faults,
        count_if(kind = 'op' and fault is null and {headers.IS_FINAL}) as outcomes from $rows) read
    cross join (select count(*) as ended from $ended) written"""  # noqa: S608
"""What a batch has: no record is read twice in one."""


@dataclass(frozen=True, kw_only=True)
class LedgerOptions:
    """The options of the command line. `once` stops when the present records have been read."""

    once: bool = False
    every_s: float = 10
    max_records: int = 1_000_000
    """The largest number of records in a batch."""
    horizon_ms: int = 900_000
    """An id that is prepared so long after its outcome is another transaction."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A batch that is done: records of transactions read, outcomes written, and transactions pending after it."""

    batch: int
    records: int
    seconds: float
    ended: int
    pending: int


def start(
    spark: SparkSession,
    access: KafkaAccess,
    output: Files,
    options: LedgerOptions,
    *,
    done: Callable[[Progress], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
) -> StreamingQuery:
    """Start the stream. It calls `done` after each batch.

    Each batch is in the tables once, whenever the job is killed. Spark's checkpoint repeats a batch that was not
    finished with the same records, or with fewer if Kafka has removed some in the meantime. A Delta table knows the
    last batch that was written to it, and a batch that it has is not written again. PipelineError if the tables in the
    folder cannot be continued, or a topic does not exist.
    """
    tables = Tables(output, access.prefix, options, done)
    topics = [access.topic(kind) for kind in KINDS]
    source = KafkaSource(SparkReader(spark), access)
    source.pin(topics)
    reading.require(source, KINDS)
    gone = _removed_unread(output, source.pins.topics[access.topic("op")])
    if gone:
        warn(
            f"retention has removed up to {gone:,} records of {access.topic('op')} before they were read: "
            "the outcomes among them are missing from the ledger"
        )
    reader = spark.readStream.format("kafka").options(**kafka_options(access, "read_committed"))
    reader = reader.option("subscribe", ",".join(topics)).option("startingOffsets", "earliest")
    # A ledger continues with the records that retention and compaction have left.
    reader = reader.option("failOnDataLoss", "false").option("maxOffsetsPerTrigger", options.max_records)
    writer = reader.load().select(*COLUMNS).writeStream.foreachBatch(tables.write)
    writer = writer.option("checkpointLocation", output.path(CHECKPOINT)).queryName("halfway-ledger")
    if options.once:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{round(options.every_s * 1000)} milliseconds").start()


class Tables:
    """The ledger's tables in one folder: each batch is appended to `ended` and `quarantine`, and changes `pending`."""

    def __init__(self, output: Files, prefix: str, options: LedgerOptions, done: Callable[[Progress], None]) -> None:
        """Take a folder. PipelineError if it holds tables and a checkpoint that do not belong together."""
        _require_whole(output)
        self._output, self._prefix, self._report = output, prefix, done
        self._horizon_ms = options.horizon_ms
        self._started = False

    def write(self, batch: DataFrame, number: int) -> None:
        """Write one batch, on the executors. To repeat it, even after a part of it was written, gives the same tables.

        `ended` first, then `pending`, then `quarantine`. Each commit holds the number of the batch, and Delta leaves
        out a batch that a table has.
        """
        began = time.monotonic()
        engine = SparkEngine(batch.sparkSession)
        kind = f"substr(topic, {len(self._prefix) + 1})"
        rows = engine.query(headers.internal(engine.dialect, kind).sql, records=self._without_payloads(batch)).persist()
        is_op = F.col("topic") == self._prefix + "op"
        op, others = rows.where(is_op), rows.where(~is_op)
        outcomes = reading.decoded_outcomes(engine, op)
        ended = ledger(engine, outcomes).persist()
        try:
            # Each query costs the driver as much as the executors: one says all numbers.
            [read] = engine.rows(engine.query(_COUNTS, rows=rows, ended=ended))
            self._save(engine, ENDED, ended, number, by=DAY)
            self._change_pending(engine, others, headers.outcomes(engine, op).select("id", "at"), number)
            if read["wrong"]:
                self._save(engine, QUARANTINE, reading.unusable(engine, [rows], [outcomes]), number)
            pending = engine.load(self._output.path(PENDING)).count()
        finally:
            for frame in (ended, rows):
                frame.unpersist()
        if number and number % COMPACTED_AFTER == 0:
            for name in (ENDED, PENDING):
                engine.tidy(self._output.path(name))
        self._started = True
        seconds = time.monotonic() - began
        self._report(
            Progress(batch=number, records=read["records"], seconds=seconds, ended=read["ended"], pending=pending)
        )

    def _save(self, engine: SparkEngine, name: str, rows: DataFrame, number: int, *, by: str | None = None) -> None:
        engine.save(rows, self._output.path(name), once=Once(self._writer, number), by=by)

    def _without_payloads(self, batch: DataFrame) -> DataFrame:
        """Keep the values of op only. Of all other records it matters only whether they have one."""
        nothing = F.when(F.col("value").isNotNull(), F.lit(bytearray()))
        return batch.withColumn(
            "value", F.when(F.col("topic") == self._prefix + "op", F.col("value")).otherwise(nothing)
        )

    def _change_pending(self, engine: SparkEngine, records: DataFrame, outcomes: DataFrame, number: int) -> None:
        path = self._output.path(PENDING)
        if number and not self._started:
            outcomes = outcomes.unionAll(self._outcomes_since(engine, records))
        changing = changes(engine, records, outcomes, horizon_ms=self._horizon_ms)
        if not versions(self._output, PENDING):
            engine.save(changing.drop(*MERGE.deciding).limit(0), path, settings=SETTINGS)
        engine.merge(changing, path, MERGE, once=Once(self._writer, number))

    def _outcomes_since(self, engine: SparkEngine, records_now: DataFrame) -> DataFrame:
        """Return the outcomes in the table that can belong to pending transactions or to the records of this batch.

        A ledger that was stopped for longer than Kafka keeps a tombstone never sees that tombstone.
        """
        pending: DataFrame = engine.load(self._output.path(PENDING))
        oldest = pending.agg(F.min("since")).collect()[0][0]
        if oldest is None:
            return pending.select("id", F.lit(None).cast("bigint").alias("at")).limit(0)
        since = F.timestamp_millis(F.lit(oldest - self._horizon_ms))
        recent = (F.col(DAY) >= F.to_date(since)) & (F.col("ended_at") > since)
        ended: DataFrame = engine.load(self._output.path(ENDED)).where(recent)
        wanted = pending.select("id").unionAll(records_now.select("id"))
        return ended.join(wanted, "id", "left_semi").select("id", F.unix_millis("ended_at").alias("at"))

    @cached_property
    def _writer(self) -> str:
        """Spark's own name for the stream, stored with its progress. Another checkpoint counts batches from 0."""
        return _stream(self._output)


def tables(engine: Engine, output: Files) -> tuple[Frame, Frame] | None:
    """Return `ended` and `pending` as of the last batch that both have, None before the first one."""
    if _STREAM not in output.names(CHECKPOINT):
        return None
    writer = _stream(output)
    # `pending` is written after `ended`.
    number = last(output, PENDING, writer)
    if number < 0:
        return None
    ended, pending = (engine.load(output.path(name), as_of(output, name, writer, number)) for name in (ENDED, PENDING))
    return ended, pending


def export(spark: SparkSession, output: Files, into: Files) -> None:
    """Write `ended`, partitioned by day, and `pending` as of one batch as plain Parquet, in place of what is there.

    PipelineError if the folder holds no ledger.
    """
    found = tables(SparkEngine(spark), output)
    if found is None:
        raise PipelineError(f"{output.uri!r} holds no ledger: run halfway-pipeline ledger first")
    ended, pending = found
    pending.write.mode("overwrite").parquet(into.path(PENDING))
    ended.write.mode("overwrite").partitionBy(DAY).parquet(into.path(ENDED))


def quarantine(engine: Engine, output: Files) -> Frame | None:
    return engine.load(output.path(QUARANTINE)) if versions(output, QUARANTINE) else None


def _stream(output: Files) -> str:
    return str(json.loads(output.read(CHECKPOINT, _STREAM))["id"])


def _numbers(output: Files, log: str) -> list[int]:
    """Return the numbers of the batches in one of the checkpoint's logs."""
    return [int(name) for name in output.names(CHECKPOINT, log) if name.isdigit()]


def _require_whole(output: Files) -> None:
    there = [name for name in (ENDED, PENDING, QUARANTINE) if output.names(name)]
    last_begun = max(_numbers(output, "offsets"), default=-1)
    known = _STREAM in output.names(CHECKPOINT)
    remedy = f"take another folder, or delete {', '.join([*there, CHECKPOINT])} there and begin again"
    if there and (last_begun < 0 or not known):
        raise PipelineError(f"{output.uri!r} holds {' and '.join(there)} without their {CHECKPOINT}: {remedy}")
    if last_begun < 0:
        return
    writer = _stream(output)
    ended, pending = (last(output, name, writer) for name in (ENDED, PENDING))
    if not last_begun - 1 <= pending <= ended <= last_begun:
        raise PipelineError(
            f"{output.uri!r} holds a {CHECKPOINT} of {last_begun + 1} batches, {ENDED} of {ended + 1} and {PENDING} of "
            f"{pending + 1}: {remedy}"
        )


def _removed_unread(output: Files, op: TopicPin) -> int:
    """Return how many offsets of op retention has removed that the ledger has not read."""
    done = max(_numbers(output, "commits"), default=None)
    if done is None:
        return 0
    read = json.loads(output.read(CHECKPOINT, "offsets", str(done)).splitlines()[-1]).get(op.topic, {})
    return sum(max(0, each.start - int(read.get(str(each.partition), 0))) for each in op.partitions)
