"""The job `sweep`: counts pending and due transactions by keys, headers and timestamps, without decoding payloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import Observation, SparkSession
from pyspark.sql import functions as F

from halfway.pipeline.access import LONGEST_S
from halfway.pipeline.engines.dialect import Frame
from halfway.pipeline.engines.engine import Engine, SparkEngine
from halfway.pipeline.jobs import reading
from halfway.pipeline.sources import headers
from halfway.pipeline.sources.pinned import Source
from halfway.pipeline.tables import Files

AGES: Final = (("under 1 min", 60), ("1 to 10 min", 600), ("10 min to 1 h", 3_600), ("1 to 12 h", 43_200))
"""Age classes with their upper bounds in seconds. Older transactions are OLDEST."""
OLDEST: Final = "over 12 h"


def unresolved(engine: Engine, halves: Frame, outcomes: Frame, *, horizon_ms: int) -> Frame:
    """Return half minus op: id, group, shard and `since` (ms, the prepare) of transactions without an outcome.

    `written_at` (ms) is the last time at which the half was written: by the prepare, a resume or a re-anchor.
    The last half record of an id is not a tombstone, and op has no outcome of it, except one that is a horizon older
    than the half: then a client has used the id again. An id has one group as long as halfway keeps any record of it.
    """
    # With two records for each id an aggregation before the shuffle saves little.
    return engine.query(
        f"""select id, "group", shard, since, written_at from (
            select id, "group", max_by(alive, "offset") as alive, max_by(since, "offset") as since,
                max_by(written_at, "offset") as written_at, max_by(shard, "offset") as shard, max(ended) as ended
            from (select /*+ repartition(id) */ * from (
                select id, "group", "offset", alive, coalesce(prepared_at, "at") as since, "at" as written_at,
                    "partition" as shard, cast(null as bigint) as ended from $halves
                union all
                select id, "group", null, null, null, null, null, "at" from $outcomes
            ) records) together group by id, "group"
        ) newest where alive and (ended is null or since >= ended + {horizon_ms})""",  # noqa: S608
        halves=halves,
        outcomes=outcomes,
    )


def sweep(engine: Engine, unresolved: Frame, policies: Frame, now_ms: int, options: SweepOptions) -> Frame:
    """Return by group and age how many transactions are pending, due for a check, and overdue.

    `policies` has `group`, `due_after_ms`, the age at which the group's transactions are first checked, and
    `max_age_ms`, the age at which halfway gives up. For other groups, and for null, the options count. A transaction
    is overdue if its half was last written longer ago than that and a horizon together: no coordinator ends it or
    gives it up. `oldest_ms` is the age of the oldest.
    """
    rank = " ".join(f"when age_ms < {bound * 1000} then {number}" for number, (_, bound) in enumerate(AGES))
    label = " ".join(f"when {number} then '{name}'" for number, (name, _) in enumerate(AGES))
    return engine.query(
        f"""select "group", rank, case rank {label} else '{OLDEST}' end as age, count(*) as pending,
            count_if(age_ms >= due_after_ms) as due,
            count_if(unwritten_ms > max_age_ms + {options.horizon_ms}) as overdue, max(age_ms) as oldest_ms
        from (select *, case {rank} else {len(AGES)} end as rank from (
            select pending."group" as "group", greatest({now_ms} - since, 0) as age_ms,
                {now_ms} - written_at as unwritten_ms,
                coalesce(due_after_ms, {options.due_after_ms}) as due_after_ms,
                coalesce(max_age_ms, {options.max_age_ms}) as max_age_ms
            from $unresolved pending left join $policies policies on policies."group" = pending."group"
        ) aged) ranked group by 1, 2""",  # noqa: S608
        unresolved=unresolved,
        policies=policies,
    )


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


def run(spark: SparkSession, source: Source, output: Files, options: SweepOptions) -> list[dict[str, Any]]:
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
    open_still = unresolved(engine, half, headers.outcomes(engine, op), horizon_ms=options.horizon_ms)
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
    counts = sweep(engine, spark.read.parquet(output.path(UNRESOLVED)), policies, source.pins.at, options)
    counts.coalesce(1).write.mode("overwrite").parquet(output.path(SWEEP))
    faulty = [frame for frame, of in zip(read, noted, strict=True) if of.get.get("faults", 1)]
    reading.unusable(engine, faulty, [registered]).write.mode("overwrite").parquet(output.path(QUARANTINE))
    engine.close()
    written = spark.read.parquet(output.path(SWEEP)).orderBy(F.desc("rank"), "group")
    return [row.asDict() for row in written.collect()]
