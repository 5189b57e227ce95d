"""The job `audit --continue`: judges new records and open transactions together, at the cost of what is new.

A run reads each topic from the end of the previous run, and appends what it reads to the table `events`. It judges the
ids of new records and those without a final verdict, with everything that was ever read about them. From the previous
run it reads what that carried over (`carried`: everything about the ids without a final verdict). For other ids it
reads the runs that can know something about them; a UUIDv7 shows which ones.

Each step reads tables or kept frames of the step before it, so that Spark plans every step by itself. `audit
--cross-check` (`compare`) is a whole audit of what the runs have read. Both must agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from halfway.pipeline.engines.dialect import Frame, Merge
from halfway.pipeline.engines.engine import Engine, union, where
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.jobs import audit
from halfway.pipeline.sources import headers
from halfway.pipeline.sources.pinned import Source
from halfway.pipeline.sources.pins import Ends, Pins
from halfway.pipeline.tables import ANOMALIES, CARRIED, DIFFERENCES, EVENTS, QUARANTINE, VERDICTS, Files, Tables
from halfway.pipeline.transforms import verdict
from halfway.pipeline.transforms.evidence import KINDS, of_kinds, rows_of
from halfway.pipeline.transforms.verdict import NOT_JUDGED

_FORMAT: Final = 4
"""The format of what a run leaves for the next one."""
KEPT_MS: Final = 14 * 24 * 3_600_000
"""How long events are kept: twice as long as op keeps outcomes."""
_KEPT_AS_IT_IS: Final = ("by_group", "quarantined", "halves_since", "rules")
_OPEN: Final = "verdict in ('pending', 'parked')"
_UNKNOWN: Final = "('expired_unknown', 'unproved')"
_USE: Final = 'id, verdict, life, "group", prepared_at, run'
"""The columns of the last verdict of a use of an id, with the time in ms and the run that gave it."""
_WRITTEN_USE: Final = 'id, verdict, life, "group", unix_millis(prepared_at) as prepared_at, run'
"""The same from a row of the table of verdicts."""


class Run(NamedTuple):
    """A run that counts; times in ms."""

    number: int
    at: int
    """When the run began."""
    latest: int
    """The time in the youngest UUIDv7 that the run has judged or left out; -1 if there is none."""


@dataclass(frozen=True, kw_only=True)
class State(audit.Before):
    """What the earlier runs have left: the runs, offsets and counts."""

    runs: Sequence[Run] = ()
    """The runs whose events are kept."""
    by_group: Sequence[tuple[str, str, int]] = ()
    quarantined: int = 0
    rules: dict[str, int] = field(default_factory=dict)
    """The options of the last run that affect verdicts."""

    @classmethod
    def of(cls, tables: Tables, folder: str) -> State:
        """Return the state of the last run, without runs before the first one.

        PipelineError if it is of an audit without --continue, or of another release.
        """
        if tables.run < 0:
            return cls()
        content = tables.content
        if "runs" not in content:
            raise PipelineError(f"{folder} is of an audit without --continue: give another folder")
        if content["format"] != _FORMAT:
            raise PipelineError(
                f"{folder!r} was written by another release of audit --continue: begin in another folder"
            )
        since = {name: {int(number): at for number, at in times.items()} for name, times in content["since"].items()}
        return cls(
            **{name: content[name] for name in _KEPT_AS_IT_IS},
            runs=[Run(*each) for each in content["runs"]],
            pins=Pins.of(content["pins"]),
            provable_since=since,
        )

    @property
    def content(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _KEPT_AS_IT_IS},
            "format": _FORMAT,
            "runs": self.runs,
            "pins": self.pins.content,
            "since": self.provable_since,
        }

    @property
    def kept(self) -> Sequence[Run]:
        """The runs that are read further. The cost of a run does not grow with the number of all runs."""
        return [run for run in self.runs if run.at >= self.runs[-1].at - KEPT_MS]

    def kept_since(self, grace_ms: int) -> int:
        """Return the cut of the first run that is kept, in ms; 0 if no run was dropped yet."""
        first = self.kept[0]
        return first.at - grace_ms if first.number else 0


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of the ids that are judged: events, and the last verdicts and reported anomalies of their uses."""

    events: Frame
    changing: Frame
    """The verdicts of uses whose events are kept."""
    forgotten: Frame
    """The verdicts of other uses, which do not change any more."""
    reported: Frame


