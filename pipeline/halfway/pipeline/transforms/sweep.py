"""*sweep*: pending and due transactions, from keys, headers and timestamps alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

AGES: Final = (("under 1 min", 60), ("1 to 10 min", 600), ("10 min to 1 h", 3_600), ("1 to 12 h", 43_200))
"""Age classes with their upper bounds in seconds. Older transactions are OLDEST."""
OLDEST: Final = "over 12 h"


def unresolved(halves: DataFrame, outcomes: DataFrame, *, horizon_ms: int) -> DataFrame:
    """Return half minus op: id, group, shard and `since` (ms, the prepare) of transactions without an outcome.

    `written_at` (ms) is the last time at which the half was written: by the prepare, a resume or a re-anchor.
    The last half record of an id is not a tombstone, and op has no outcome of it, except one that is a horizon older
    than the half: then a client has used the id again.
    """
    nothing = F.lit(None)
    of_half = halves.select(
        "id",
        "group",
        "offset",
        "alive",
        # The timestamp of a half that was re-anchored is later than the prepare.
        F.coalesce("prepared_at", "at").alias("at"),
        F.col("at").alias("written_at"),
        "partition",
        nothing.cast("bigint").alias("ended"),
    )
    of_op = outcomes.select(
        "id",
        "group",
        *(
            nothing.cast(of_half.schema[name].dataType).alias(name)
            for name in ("offset", "alive", "at", "written_at", "partition")
        ),
        F.col("at").alias("ended"),
    )
    # An id has one group as long as halfway keeps any record of it. Aggregates of numbers need no sorting, and with two
    # records for each id an aggregation before the shuffle saves little.
    together = of_half.unionAll(of_op).repartition("id", "group").groupBy("id", "group")
    last = together.agg(
        *(F.max_by(name, "offset").alias(name) for name in ("alive", "at", "written_at", "partition")),
        F.max("ended").alias("ended"),
    )
    open_still = F.col("ended").isNull() | (F.col("at") >= F.col("ended") + horizon_ms)
    return last.where(F.col("alive") & open_still).select(
        "id", "group", F.col("partition").alias("shard"), F.col("at").alias("since"), "written_at"
    )


def sweep(
    unresolved: DataFrame,
    policies: DataFrame,
    *,
    now_ms: int,
    default_due_after_ms: int,
    default_max_age_ms: int,
    slack_ms: int,
) -> DataFrame:
    """Return by group and age how many transactions are pending, due for a check, and overdue.

    `policies` has `group`, `due_after_ms`, the age at which the group's transactions are first checked, and
    `max_age_ms`, the age at which halfway gives up. For other groups, and for null, the defaults count. A transaction
    is overdue if its half was last written longer ago than that and `slack_ms` together: no coordinator ends it or
    gives it up. `oldest_ms` is the age of the oldest.
    """
    age = F.greatest(F.lit(now_ms) - F.col("since"), F.lit(0))
    label = F.when(age < AGES[0][1] * 1000, AGES[0][0])
    rank = F.when(age < AGES[0][1] * 1000, 0)
    for number, (name, bound) in enumerate(AGES[1:], 1):
        label, rank = label.when(age < bound * 1000, name), rank.when(age < bound * 1000, number)
    due = age >= F.coalesce("due_after_ms", F.lit(default_due_after_ms))
    overdue = F.lit(now_ms) - F.col("written_at") > F.coalesce("max_age_ms", F.lit(default_max_age_ms)) + slack_ms
    return (
        unresolved.join(F.broadcast(policies), "group", "left")
        .groupBy("group", rank.otherwise(len(AGES)).alias("rank"), label.otherwise(OLDEST).alias("age"))
        .agg(
            F.count(F.lit(1)).alias("pending"),
            F.count_if(due).alias("due"),
            F.count_if(overdue).alias("overdue"),
            F.max(age).alias("oldest_ms"),
        )
    )
