"""The job `audit --cross-check`: a whole audit of what the runs of `--continue` have read. Both must agree."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from halfway.pipeline.errors import SourceError
from halfway.pipeline.jobs import audit
from halfway.pipeline.jobs.incremental import State
from halfway.pipeline.jobs.runs import ANOMALIES, DIFFERENCES, VERDICTS, Tables
from halfway.pipeline.sources import headers
from halfway.pipeline.transforms import verdict
from halfway.pipeline.transforms.verdict import NOT_JUDGED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from halfway.pipeline.engines.engine import Engine, Frame
    from halfway.pipeline.sources.pinned import Source
    from halfway.pipeline.sources.pins import Pins
    from halfway.pipeline.tables.folders import Files

_STALE_MS: Final = 3_600_000
"""The greatest age of the last run: Kafka compacts further, and the whole audit must see what the runs saw."""
_NEVER: Final = 1 << 62
_SHOWN: Final = 20


def run(engine: Engine, source: Source, output: Files, against: Files, options: audit.AuditOptions) -> audit.Summary:
    """Judge everything that the runs into a folder have read, and write the `differences` from their verdicts.

    Raises:
        SourceError: the folder has no run, or no recent one, or one with other options, or is that of the output.

    """
    folder = against.path()
    if folder == output.path():
        raise SourceError(f"--cross-check {folder!r} is the folder of --output: give another one")
    runs = Tables(engine, against)
    state = State.of(runs, folder)
    if state is None:
        raise SourceError(f"--cross-check {folder!r} has no run of --continue: let one run into it first")
    if source.pins.at - state.pins.at > _STALE_MS:
        raise SourceError(
            f"--cross-check {folder!r}: the last run of --continue was more than {_STALE_MS // 60_000} minutes ago: "
            "let one run first"
        )
    for name, value in state.rules.items():
        if options.rules.get(name) != value:
            raise SourceError(f"--cross-check {folder!r}: the last run had {name} {value / 1000:g}: give the same")
    source.cover(state.pins)
    # A topic that a run has read is read, even if nothing names it any more.
    topics = [*options.topics, *(name for name in state.provable_since if name in source.pins.topics)]
    options = replace(options, topics=topics)
    tables, ends, summary = audit.judge(engine, source, output, options)
    found = tables.write(DIFFERENCES, _differences(engine, source, tables, runs, state, options, summary))
    differences = audit.rows_in(engine, found)
    first = engine.query(f"select * from $found order by id, life limit {_SHOWN}", found=found)  # noqa: S608
    summary = replace(summary, differences=differences, differing=engine.rows(first))
    content = {audit.ENDS: ends}
    audit.finish(tables, source, output, summary, options, content, cross_check=folder, differences=differences)
    return summary


def _differences(
    engine: Engine,
    source: Source,
    tables: Tables,
    runs: Tables,
    state: State,
    options: audit.AuditOptions,
    summary: audit.Summary,
) -> Frame:
    """Return the transactions whose verdicts differ, except those that records which Kafka has removed explain.

    Uses of an id are compared if both audits count the same number of them, because compaction can remove a use. A
    transaction that is `expired_unknown`, `unproved` or `not_judged` in either audit is left out. A removal creates no
    anomaly, but it can change the kind of one (when a copy or an outcome is removed), or hide it. So all other pairs
    count as different only if nothing can have been removed. Halfway's own topics are compacted one by one: a half that
    has gone can have been resumed since, and the earlier outcome of an id that was used again can be missing.
    """
    d = engine.dialect
    since = 0 if state.kept[0].number == 0 else state.kept[0].at
    kept = f"run >= {state.kept[0].number}"
    verdicts, reported = (
        engine.query(f"select * from $whole where {kept}", whole=runs.read(name))  # noqa: S608
        for name in (VERDICTS, ANOMALIES)
    )
    provable_since = summary.provable_since
    left_out = f"('expired_unknown', 'unproved', '{NOT_JUDGED}')"
    now = source.reopened()
    now.pin(list(provable_since))
    removed = d.any("topics", _removed(provable_since, now.pins, options.skew_ms))
    # A copy can be older than the prepare, if somebody forged it before.
    trimmed = d.any("topics", " or ".join(f"one = '{name}'" for name, at in provable_since.items() if at) or "false")
    sql = f"""
    select id, life, "group", whole, continued from (
        select mine.id as id, mine.life as life, mine."group" as "group", mine.verdict as whole,
            other.verdict as continued, mine.expected + mine.found as messages,
            mine.uses as uses, used.uses as other_uses, known.id is not null as reported,
            other.topics as topics, coalesce({d.millis("mine.prepared_at")}, 0) as prepared_at
        from (select *, count(*) over (partition by id) as uses from $whole) mine
        left join (select id, count(*) as uses from $other group by id) used on used.id = mine.id
        left join $other other on other.id = mine.id and other.life = mine.life
        left join (select distinct id, life, verdict from $reported) known
            on known.id = mine.id and known.life = mine.life and known.verdict = mine.verdict
    ) pairs
    where case
        when whole in {left_out} or continued in {left_out} then false
        when other_uses is null then prepared_at >= {since}
        when uses <> other_uses or continued is null then false
        when whole in ('pending', 'parked') and continued in ('pending', 'parked') then false
        when (whole = 'lost' and messages = 0 or whole = 'leaked' and "group" is null)
            and continued in ('pending', 'parked') then false
        when whole in ('pending', 'parked') and continued in ('committed_ok', 'rolled_back_ok')
            and not {headers.server_made(d)} then false
        when whole = continued then whole in {verdict.ANOMALIES} and not reported and prepared_at >= {since}
        when whole in {verdict.ANOMALIES} and continued not in {verdict.ANOMALIES} then true
        when continued = 'contradicted' then false
        when continued = 'doubled' then not {trimmed}
        else not {removed} end
    union all
    select id, life, "group", cast(null as string), verdict from $reported known where exists (
        select 1 from $other judged where judged.run = known.run and judged.id = known.id
            and judged.life = known.life and judged.verdict <> known.verdict
    )
    """  # noqa: S608
    return engine.query(sql, whole=tables.read(VERDICTS), other=verdicts, reported=reported)


def _removed(provable_since: Mapping[str, int], now: Pins, slack_ms: int) -> str:
    """Return SQL for whether Kafka can have removed a message of a transaction from the topic `one`."""
    since = {
        name: _NEVER if pin is None or pin.compacted else at + slack_ms
        for name, at in provable_since.items()
        for pin in [now.topics.get(name)]
    }
    bounds = [f"(one = '{name}' and prepared_at < {at})" for name, at in since.items() if at > slack_ms]
    return " or ".join(bounds) or "false"