def run(engine: Engine, source: Source, output: Files, options: audit.AuditOptions) -> audit.Summary:
    """Judge what is new, and return the counts of all runs.

    `verdicts` has a row for each transaction, with the run that gave it. An anomaly is reported once, in `anomalies`,
    by the run that finds it first.
    """
    tables = Tables(engine, output)
    before = State.of(tables, output.path())
    number = tables.begin()
    if before.runs:
        source.continue_from(before.pins)
    read = audit.evidence(engine, source, options, before=before, ends=Ends(seen=(before.pins,)))
    of_run = f"run = {number}"
    fresh = {name: getattr(read.evidence, name) for name in KINDS}
    fresh_rows = where(engine, tables.write(EVENTS, rows_of(engine, fresh, number)), of_run)
    if not before.runs:
        none = engine.table([], "id string, verdict string, life int, `group` string, prepared_at bigint, run bigint")
        known = Known(events=fresh_rows, changing=none, forgotten=none, reported=none)
    else:
        ids = engine.query(
            "select id from $rows union select id from $unsettled", rows=fresh_rows, unsettled=read.evidence.unsettled
        )
        since = before.kept_since(options.grace_ms)
        known = _known(engine, tables, engine.keep(ids), fresh_rows, before, kept_since=since)
    judged = verdict.verdicts(engine, replace(read.evidence, **of_kinds(engine, known.events)), read.limits)
    if before.runs:
        judged, known = _with_earlier(engine, judged, known, before.kept_since(options.grace_ms))
    judged = engine.keep(_with_withdrawn(engine, judged, known.changing, number))
    _write_verdicts(engine, tables, judged, known.changing, first=not before.runs)
    # `before` is not the name of a column: Spark would look into that column.
    anomalies = engine.query(
        f"""select * from $judged now where {verdict.IS_ANOMALY} and not exists (
            select 1 from $reported before
            where before.id = now.id and before.life = now.life and before.verdict = now.verdict
        )""",  # noqa: S608
        judged=judged,
        reported=known.reported,
    )
    anomalies = where(engine, tables.write(ANOMALIES, anomalies), of_run)
    quarantined = engine.query(f"select *, cast({number} as bigint) as run from $read", read=read.quarantine)  # noqa: S608
    quarantined = where(engine, tables.write(QUARANTINE, quarantined), of_run)
    carried = _carried(engine, judged, known, anomalies)
    tables.write(CARRIED, carried, replace=True)
    # A later run may read more about these ids, although they seem to be of another deployment now.
    older = f"select id from $rows where kind = 'messages' and prepared_at < {read.limits.created_at}"  # noqa: S608
    seen = engine.query(f"select id from $judged union all {older}", judged=judged, rows=fresh_rows)  # noqa: S608
    made_at = headers.made_at(engine.dialect)
    [youngest] = engine.rows(engine.query(f"select coalesce(max({made_at}), -1) as made_at from $seen", seen=seen))  # noqa: S608
    counts = _counts(engine, judged, known.changing, before)
    summary = audit.summary_of(
        counts,
        quarantined=before.quarantined + audit.rows_in(engine, quarantined),
        found=anomalies,
        provable_since=read.proved_since,
    )
    state = State(
        provable_since=read.provable_since,
        halves_since=read.limits.halves_since,
        runs=[*before.kept, Run(number=number, at=source.pins.at, latest=youngest["made_at"])],
        pins=replace(source.pins, topics={**before.pins.topics, **source.pins.topics}),
        by_group=summary.by_group,
        quarantined=summary.quarantined,
        rules=options.rules,
    )
    tables.tidy({EVENTS: f"run < {state.kept[0].number}"})
    audit.finish(tables, source, output, summary, options, state.content)
    return summary


