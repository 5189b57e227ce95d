"""The job `sweep`: what is pending and due, without decoding payloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F

from halfway.pipeline import decoding, records
from halfway.pipeline.jobs import reading
from halfway.pipeline.transforms import sweep as transform

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from halfway.pipeline.folders import Folder
    from halfway.pipeline.sources import Source

UNRESOLVED: Final = "unresolved"
SWEEP: Final = "sweep"
QUARANTINE: Final = "sweep_quarantine"


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """What the command line says; times in ms. `due_after_ms` is for groups that chose no first check of their own."""

    due_after_ms: int = 6_000
    horizon_ms: int = 900_000


def run(spark: SparkSession, source: Source, output: Folder, options: SweepOptions) -> list[dict[str, Any]]:
    """Write each unresolved transaction and the counts by group and age; return the counts, oldest first."""
    topics = [source.prefix + kind for kind in ("op", "half", "groups")]
    for topic in topics:
        source.pin([topic])
    reading.demand(source, ["op", "half"])
    op, half = (reading.InternalRecords(source.committed([source.prefix + kind]), kind) for kind in ("op", "half"))
    registered = reading.groups(source)
    open_still = transform.unresolved(half.records, records.outcomes(op.records), horizon_ms=options.horizon_ms)
    open_still.write.mode("overwrite").parquet(output.path(UNRESOLVED))
    due_after = registered.where(F.col("error").isNull()).select(
        F.col("name").alias("group"),
        (F.col("policy.first_check_after_s") * 1000).cast("bigint").alias("due_after_ms"),
    )
    counts = transform.sweep(
        spark.read.parquet(output.path(UNRESOLVED)),
        due_after,
        now_ms=source.pins.at,
        default_due_after_ms=options.due_after_ms,
    )
    counts.coalesce(1).write.mode("overwrite").parquet(output.path(SWEEP))
    unreadable = decoding.quarantined(registered)
    wrong = reading.all_of([op.faulty(), half.faulty(), None if unreadable.isEmpty() else unreadable])
    if wrong is None:
        output.delete(QUARANTINE)
    else:
        wrong.write.mode("overwrite").parquet(output.path(QUARANTINE))
    registered.unpersist()
    written = spark.read.parquet(output.path(SWEEP)).orderBy(F.desc("rank"), "group")
    return [row.asDict() for row in written.collect()]
