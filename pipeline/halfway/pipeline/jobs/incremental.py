"""The job `audit --continue`: judges new records and open transactions together, at the cost of what is new.

A run reads each topic from the end of the previous run, and keeps what it reads in tables of its own (`events`). It
judges the ids of new records and those without a final verdict, with everything that was ever read about them. From
the previous run it reads what that carried over (`open` and `carried`: everything about the ids without a final
verdict). For other ids it reads the runs that can know something about them; an id that halfway made shows which ones.

Each step reads the tables of the step before it, so that Spark plans every step by itself. A run counts when its state
is written. A run that was killed leaves folders, which the next one deletes.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from halfway.pipeline.engines.engine import union
from halfway.pipeline.errors import SourceError
from halfway.pipeline.jobs import audit, uses
from halfway.pipeline.sources import headers
from halfway.pipeline.sources.pins import Ends, Pins
from halfway.pipeline.transforms import verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from halfway.pipeline.engines.engine import Engine, Frame
    from halfway.pipeline.sources.pinned import Source
    from halfway.pipeline.tables.folders import Files

EVENTS: Final = "events"
OPEN: Final = "open"
CARRIED: Final = "carried"
REPORTED: Final = "reported"
NEW: Final = "new"
_KEPT: Final = ("ops", "named", "halves", "parked", "messages", "unreadable")
_CARRIED: Final = (*_KEPT, REPORTED, NEW)
_FORMAT: Final = 3
"""The format of what a run leaves for the next one."""
KEPT_MS: Final = 14 * 24 * 3_600_000
"""How long events are kept: twice as long as op keeps outcomes."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that counts; times in ms."""

    number: int
    at: int
    """When the run began."""
    latest: int
    """When halfway made the youngest id that the run has judged or left out; -1 if there is none."""