def _known(engine: Engine, tables: Tables, ids: Frame, fresh: Frame, before: State, *, kept_since: int) -> Known:
    """Return what is known of the ids of new records and of open ids, the new records included."""
    carried = tables.read(CARRIED)
    opened = engine.query(f"select {_USE} from $carried where kind = 'verdict'", carried=carried)  # noqa: S608
    # Spark would hold all open ids in each worker for `not in`.
    unknown = "not exists (select 1 from $opened known where known.id = frame.id)"
    others = engine.keep(engine.query(f"select id from $ids frame where {unknown}", ids=ids, opened=opened))  # noqa: S608
    known_kinds = ", ".join(f"'{kind}'" for kind in KINDS)
    events, uses = [fresh, where(engine, carried, f"kind in ({known_kinds})")], [opened]
    reported = [engine.query(f"select {_USE} from $carried where kind = 'reported'", carried=carried)]  # noqa: S608
    first = _first_run(engine, others, before)
    if first is not None:
        of_others = f"run >= {first} and id in (select id from $others)"  # noqa: S608
        earlier = f"run <= {before.runs[-1].number} and {of_others}"
        events.append(where(engine, tables.read(EVENTS), earlier, others=others))
        for name, uses_of in ((VERDICTS, uses), (ANOMALIES, reported)):
            rows = engine.query(
                f"select {_WRITTEN_USE} from $table where {of_others}",  # noqa: S608
                table=tables.read(name),
                others=others,
            )
            uses_of.append(rows)
    whole = engine.keep(union(engine, events))
    every = engine.keep(union(engine, uses))
    # Uses without an event that is kept were prepared before every one that is, and before the first run that is kept.
    forgotten = engine.keep(
        engine.query(
            f"""select earlier.* from $every earlier join (
                select id, min(case when kind in ('halves', 'parked') then coalesce(prepared_at, "at")
                    else prepared_at end) as first_at
                from $whole where kind in ('ops', 'messages', 'halves', 'parked')
                    and not {headers.lives_once(engine.dialect)} group by id
            ) known on known.id = earlier.id
            where earlier.prepared_at < least(known.first_at, {kept_since})""",  # noqa: S608
            every=every,
            whole=whole,
        )
    )
    changing = _without(engine, every, forgotten)
    return Known(events=whole, changing=changing, forgotten=forgotten, reported=union(engine, reported))


def _first_run(engine: Engine, ids: Frame, before: State) -> int | None:
    """Return the first run that can have read something about these ids: one with an id as young as the oldest of them.

    Return the first that is kept if one of the ids is no UUIDv7, because it may have been used at any time.
    """
    sql = f"""select min(made_at) as oldest, count(*) - count(made_at) as brought
    from (select {headers.made_at(engine.dialect)} as made_at from $ids) times"""  # noqa: S608
    [found] = engine.rows(engine.query(sql, ids=ids))
    if not found["brought"] and found["oldest"] is None:
        return None
    runs = [run.number for run in before.kept if found["brought"] or run.latest >= found["oldest"]]
    return min(runs, default=None)


def _with_earlier(engine: Engine, judged: Frame, known: Known, since: int) -> tuple[Frame, Known]:
    """Return the verdicts, numbered from the forgotten uses on, without those that do not replace an earlier one.

    Some events of a use that was prepared before the first kept run (`since`, in ms) can be missing. And a verdict that
    can no longer be proved does not replace one that was proved.
    """
    columns = 'verdict, anomalies, "group", cause, topics, expected, found, prepared_at, ended_at, evidence'
    renumbered = engine.keep(
        engine.query(
            f"""select id, cast(life + coalesce(uses, 0) as int) as life, {columns}
            from $judged judged left join (
                select id as gone_id, max(life) + 1 as uses from $forgotten group by id
            ) gone on gone_id = id""",  # noqa: S608
            judged=judged,
            forgotten=known.forgotten,
        )
    )
    settled = engine.keep(
        engine.query(
            f"""select earlier.* from $verdicts earlier join (
                select id as now_id, life as now_life, verdict as now_verdict from $judged
            ) now on now_id = id and now_life = life
            where not {_OPEN} and verdict not in {_UNKNOWN}
                and (prepared_at < {since} or now_verdict in {_UNKNOWN})""",  # noqa: S608
            verdicts=known.changing,
            judged=renumbered,
        )
    )
    # Spark's optimizer fails at a union of frames that are derived from it, if it is not kept.
    changing = engine.keep(_without(engine, known.changing, settled))
    forgotten = union(engine, [known.forgotten, settled])
    return _without(engine, renumbered, settled), replace(known, changing=changing, forgotten=forgotten)


def _without(engine: Engine, verdicts: Frame, others: Frame) -> Frame:
    same = "select 1 from $others other where other.id = frame.id and other.life = frame.life"
    return where(engine, verdicts, f"not exists ({same})", others=others)


