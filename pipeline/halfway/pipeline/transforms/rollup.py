"""*rollup*: the ledger by group and minute, hour or day."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import Column, DataFrame

OUTCOMES = ("committed", "rolled_back")
CAUSES = ("producer", "check", "operator", "policy")


OBJECTIVE_SHARE = 0.99
"""The share of transactions that must end within the time of an objective."""


def within(objectives: Mapping[str | None, int]) -> list[Column]:
    """Return aggregates by group: its objective in ms, and the share that ended within it. None without objectives.

    `objectives` has a time in ms by group, and under None the time for all other groups. A group without one has nulls.
    """
    if not objectives:
        return []
    own = [F.when(F.col("group") == group, F.lit(ms)) for group, ms in objectives.items() if group is not None]
    limit = F.coalesce(*own, F.lit(objectives.get(None)).cast("bigint"))
    share = F.try_divide(F.count_if(F.col("latency_ms") <= limit), F.count(limit))
    return [F.first(limit).alias("objective_ms"), F.round(share, 4).alias("share_within")]


def rollup(ledger: DataFrame, step: str = "minute", objectives: Mapping[str | None, int] | None = None) -> DataFrame:
    """Return one row for each group and step (UTC, by the outcome) with an outcome. The column is named like the step.

    Counts by outcome and by cause; exact p50, p95 and p99 of the time from prepare to outcome, in ms; checks for each
    transaction; the share that a check-back resolved; and with objectives the columns of `within`.
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
        *within(objectives or {}),
    )
