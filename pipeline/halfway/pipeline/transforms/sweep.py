"""*sweep*: pending and due transactions, from keys, headers and timestamps alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from halfway.pipeline.engines.engine import Engine, Frame

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


def sweep(
    engine: Engine,
    unresolved: Frame,
    policies: Frame,
    *,
    now_ms: int,
    default_due_after_ms: int,
    default_max_age_ms: int,
    slack_ms: int,
) -> Frame:
    """Return by group and age how many transactions are pending, due for a check, and overdue.

    `policies` has `group`, `due_after_ms`, the age at which the group's transactions are first checked, and
    `max_age_ms`, the age at which halfway gives up. For other groups, and for null, the defaults count. A transaction
    is overdue if its half was last written longer ago than that and `slack_ms` together: no coordinator ends it or
    gives it up. `oldest_ms` is the age of the oldest.
    """
    rank = " ".join(f"when age_ms < {bound * 1000} then {number}" for number, (_, bound) in enumerate(AGES))
    label = " ".join(f"when {number} then '{name}'" for number, (name, _) in enumerate(AGES))
    return engine.query(
        f"""select "group", rank, case rank {label} else '{OLDEST}' end as age, count(*) as pending,
            count_if(age_ms >= due_after_ms) as due, count_if(unwritten_ms > max_age_ms + {slack_ms}) as overdue,
            max(age_ms) as oldest_ms
        from (select *, case {rank} else {len(AGES)} end as rank from (
            select pending."group" as "group", greatest({now_ms} - since, 0) as age_ms,
                {now_ms} - written_at as unwritten_ms,
                coalesce(due_after_ms, {default_due_after_ms}) as due_after_ms,
                coalesce(max_age_ms, {default_max_age_ms}) as max_age_ms
            from $unresolved pending left join $policies policies on policies."group" = pending."group"
        ) aged) ranked group by 1, 2""",  # noqa: S608
        unresolved=unresolved,
        policies=policies,
    )
