"""The job `sweep`: counts pending and due transactions without decoding payloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Observation
from pyspark.sql import functions as F

from halfway.pipeline.access import LONGEST_S
from halfway.pipeline.engines import decoding
from halfway.pipeline.engines.engine import SparkEngine, union
from halfway.pipeline.jobs import reading
from halfway.pipeline.sources import headers
from halfway.pipeline.transforms import sweep as transform

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from halfway.pipeline.sources.pinned import Source
    from halfway.pipeline.tables.folders import Folder

UNRESOLVED: Final = "unresolved"
SWEEP: Final = "sweep"
QUARANTINE: Final = "sweep_quarantine"


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The options of the command line; times in ms.

    `due_after_ms` and `max_age_ms` are for groups without a first check or an age of their own.
    """

    due_after_ms: int = 6_000
    max_age_ms: int = 43_200_000
    horizon_ms: int = 900_000


def run(spark: SparkSession, source: Source, output: Folder, options: SweepOptions) -> list[dict[str, Any]]:
    """Write each unresolved transaction and the counts by group and age; return the counts, oldest first."""
    topics = [source.prefix + kind for kind in ("op", "half", "groups")]
    for topic in topics:
        source.pin([topic])
    reading.require(source, ["op", "half"])
    engine = SparkEngine(spark)
    # Spark counts the faults while it reads for the rest. Only if there are any, it reads again.
    noted, faults = (Observation(), Observation()), F.count_if(F.col("fault").isNotNull()).alias("faults")
    read = [
        source.committed([source.prefix + kind], headers.internal(engine.dialect, f"'{kind}'"))
        for kind in ("op", "half")
    ]
    op, half = (frame.observe(of, faults).where("fault is null") for frame, of in zip(read, noted, strict=True))
    registered = engine.keep(reading.groups(engine, source))
    open_still = transform.unresolved(engine, half, headers.outcomes(engine, op), horizon_ms=options.horizon_ms)
    open_still.write.mode("overwrite").parquet(output.path(UNRESOLVED))

    # The topic can hold any number. An impossible time leaves the default.
    due_after_ms, max_age_ms = (
        f"cast(case when policy.{name} between 0 and {LONGEST_S} then policy.{name} end * 1000 as bigint)"
        for name in ("first_check_after_s", "max_age_s")
    )
    policies = engine.query(
        f"""select name as "group", {due_after_ms} as due_after_ms, {max_age_ms} as max_age_ms
        from $registered where error is null""",  # noqa: S608
        registered=registered,
    )
    counts = transform.sweep(
        engine,
        spark.read.parquet(output.path(UNRESOLVED)),
        policies,
        now_ms=source.pins.at,
        default_due_after_ms=options.due_after_ms,
        default_max_age_ms=options.max_age_ms,
        slack_ms=options.horizon_ms,
    )
    counts.coalesce(1).write.mode("overwrite").parquet(output.path(SWEEP))
    faulty = [
        frame.where("fault is not null").selectExpr(*decoding.PLACE, "fault as error")
        for frame, of in zip(read, noted, strict=True)
        if of.get.get("faults", 1)
    ]
    wrong = union(engine, [decoding.quarantined(registered), *faulty])
    wrong.write.mode("overwrite").parquet(output.path(QUARANTINE))
    engine.close()
    written = spark.read.parquet(output.path(SWEEP)).orderBy(F.desc("rank"), "group")
    return [row.asDict() for row in written.collect()]
