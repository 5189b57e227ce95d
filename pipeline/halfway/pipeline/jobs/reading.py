"""What the jobs share in reading: halfway's own topics, decoded where needed, and what is wrong in them."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F

from halfway.pipeline import decoding, records
from halfway.pipeline.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import Column

    from halfway.pipeline.sources import Source


def demand(source: Source, kinds: Sequence[str]) -> None:
    """Raise SourceError where one of halfway's own topics is not there: with nothing to read, nothing looks wrong."""
    missing = [source.prefix + kind for kind in kinds if source.prefix + kind not in source.pins.topics]
    if missing:
        raise SourceError(
            f"there is no topic {', '.join(missing)}: is HALFWAY_KAFKA_PREFIX the coordinator's, and has it ever run?"
        )


def demand_given(source: Source, topics: Sequence[str]) -> None:
    """Raise SourceError where a topic that was asked for by name is not there."""
    if missing := [name for name in topics if name not in source.pins.topics]:
        raise SourceError(f"there is no topic {', '.join(missing)}, which --topic names")


class InternalRecords:
    """Records of half, op or parked, and whether there are some that halfway cannot have written."""

    def __init__(self, read: DataFrame, kind: str | Column) -> None:
        """Describe what is told of records that have the kind of their topic; nothing is read yet."""
        self._told = records.internal(read, kind)
        told, self._has_faults = noting(self._told, "fault")
        self.records = told.where(F.col("fault").isNull())
        """Those that can be used."""

    def faulty(self) -> DataFrame | None:
        """Return the others, None where there are none; call it after the records have been used."""
        return decoding.faulty(self._told) if self._has_faults() else None


def noting(frame: DataFrame, column: str) -> tuple[DataFrame, Callable[[], bool]]:
    """Return a frame, and what tells whether any row of it had a value in a column.

    That is found out while the frame is used, without another reading; it can be asked only afterwards.
    """
    noted = Observation()
    there = F.count_if(F.col(column).isNotNull()).alias("there")
    return frame.observe(noted, there), lambda: bool(noted.get.get("there", 1))


def decoded_outcomes(ops: DataFrame) -> DataFrame:
    """Return the outcomes among op records decoded.

    One whose value tells of another id, or of no outcome, has an `error` like one that could not be decoded.
    """
    outcomes = records.outcomes(ops).select(
        F.col("id").alias("key"), F.col("at").alias("written_at"), "value", *decoding.PLACE
    )
    decoded = decoding.decode(outcomes, "op", decoding.OP)
    final = F.lower("kind").isin(*records.FINAL)
    error = (
        F.when(F.col("error").isNotNull(), F.col("error"))
        .when(F.col("id") != F.col("key"), F.lit("the value tells of another id than the key"))
        .when(~final, F.concat(F.lit("the header tells of an outcome, the value says "), "kind"))
    )
    return decoded.withColumn("error", error)


def decoded_parked(parked: DataFrame) -> DataFrame:
    """Return the records of parked with `prepared_at` and `reason`, tombstones too; damaged ones have an `error`.

    They are kept, like the groups: there are few, and they are used more than once.
    """
    told = parked.select("id", "at", "group", "alive", "value", *decoding.PLACE)
    named = told.where("alive").select(
        *(F.col(name).alias(f"_{name}") if name in ("id", "group") else name for name in told.columns)
    )
    alive = decoding.decode(named.drop("alive"), "parked", decoding.PARKED).select(
        F.col("_id").alias("id"),
        "at",
        F.col("_group").alias("group"),
        F.lit(True).alias("alive"),
        *decoding.PLACE,
        F.col("half.prepared_at").alias("prepared_at"),
        "reason",
        "error",
    )
    gone = told.where(~F.col("alive")).select(
        "id",
        "at",
        "group",
        "alive",
        *decoding.PLACE,
        F.lit(None).cast("bigint").alias("prepared_at"),
        F.lit(None).cast("string").alias("reason"),
        F.lit(None).cast("string").alias("error"),
    )
    return alive.unionAll(gone).persist()


def groups(source: Source) -> DataFrame:
    """Return the registered groups with their topics and policy, damaged ones with an `error`; there are few."""
    topic = source.prefix + "groups"
    told = source.committed([topic]).select(F.col("key").cast("string").alias("key"), "value", *decoding.PLACE)
    last = told.groupBy("key").agg(F.max_by(F.struct("value", *decoding.PLACE), "offset").alias("last"))
    present = last.select("last.*").where(F.col("value").isNotNull()).coalesce(1)
    return decoding.decode(present, "group", decoding.GROUP).persist()


def real_topics(outcomes: DataFrame, registered: DataFrame, prefix: str, given: Sequence[str]) -> list[str]:
    """Return the real topics that outcomes or groups name, and those given."""
    of_ops = outcomes.select(F.explode("messages.topic").alias("topic"))
    of_groups = registered.select(F.explode("topics").alias("topic"))
    named = {row["topic"] for row in of_ops.unionAll(of_groups).distinct().collect()}
    return sorted(name for name in named | set(given) if not name.startswith(prefix))


def all_of(frames: Sequence[DataFrame | None]) -> DataFrame | None:
    """Return the union of those that there are."""
    present = [frame for frame in frames if frame is not None]
    return reduce(DataFrame.unionAll, present) if present else None
