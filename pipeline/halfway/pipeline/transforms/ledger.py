"""*ledger*: how each transaction ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def ledger(decoded: DataFrame) -> DataFrame:
    """Return one row for each transaction that has ended, from decoded outcomes.

    `latency_ms` is the time from prepare to outcome, `size` the bytes of its messages (null where an op of a rollback
    does not tell), `checks` the checks that were sent, `ended_date` the day (UTC) of the outcome. An outcome that was
    read twice gives one row.
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
            F.to_date(F.timestamp_millis("at")).alias("ended_date"),
        )
        .dropDuplicates(["shard", "op_offset"])
    )


def pending(
    before: DataFrame, records: DataFrame, outcomes: DataFrame, *, horizon_ms: int, few: bool = True
) -> DataFrame:
    """Return what has not ended: what had not before, with new records of half and parked, and outcomes, applied to it.

    In each topic the last record of an id wins, and a tombstone removes it. An outcome (id, at) removes it too, since
    Kafka does not keep tombstones for ever; except one that is a horizon older than the record: then a client has used
    its id again. Between the topics there is no order. `before` has the columns of the result: id, group, state
    (`prepared` or `parked`), since (ms, when it was prepared where that is known), shard, offset. `few`: the ids that
    something new is told of fit into memory.
    """
    no_end = F.lit(None).cast("bigint").alias("ended")
    record = F.struct(F.lit(True).alias("alive"), "group", F.col("since").alias("at"), "shard").alias("record")
    # What nothing new is told of stays as it is, and need not be brought together.
    touched = records.select("id").unionAll(outcomes.select("id"))
    touched = F.broadcast(touched) if few else touched
    untouched = before.join(touched, "id", "left_anti")
    known = before.join(touched, "id", "left_semi").select("id", "state", "offset", record, no_end)
    fresh = records.where(F.col("fault").isNull()).select(
        "id",
        F.when(F.col("kind") == "parked", "parked").otherwise("prepared").alias("state"),
        "offset",
        F.struct(
            "alive", "group", F.coalesce("prepared_at", "at").alias("at"), F.col("partition").alias("shard")
        ).alias("record"),
        no_end,
    )
    ends = outcomes.select(
        "id",
        F.explode(F.array(F.lit("prepared"), F.lit("parked"))).alias("state"),
        F.lit(None).cast("bigint").alias("offset"),
        F.lit(None).cast(known.schema["record"].dataType).alias("record"),
        F.col("at").alias("ended"),
    )
    last = (
        known.unionAll(fresh)
        .unionAll(ends)
        .groupBy("id", "state")
        .agg(F.max_by("record", "offset").alias("last"), F.max("offset").alias("offset"), F.max("ended").alias("ended"))
    )
    used_again = F.col("last.at") >= F.col("ended") + horizon_ms
    changed = last.where(F.col("last.alive") & (F.col("ended").isNull() | used_again)).select(
        "id", "last.group", "state", F.col("last.at").alias("since"), "last.shard", "offset"
    )
    return untouched.select(*changed.columns).unionAll(changed)
