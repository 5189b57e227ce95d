"""*ledger*: how each transaction ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F

from halfway.pipeline.engines.engine import Merge

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_IS_LATER: Final = 'new."offset" >= old."offset"'
MERGE: Final = Merge(
    same="old.id = new.id and old.state = new.state",
    deletes=f"(coalesce({_IS_LATER}, false) and not new.open) "
    f"or (not coalesce({_IS_LATER}, false) and old.since < new.horizon)",
    replaces=f"{_IS_LATER} and new.open",
    begins="new.open",
    deciding=("open", "horizon"),
)
"""How `changes` change the table of pending transactions."""
SETTINGS: Final = {
    # Each batch replaces files: those of a week would be many times the size of the table.
    "delta.deletedFileRetentionDuration": "interval 1 hours",
    "delta.logRetentionDuration": "interval 1 days",
}
"""The settings of that table."""


def ledger(decoded: DataFrame) -> DataFrame:
    """Return one row for each transaction that has ended, from decoded outcomes.

    `latency_ms` is the time from prepare to outcome, `size` the bytes of its messages (null if the op of a rollback
    does not have it), `checks` the number of checks that were sent, `ended_date` the day (UTC) of the outcome. An
    outcome that was read twice has one row.
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


def changes(records: DataFrame, outcomes: DataFrame, *, horizon_ms: int) -> DataFrame:
    """Return how new records of half and parked, and outcomes, change the pending transactions. Apply it with `MERGE`.

    In each topic the last record of an id wins, and a tombstone removes it. An outcome (id, at) removes it too, because
    Kafka deletes tombstones after a time; but not an outcome that is a horizon older than the record: then a client has
    used the id again. The topics have no order between them.

    Returns:
        The columns of the table (state: `prepared` or `parked`; since: ms, the time of the prepare if it is known),
        null without a new record; `open`, whether there is a new record that has not ended; and `horizon`: an older
        record has ended.

    """
    record = F.struct(
        "alive", "group", F.coalesce("prepared_at", "at").alias("at"), F.col("partition").alias("shard")
    ).alias("record")
    fresh = records.where(F.col("fault").isNull()).select(
        "id",
        F.when(F.col("kind") == "parked", "parked").otherwise("prepared").alias("state"),
        "offset",
        record,
        F.lit(None).cast("bigint").alias("horizon"),
    )
    ends = outcomes.select(
        "id",
        F.explode(F.array(F.lit("prepared"), F.lit("parked"))).alias("state"),
        F.lit(None).cast("bigint").alias("offset"),
        F.lit(None).cast(fresh.schema["record"].dataType).alias("record"),
        (F.col("at") + horizon_ms).alias("horizon"),
    )
    last = (
        fresh.unionAll(ends)
        .groupBy("id", "state")
        .agg(
            F.max_by("record", "offset").alias("last"),
            F.max("offset").alias("offset"),
            F.max("horizon").alias("horizon"),
        )
    )
    is_open = F.col("last.alive") & (F.col("horizon").isNull() | (F.col("last.at") >= F.col("horizon")))
    return last.select(
        *("id", "last.group", "state", F.col("last.at").alias("since"), "last.shard", "offset"),
        F.coalesce(is_open, F.lit(False)).alias("open"),
        "horizon",
    )
