"""*ledger*: how each transaction ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def ledger(decoded: DataFrame) -> DataFrame:
    """Return one row for each transaction that has ended, from decoded outcomes.

    `latency_ms` is the time from prepare to outcome, `size` the bytes of its messages (null where an op of a rollback
    does not tell), `checks` the checks that were sent. An outcome that was read twice gives one row.
    """
    return (
        decoded.where(F.col("error").isNull())
        .select(
            "id",
            "group",
            F.lower("kind").alias("outcome"),
            "cause",
            F.timestamp_millis("prepared_at").alias("prepared_at"),
            F.timestamp_millis("at").alias("ended_at"),
            F.greatest(F.col("at") - F.col("prepared_at"), F.lit(0)).alias("latency_ms"),
            "checks",
            F.sort_array(F.array_distinct("messages.topic")).alias("topics"),
            F.size("messages").alias("messages"),
            F.when(
                F.size("messages") > 0,
                F.aggregate("messages", F.lit(0).cast("bigint"), lambda total, each: total + each["size"]),
            ).alias("size"),
            F.col("partition").alias("shard"),
            F.col("offset").alias("op_offset"),
        )
        .dropDuplicates(["shard", "op_offset"])
    )


def pending(before: DataFrame, halves: DataFrame, parked: DataFrame) -> DataFrame:
    """Return what has not ended: what had not before, with new records of half and parked applied to it.

    In each topic the last record of an id wins, and a tombstone removes it. `before` has the columns of the result:
    id, group, state (`prepared` or `parked`), since (ms), shard, offset.
    """
    columns = ("id", "group", "state", F.col("since").alias("at"), "shard", "offset", F.lit(True).alias("alive"))
    known = before.select(*columns)
    fresh = [
        records.where(F.col("fault").isNull()).select(
            "id", "group", F.lit(state).alias("state"), "at", F.col("partition").alias("shard"), "offset", "alive"
        )
        for records, state in ((halves, "prepared"), (parked, "parked"))
    ]
    last = F.max_by(F.struct("alive", "group", "at", "shard", "offset"), "offset").alias("last")
    return (
        known.unionAll(fresh[0])
        .unionAll(fresh[1])
        .groupBy("id", "state")
        .agg(last)
        .where("last.alive")
        .select("id", "last.group", "state", F.col("last.at").alias("since"), "last.shard", "last.offset")
    )
