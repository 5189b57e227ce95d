"""How uses of an id keep their numbers and verdicts after their events were dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from halfway.pipeline.sources import headers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from halfway.pipeline.engines.engine import Engine, Frame

_PREPARED_AT: Final = {
    **dict.fromkeys(("ops", "messages"), "prepared_at"),
    **dict.fromkeys(("halves", "parked"), 'coalesce(prepared_at, "at")'),
}
"""By table of events, the time of the prepare."""


def forgotten(engine: Engine, verdicts: Frame, events: Mapping[str, Frame], *, before: int) -> Frame:
    """Return the last verdicts of uses without an event that is kept.

    They were prepared before every event of their id that is kept, and before the first run whose events are kept
    (`before`, in ms).
    """
    times = " union all ".join(
        f"select id, {time} as prepared_at from ${name}"  # noqa: S608
        for name, time in _PREPARED_AT.items()
    )
    sql = f"""
    select earlier.* from $verdicts earlier join (
        select id, min(prepared_at) as first_at from ({times}) times
        where not {headers.server_made(engine.dialect)} group by id
    ) known on known.id = earlier.id
    where earlier.prepared_at < least(known.first_at, {before})
    """  # noqa: S608
    return engine.query(sql, verdicts=verdicts, **{name: events[name] for name in _PREPARED_AT})


def settled(engine: Engine, judged: Frame, verdicts: Frame, *, before: int) -> Frame:
    """Return the last verdicts that new ones do not replace, because the events behind them are gone.

    Some events of a use that was prepared before the first kept run (`before`, in ms) can be missing. And a verdict
    that can no longer be proved does not replace one that was proved.
    """
    unknown = "('expired_unknown', 'unproved')"
    return engine.query(
        f"""select earlier.* from $verdicts earlier join (
            select id as now_id, life as now_life, verdict as now_verdict from $judged
        ) now on now_id = id and now_life = life
        where verdict not in ('pending', 'parked') and verdict not in {unknown}
            and (prepared_at < {before} or now_verdict in {unknown})""",  # noqa: S608
        verdicts=verdicts,
        judged=judged,
    )


def without(engine: Engine, verdicts: Frame, others: Frame) -> Frame:
    """Return verdicts without those of the uses in another frame."""
    return engine.query(
        """select * from $verdicts known where not exists (
            select 1 from $others other where other.id = known.id and other.life = known.life
        )""",
        verdicts=verdicts,
        others=others,
    )


def renumbered(engine: Engine, judged: Frame, forgotten: Frame) -> Frame:
    """Return verdicts with the uses of an id numbered from the last forgotten one on."""
    columns = 'verdict, anomalies, "group", cause, topics, expected, found, prepared_at, ended_at, evidence'
    return engine.query(
        f"""select id, cast(life + coalesce(uses, 0) as int) as life, {columns}
        from $judged judged left join (
            select id as gone_id, max(life) + 1 as uses from $forgotten group by id
        ) gone on gone_id = id""",  # noqa: S608
        judged=judged,
        forgotten=forgotten,
    )