@dataclass(frozen=True, kw_only=True)
class State(audit.Before):
    """What the earlier runs have left: the runs, offsets and counts."""

    runs: Sequence[Run]
    """The runs whose events are kept."""
    by_group: Sequence[tuple[str, str, int]]
    quarantined: int
    options: Mapping[str, int]
    """The options of the last run that affect verdicts."""

    @classmethod
    def read(cls, output: Files) -> State | None:
        """Return the state in a folder, None before the first run."""
        if not output.exists(audit.STATE):
            return None
        try:
            content: dict[str, Any] = json.loads(output.read(audit.STATE))
            if content.get("format") != _FORMAT:
                raise SourceError(
                    f"{output.path()!r} was written by another release of audit --continue: begin in another folder"
                )
            return cls(
                runs=[
                    Run(number=int(number), at=int(at), latest=int(latest)) for number, at, latest in content["runs"]
                ],
                pins=Pins.from_json(json.dumps(content["pins"])),
                by_group=[(str(name), str(group), int(count)) for name, group, count in content["by_group"]],
                quarantined=int(content["quarantined"]),
                provable_since={
                    str(name): {int(number): int(since) for number, since in times.items()}
                    for name, times in content["provable_since"].items()
                },
                halves_since=int(content["halves_since"]),
                options={str(name): int(value) for name, value in content.get("options", {}).items()},
            )
        except (ValueError, KeyError, TypeError) as error:
            raise SourceError(
                f"{output.path(audit.STATE)} is not what an audit with --continue has left: {error!r}"
            ) from None

    @property
    def kept(self) -> Sequence[Run]:
        """The runs that are read further. The cost of a run does not grow with the number of all runs."""
        return [run for run in self.runs if run.at >= self.runs[-1].at - KEPT_MS]

    def kept_since(self, grace_ms: int) -> int:
        """Return the cut of the first run that is kept, in ms; 0 if no run was dropped yet."""
        first = self.kept[0]
        return first.at - grace_ms if first.number else 0

    def write(self, output: Files, *, after: int | None) -> None:
        """Write the state, so that the last run counts. `after` is the number of the run that it continues.

        Raises:
            SourceError: another run has counted since then.

        """
        there = State.read(output)
        if (None if there is None else there.runs[-1].number) != after:
            raise SourceError(f"another audit has written into {output.path()!r} at the same time: run one at a time")
        content = {
            "format": _FORMAT,
            "runs": [(run.number, run.at, run.latest) for run in self.runs],
            "pins": json.loads(self.pins.to_json()),
            "by_group": self.by_group,
            "quarantined": self.quarantined,
            "provable_since": self.provable_since,
            "halves_since": self.halves_since,
            "options": self.options,
        }
        output.write(json.dumps(content) + "\n", audit.STATE)


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of the ids that are judged."""

    events: dict[str, Frame]
    verdicts: Frame
    """The last verdicts of uses whose events are kept."""
    forgotten: Frame
    """The last verdicts of other uses, which do not change any more."""
    reported: Frame


def run(engine: Engine, source: Source, output: Files, options: audit.AuditOptions) -> audit.Summary:
    """Judge what is new, and return the counts of all runs.

    `verdicts` and `anomalies` have a folder for each run. For a transaction the row of the latest run counts. An
    anomaly is reported once, by the run that finds it first.
    """
    before = State.read(output)
    number = 0 if before is None else before.runs[-1].number + 1
    _forget(output, number, before)
    if before is not None:
        source.continue_from(before.pins)
    ends = Ends(seen=() if before is None else (before.pins,))
    read = audit.evidence(engine, source, options, before=before, ends=ends)
    part = f"run={number}"

    def table(frame: Frame, *names: str, files: int | None = None) -> Frame:
        return engine.write(frame, output.path(*names, part), files=files)

    fresh = {name: table(getattr(read.evidence, name), EVENTS, name) for name in _KEPT}
    read_now = (*fresh.values(), read.evidence.unsettled)
    if before is None:
        known = _nothing(engine, fresh)
    else:
        ids = [engine.query("select id from $frame", frame=frame) for frame in read_now]
        new = engine.query("select distinct id from $ids", ids=union(engine, ids))
        known = _known(engine, output, table(new, CARRIED, NEW), fresh, before, grace_ms=options.grace_ms)
    found = verdict.verdicts(engine, replace(read.evidence, **known.events), read.limits)
    if before is not None:
        found, known = _with_earlier(engine, found, known, before.kept_since(options.grace_ms))
    judged = table(found if before is None else _with_withdrawn(engine, found, known.verdicts), audit.VERDICTS)
    anomalies = table(_anomalies(engine, judged, known.reported), audit.ANOMALIES, files=1)
    quarantined = table(read.quarantine, audit.QUARANTINE)
    still = table(_still(engine, judged, union(engine, [known.verdicts, known.forgotten])), OPEN)
    carried = dict(known.events)
    carried[REPORTED] = union(
        engine, [engine.query("select id, life, verdict from $new", new=anomalies), known.reported]
    )
    for name, frame in carried.items():
        kept = engine.query("select * from $frame where id in (select id from $still)", frame=frame, still=still)
        table(kept, CARRIED, name)
    # A later run may read more about these ids, although they seem to be of another deployment now.
    older = engine.query(f"select id from $read where prepared_at < {read.limits.created_at}", read=fresh["messages"])  # noqa: S608
    seen = union(engine, [engine.query("select id from $judged", judged=judged), older])
    state = State(
        provable_since=read.provable_since,
        halves_since=read.limits.halves_since,
        runs=[*(before.kept if before else ()), Run(number=number, at=source.pins.at, latest=_latest(engine, seen))],
        pins=replace(source.pins, topics={**(before.pins.topics if before else {}), **source.pins.topics}),
        by_group=_counts(engine, judged, known.verdicts, before),
        quarantined=(before.quarantined if before else 0) + rows_in(engine, quarantined),
        options=options.rules,
    )
    state.write(output, after=None if before is None else before.runs[-1].number)
    verdicts: Counter[str] = Counter()
    for name, _, count in state.by_group:
        verdicts[name] += count
    summary = audit.Summary(
        verdicts={name: verdicts[name] for name in verdict.VERDICTS},
        quarantined=state.quarantined,
        by_group=state.by_group,
        found=output.path(audit.ANOMALIES, part),
        provable_since={topic: max(times.values(), default=0) for topic, times in read.provable_since.items()},
    )
    audit.write_summary(engine, source, output, summary, options)
    return summary


_OPEN: Final = ", ".join(f"'{name}'" for name in ("pending", "parked"))


def _forget(output: Files, number: int, before: State | None) -> None:
    """Delete what a killed run has left, and events that are too old to be kept."""
    of_last: list[tuple[str, ...]] = [(OPEN,), *((CARRIED, name) for name in _CARRIED)]
    results = ((audit.VERDICTS,), (audit.ANOMALIES,), (audit.QUARANTINE,))
    for table in (*of_last, *((EVENTS, name) for name in _KEPT), *results):
        if (
            before is None
            and output.names(*table)
            and not any(name.startswith("run=") for name in output.names(*table))
        ):
            raise SourceError(f"{output.path(*table)} is of an audit without --continue: give another folder")
        output.delete(*table, f"run={number}")
    if before is None:
        return
    last = before.runs[-1]
    for table in of_last:
        for part in output.names(*table):
            if part != f"run={last.number}":
                output.delete(*table, part)
    for run in before.runs:
        if run not in before.kept:
            for name in _KEPT:
                output.delete(EVENTS, name, f"run={run.number}")


def _nothing(engine: Engine, fresh: dict[str, Frame]) -> Known:
    """Return what the first run knows: the events that it has read."""
    none = engine.table([], "id string, verdict string, life int, `group` string, prepared_at bigint")
    return Known(
        events=fresh,
        verdicts=none,
        forgotten=none,
        reported=engine.table([], "id string, life int, verdict string"),
    )


def _known(
    engine: Engine, output: Files, ids: Frame, fresh: Mapping[str, Frame], before: State, *, grace_ms: int
) -> Known:
    """Return what is known of the ids of new records and of open ids, the new records included."""
    last = [before.runs[-1].number]
    opened = _table(engine, output, OPEN, last)
    others = engine.keep(
        engine.query(
            # Spark would hold all open ids in each worker for `not in`.
            "select id from $ids new where not exists (select 1 from $opened known where known.id = new.id)",
            ids=ids,
            opened=opened,
        )
    )
    runs = _runs_of(engine, others, before)

    def of_others(frame: Frame) -> Frame:
        return engine.query("select * from $frame where id in (select id from $others)", frame=frame, others=others)

    events = {}
    for name, frame in fresh.items():
        parts = [frame, _table(engine, output, f"{CARRIED}/{name}", last)]
        if runs:
            parts.append(of_others(_table(engine, output, f"{EVENTS}/{name}", runs)))
        events[name] = union(engine, parts)
    verdicts, reported = [opened], [_table(engine, output, f"{CARRIED}/{REPORTED}", last)]
    if runs:
        last_ones = last_verdicts(engine, of_others(engine.read_runs(output.path(audit.VERDICTS), runs)))
        columns = _verdict_columns(engine)
        verdicts.append(engine.query(f"select {columns} from $verdicts", verdicts=last_ones))  # noqa: S608
        anomalies = of_others(_table(engine, output, audit.ANOMALIES, runs))
        reported.append(engine.query("select id, life, verdict from $anomalies", anomalies=anomalies))
    every = engine.keep(union(engine, verdicts))
    forgotten = engine.keep(uses.forgotten(engine, every, events, before=before.kept_since(grace_ms)))
    remembered = uses.without(engine, every, forgotten)
    return Known(events=events, verdicts=remembered, forgotten=forgotten, reported=union(engine, reported))


def _with_earlier(engine: Engine, judged: Frame, known: Known, since: int) -> tuple[Frame, Known]:
    """Return the verdicts, numbered from the forgotten uses on, without those that do not replace an earlier one."""
    judged = engine.keep(uses.renumbered(engine, judged, known.forgotten))
    settled = engine.keep(uses.settled(engine, judged, known.verdicts, before=since))
    # Spark's optimizer fails at a union of frames that are derived from it, if it is not kept.
    changing = engine.keep(uses.without(engine, known.verdicts, settled))
    forgotten = union(engine, [known.forgotten, settled])
    return uses.without(engine, judged, settled), replace(known, verdicts=changing, forgotten=forgotten)


def _verdict_columns(engine: Engine) -> str:
    """Return SQL for the columns of the table of verdicts that are carried over."""
    return f'id, verdict, life, "group", {engine.dialect.millis("prepared_at")} as prepared_at'


def last_verdicts(engine: Engine, rows: Frame) -> Frame:
    """Return the latest row of each use of an id, without those that have no verdict."""
    return engine.query(
        """select id, verdict, life, "group", topics, prepared_at from (
            select *, row_number() over (partition by id, life order by run desc) as newest from $rows
        ) last where newest = 1 and verdict is not null""",
        rows=rows,
    )


def _runs_of(engine: Engine, ids: Frame, before: State) -> list[int]:
    """Return the runs that can have read something about these ids: those with an id as young as the oldest of them.

    Return all runs if a client chose one of the ids, because it may have been used at any time.
    """
    found = engine.rows(
        engine.query(
            "select min(made_at) as oldest, count(*) - count(made_at) as brought from "  # noqa: S608
            f"(select {headers.made_at(engine.dialect)} as made_at from $ids) times",
            ids=ids,
        )
    )[0]
    if found["brought"]:
        return [run.number for run in before.kept]
    if found["oldest"] is None:
        return []
    return [run.number for run in before.kept if run.latest >= found["oldest"]]


def _with_withdrawn(engine: Engine, judged: Frame, earlier: Frame) -> Frame:
    """Return the verdicts, and a row without a verdict for each use that had one and of which no event is left.

    Its records were in a Kafka transaction that was aborted, or belong to another use now.
    """
    return engine.query(
        """select coalesce(now.id, before.id) as id, coalesce(now.life, before.life) as life, now.verdict,
            now.anomalies, now."group", now.cause, now.topics, now.expected, now.found, now.prepared_at, now.ended_at,
            now.evidence
        from $judged now full join $earlier before on now.id = before.id and now.life = before.life""",
        judged=judged,
        earlier=earlier,
    )


def _latest(engine: Engine, seen: Frame) -> int:
    sql = f"select coalesce(max({headers.made_at(engine.dialect)}), -1) as latest from $seen"  # noqa: S608
    return int(engine.rows(engine.query(sql, seen=seen))[0]["latest"])


def _table(engine: Engine, output: Files, name: str, runs: Iterable[int]) -> Frame:
    return engine.read(*(output.path(name, f"run={run}") for run in runs))


def _anomalies(engine: Engine, judged: Frame, reported: Frame) -> Frame:
    """Return the anomalies that no run has reported."""
    return engine.query(
        # Not the name of a column: Spark would look into that column.
        f"""select * from $judged now where {verdict.IS_ANOMALY} and not exists (
            select 1 from $reported before
            where before.id = now.id and before.life = now.life and before.verdict = now.verdict
        )""",  # noqa: S608
        judged=judged,
        reported=reported,
    )


def _still(engine: Engine, judged: Frame, earlier: Frame) -> Frame:
    """Return the last verdicts of all uses of ids that are open: another of the uses can become open."""
    return engine.query(
        f"""
        select id, verdict, life, "group", prepared_at from (
            select {_verdict_columns(engine)} from $judged where verdict is not null
            union all
            select id, verdict, life, "group", prepared_at from $earlier before where not exists (
                select 1 from $judged now where now.id = before.id and now.life = before.life
            )
        ) last where id in (select id from $judged where verdict in ({_OPEN}))""",  # noqa: S608
        judged=judged,
        earlier=earlier,
    )


def _counts(engine: Engine, judged: Frame, earlier: Frame, before: State | None) -> list[tuple[str, str, int]]:
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
    counts: Counter[tuple[str, str]] = Counter()
    for name, group, count in () if before is None else before.by_group:
        counts[name, group] += count
    for row in engine.rows(engine.query(changes, judged=judged, earlier=earlier)):
        counts[row["verdict"], row["group"]] += int(row["change"])
    return sorted((name, group, count) for (name, group), count in counts.items() if count)


def rows_in(engine: Engine, frame: Frame) -> int:
    return int(engine.rows(engine.query("select count(*) as count from $read", read=frame))[0]["count"])