def _with_withdrawn(engine: Engine, judged: Frame, earlier: Frame, number: int) -> Frame:
    """Return the verdicts, and a row without a verdict for each use that had one and of which no event is left.

    Its records were in a Kafka transaction that was aborted, or belong to another use now.
    """
    return engine.query(
        f"""select coalesce(now.id, before.id) as id, coalesce(now.life, before.life) as life, now.verdict,
            now.anomalies, now."group", now.cause, now.topics, now.expected, now.found, now.prepared_at, now.ended_at,
            now.evidence, cast({number} as bigint) as run
        from $judged now full join $earlier before on now.id = before.id and now.life = before.life""",  # noqa: S608
        judged=judged,
        earlier=earlier,
    )


def _write_verdicts(engine: Engine, tables: Tables, judged: Frame, earlier: Frame, *, first: bool) -> None:
    """Replace the verdicts that the earlier runs have given."""
    if first:
        tables.write(VERDICTS, judged)
    elif audit.rows_in(engine, judged):
        [oldest] = engine.rows(engine.query("select min(run) as run from $earlier", earlier=earlier))
        since = "" if oldest["run"] is None else f"old.run >= {oldest['run']} and "
        rule = Merge(
            same=f"{since}old.id = new.id and old.life = new.life",
            deletes="new.verdict is null",
            replaces="new.verdict is not null",
            begins="new.verdict is not null",
        )
        tables.merge(VERDICTS, judged, rule)


def _carried(engine: Engine, judged: Frame, known: Known, anomalies: Frame) -> Frame:
    """Return everything about the ids that are open: events, anomalies, and the last verdicts of all their uses.

    Another of the uses can become open.
    """
    now = engine.query(f"select {_WRITTEN_USE} from $judged where verdict is not null", judged=judged)  # noqa: S608
    earlier = _without(engine, union(engine, [known.changing, known.forgotten]), judged)
    new = engine.query(f"select {_WRITTEN_USE} from $anomalies", anomalies=anomalies)  # noqa: S608
    rows = rows_of(
        engine, {"verdict": union(engine, [now, earlier]), "reported": union(engine, [new, known.reported])}, None
    )
    is_open = f"id in (select id from $judged where {_OPEN})"  # noqa: S608
    return where(engine, union(engine, [known.events, rows]), is_open, judged=judged)


def _counts(engine: Engine, judged: Frame, earlier: Frame, before: State) -> Counter[tuple[str, str]]:
    """Return the counts of all runs. A verdict that this run has replaced no longer counts."""
    changes = """
    select verdict, coalesce("group", '') as "group", sum(change) as change from (
        select verdict, "group", 1 as change from $judged where verdict is not null
        union all
        select verdict, "group", -1 from $earlier before where exists (
            select 1 from $judged now where now.id = before.id and now.life = before.life
        )
    ) changes group by 1, 2
    """
    counts = Counter({(name, group): count for name, group, count in before.by_group})
    for row in engine.rows(engine.query(changes, judged=judged, earlier=earlier)):
        counts[row["verdict"], row["group"]] += int(row["change"])
    return counts


_STALE_MS: Final = 3_600_000
"""The greatest age of the last run: Kafka compacts further, and the whole audit must see what the runs saw."""
_NEVER: Final = 1 << 62
_SHOWN: Final = 20


def compare(
    engine: Engine, source: Source, output: Files, against: Files, options: audit.AuditOptions
) -> audit.Summary:
    """Judge everything that the runs into a folder have read, and write the `differences` from their verdicts.

    PipelineError if the folder has no run, or no recent one, or one with other options, or is that of the output.
    """
    folder = against.path()
    if folder == output.path():
        raise PipelineError(f"--cross-check {folder!r} is the folder of --output: give another one")
    runs = Tables(engine, against)
    state = State.of(runs, folder)
    if not state.runs:
        raise PipelineError(f"--cross-check {folder!r} has no run of --continue: let one run into it first")
    if source.pins.at - state.pins.at > _STALE_MS:
        raise PipelineError(
            f"--cross-check {folder!r}: the last run of --continue was more than {_STALE_MS // 60_000} minutes ago: "
            "let one run first"
        )
    for name, value in state.rules.items():
        if options.rules.get(name) != value:
            raise PipelineError(f"--cross-check {folder!r}: the last run had {name} {value / 1000:g}: give the same")
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
    verdicts, reported = (where(engine, runs.read(name), kept) for name in (VERDICTS, ANOMALIES))
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
            other.topics as topics, coalesce(unix_millis(mine.prepared_at), 0) as prepared_at
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
            and not {headers.lives_once(d)} then false
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
