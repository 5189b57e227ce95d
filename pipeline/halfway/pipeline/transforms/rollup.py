"""*rollup*: the ledger by group and minute, hour or day."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from halfway.pipeline.engines.engine import Engine, Frame

OUTCOMES = ("committed", "rolled_back")
CAUSES = ("producer", "check", "operator", "policy")
OBJECTIVE_SHARE = 0.99
"""The share of transactions that must end within the time of an objective."""


def counted(condition: str) -> str:
    """Return the number of rows that meet a condition."""
    return f"cast(count_if({condition}) as bigint)"


OF_OUTCOMES = ", ".join(counted(f"outcome = '{name}'") + f" as {name}" for name in OUTCOMES)
STEPS = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}


def begin_of(engine: Engine, step: str) -> str:
    """Return when the step (UTC) of an outcome began, in ms."""
    at = engine.dialect.millis("ended_at")
    return f"{at} - {at} % {STEPS[step]}"


def quantiles(engine: Engine, suffix: str = "_ms") -> str:
    """Return the exact p50, p95 and p99 of the time from prepare to outcome, in ms."""
    return ", ".join(f"{engine.dialect.quantile('latency_ms', share)} as p{share * 100:g}{suffix}" for share in _SHARES)


_SHARES = (0.5, 0.95, 0.99)


def with_objectives(engine: Engine, ledger: Frame, objectives: Mapping[str | None, int]) -> Frame:
    """Return a ledger with the `objective` of each transaction's group in ms.

    `objectives` has a time in ms by group, and under None the time for all other groups. Others have null.
    """
    own = [(group, ms) for group, ms in objectives.items() if group is not None]
    return engine.query(
        f"""select ledger.*, coalesce(own_ms, cast({objectives.get(None, "null")} as bigint)) as objective
        from $ledger ledger left join $own on of_group = ledger."group\"""",  # noqa: S608 - a number
        ledger=ledger,
        own=engine.table(own, "of_group string, own_ms bigint"),
    )


WITHIN = f""", min(objective) as objective_ms,
    round({counted("latency_ms <= objective")} / nullif(count(objective), 0), 4) as share_within"""
"""Aggregates by group: its objective in ms, and the share that ended within it; of a ledger with objectives."""


def rollup(engine: Engine, ledger: Frame, step: str = "minute", within: str = "") -> Frame:
    """Return one row for each group and step (UTC, by the outcome, in ms) with an outcome. The column has its name.

    Counts by outcome and by cause; percentiles of the time from prepare to outcome; checks for each transaction; the
    share that a check-back resolved; and `within`, nothing or WITHIN.
    """
    causes = ", ".join(counted(f"cause = '{cause}'") + f" as by_{cause}" for cause in CAUSES)
    return engine.query(
        f"""select "group", {begin_of(engine, step)} as "{step}",
            count(*) as transactions, {OF_OUTCOMES}, {causes}, {quantiles(engine)}, avg(checks) as checks_each,
            {counted("cause = 'check'")} / count(*) as share_by_check{within}
        from $ledger group by 1, 2""",  # noqa: S608
        ledger=ledger,
    )
