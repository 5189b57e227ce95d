"""*rollup*: the ledger by group and minute, hour or day."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

OUTCOMES = ("committed", "rolled_back")
CAUSES = ("producer", "check", "operator", "policy")


def rollup(ledger: DataFrame, step: str = "minute") -> DataFrame:
    """Return one row for each group and step (UTC, of the outcome) in which something ended; its column has its name.

    Counts by outcome and by cause; exact p50, p95 and p99 of the time from prepare to outcome, in ms; checks for each
    transaction; and the share that a check-back resolved.
    """
    p50, p95, p99 = (F.percentile("latency_ms", F.lit(share)) for share in (0.5, 0.95, 0.99))
    return ledger.groupBy("group", F.date_trunc(step, "ended_at").alias(step)).agg(
        F.count(F.lit(1)).alias("transactions"),
        *(F.count_if(F.col("outcome") == outcome).alias(outcome) for outcome in OUTCOMES),
        *(F.count_if(F.col("cause") == cause).alias(f"by_{cause}") for cause in CAUSES),
        p50.alias("p50_ms"),
        p95.alias("p95_ms"),
        p99.alias("p99_ms"),
        F.avg("checks").alias("checks_each"),
        (F.count_if(F.col("cause") == "check") / F.count(F.lit(1))).alias("share_by_check"),
    )
