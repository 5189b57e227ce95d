"""The job `report`: one HTML page, which needs nothing else, from the tables of `ledger` and `audit`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from itertools import islice
from typing import Any, Final

from halfway.pipeline.engines.dialect import Frame
from halfway.pipeline.engines.engine import Engine, between
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.jobs import ledger, reading
from halfway.pipeline.jobs.audit import latest_proofs
from halfway.pipeline.sources.headers import LATEST_MS
from halfway.pipeline.sources.pinned import Source
from halfway.pipeline.tables import ANOMALIES as ANOMALIES_FOUND
from halfway.pipeline.tables import VERDICTS as VERDICTS_FOUND
from halfway.pipeline.tables import Files, Tables
from halfway.pipeline.transforms.verdict import ANOMALIES, FINE, NOT_JUDGED, UNPROVED, VERDICTS

OUTCOMES = ("committed", "rolled_back")
CAUSES = ("producer", "check", "operator", "policy")
OBJECTIVE_SHARE = 0.99
"""The share of transactions that must end within the time of an objective."""


def counted(condition: str) -> str:
    return f"cast(count_if({condition}) as bigint)"


OF_OUTCOMES = ", ".join(counted(f"outcome = '{name}'") + f" as {name}" for name in OUTCOMES)


def quantiles(suffix: str = "_ms") -> str:
    """Return the exact p50, p95 and p99 of the time from prepare to outcome, in ms."""
    shares = (0.5, 0.95, 0.99)
    return ", ".join(f"round(percentile(latency_ms, {share}), 3) as p{share * 100:g}{suffix}" for share in shares)


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


PAGE: Final = "report.html"
_SHOWN: Final = {"anomalies": 100, "pending": 50, "groups": 100, "trail": 1_000}
"""The number of rows of a table on the page."""
_SHOWN_PARTS: Final = 5
"""The number of parts of an anomaly's evidence, and of places of a message, on the page."""
_LABELS: Final = {"check": "check-back"}
_SECOND, _MINUTE, _HOUR, _DAY = 1_000, 60_000, 3_600_000, 86_400_000
_STEPS: Final = (
    *(minutes * _MINUTE for minutes in (1, 5, 15)),
    *(hours * _HOUR for hours in (1, 6)),
    *(days * _DAY for days in (1, 7, 30, 365)),
)
"""The times that a row of outcomes over time can stand for, in ms."""
_ROWS: Final = 60
"""The number of such rows for which a longer step is chosen."""
_DURATIONS: Final = (
    *(10, 30, 100, 300, _SECOND, 3 * _SECOND, 10 * _SECOND, 30 * _SECOND),
    *(_MINUTE, 5 * _MINUTE, 15 * _MINUTE, _HOUR, 6 * _HOUR, _DAY, 7 * _DAY),
)
"""The bounds of the classes of durations, in ms."""
_STATES: Final = {"prepared": "pending", "parked": "parked"}


@dataclass(frozen=True, kw_only=True)
class Table:
    """The first rows of a table, and the number of all."""

    header: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    count: int


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Rows of bars: what each is of, and how many transactions each of its parts stands for."""

    parts: Sequence[str]
    rows: list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The sources of a report: folders of `ledger` and `audit`, and the topic of the audit trail."""

    ledger: Files | None = None
    audit: Files | None = None
    trail: Source | None = None


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The part of the time that is reported (ms, of the outcome), and objectives of groups in ms."""

    since_ms: int | None = None
    until_ms: int | None = None
    objectives: Mapping[str | None, int] = field(default_factory=dict)

    def part(self, engine: Engine, frame: Frame, *times: str) -> Frame:
        """Return the rows whose first known time is in the reported time, and those without any."""
        return between(engine, frame, self.since_ms, self.until_ms, *times)


def run(engine: Engine, sources: Sources, output: Files, wanted: Wanted = Wanted()) -> str:
    """Write `report.html` from the sources that are given; return its path."""
    charts: dict[str, Chart] = {}
    tables: dict[str, Table] = {}
    facts: dict[str, Any] = {"made_at": _moment(datetime.now(UTC).timestamp() * 1000)}
    if sources.audit is not None:
        facts["audit"] = _of_audit(engine, sources.audit, tables, wanted)
    if sources.ledger is not None:
        found = ledger.tables(engine, sources.ledger)
        if found is None:
            raise PipelineError(f"{sources.ledger.uri!r} holds no ledger: run halfway-pipeline ledger first")
        ended, pending = found
        _open_still(engine, pending, facts, tables)
        ended = wanted.part(engine, ended, "ended_at")
        if wanted.objectives:
            ended = with_objectives(engine, ended, wanted.objectives)
        within = WITHIN if wanted.objectives else ""
        facts["ledger"] = _of_ledger(engine, engine.keep(ended), tables, charts, within)
        unread = ledger.quarantine(engine, sources.ledger)
        facts["ledger"]["quarantined"] = 0 if unread is None else _only(engine, "count(*) as count", unread)["count"]
    if sources.trail is not None:
        tables["trail"] = _trail(engine, sources.trail, wanted)
    output.write(_page(facts, charts, tables), PAGE)
    return output.path(PAGE)


def _only(engine: Engine, columns: str, frame: Frame) -> dict[str, Any]:
    return engine.rows(engine.query(f"select {columns} from $frame", frame=frame))[0]  # noqa: S608


def _moment(ms: float | None, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a time in UTC as text. Times leave an engine as numbers, never as those of this machine's zone."""
    return "" if ms is None else f"{datetime.fromtimestamp(ms // 1000, UTC):{form}}"


def _trail(engine: Engine, source: Source, wanted: Wanted) -> Table:
    """Return the manual changes and who made them, the newest first."""
    topic = source.prefix + "audit"
    source.pin([topic])
    reading.require(source, ["audit"])
    texts = ("actor_kind", "actor", "key_id", "action", "subject", "group", "result", "detail", "remark")
    blank = ", ".join(f"""coalesce("{name}", '') as "{name}\"""" for name in texts)
    possible = f'case when "at" between 0 and {LATEST_MS} then "at" end'
    events = engine.query(
        f"""select timestamp_millis({possible}) as "time", {possible} as ms, {blank} from $events
        where error is null""",  # noqa: S608
        events=reading.audit_trail(engine, source.committed([topic])),
    )
    shown = ("key_id", "action", "subject", "group", "result", "detail", "remark")
    rows = engine.stream(wanted.part(engine, events, '"time"'), "ms desc, subject")
    cells = (
        (_moment(row["ms"]), f"{row['actor_kind']} {row['actor']}".strip(), *(row[name] for name in shown))
        for row in rows
    )
    return _table("trail", ("at", "actor", *shown), cells)


def _table(name: str, header: tuple[str, ...], rows: Iterator[tuple[Any, ...]]) -> Table:
    kept = list(islice(rows, _SHOWN[name]))
    return Table(header=header, rows=kept, count=len(kept) + sum(1 for _ in rows))


def _of_ledger(
    engine: Engine, ended: Frame, tables: dict[str, Table], charts: dict[str, Chart], within: str
) -> dict[str, Any]:
    bounds = "min(unix_millis(ended_at)) as since, max(unix_millis(ended_at)) as until"
    facts = _only(engine, f"count(*) as count, {bounds}, {OF_OUTCOMES}, {quantiles(suffix='')}", ended)
    if not facts["count"]:
        return facts
    grouped = engine.query(f"select cause, {OF_OUTCOMES} from $ended group by cause", ended=ended)  # noqa: S608
    by_cause = {row["cause"]: tuple(row[name] for name in OUTCOMES) for row in engine.rows(grouped)}
    tables["groups"] = _by_group(engine, ended, within)
    if within:
        shares = engine.query(f"""select 1 as one{within} from $ended group by "group\"""", ended=ended)  # noqa: S608
        missed = f"{counted(f'share_within < {OBJECTIVE_SHARE}')} as count"
        facts["missed"] = _only(engine, missed, shares)["count"]
    nothing = (0,) * len(OUTCOMES)
    charts["over_time"] = _over_time(engine, ended, facts["since"], facts["until"])
    charts["durations"] = _durations(engine, ended)
    charts["causes"] = Chart(
        parts=OUTCOMES, rows=[(_LABELS.get(each, each), by_cause.get(each, nothing)) for each in CAUSES]
    )
    return facts | {name: _moment(facts[name]) for name in ("since", "until")}


def _by_group(engine: Engine, ended: Frame, within: str) -> Table:
    """Return groups by their p99, the longest first."""
    grouped = engine.query(
        f"""select "group", count(*) as transactions, {OF_OUTCOMES}, {quantiles()},
            round(avg(checks), 3) as checks_each,
            round({counted("cause = 'check'")} / count(*), 4) as share_by_check{within}
        from $ended group by "group\"""",  # noqa: S608
        ended=ended,
    )
    header = ("group", "transactions", *OUTCOMES, "p50_ms", "p95_ms", "p99_ms", "checks_each", "share_by_check")
    whole = header + (("objective_ms", "share_within") if within else ())
    return _table("groups", whole, (tuple(row.values()) for row in engine.stream(grouped, 'p99_ms desc, "group"')))


def _over_time(engine: Engine, ended: Frame, since: int, until: int) -> Chart:
    """Return the outcomes of each step of a time in ms."""
    step = next((size for size in _STEPS if until - since < _ROWS * size), _STEPS[-1])
    begin = f"unix_millis(ended_at) - unix_millis(ended_at) % {step}"
    grouped = engine.query(f"select {begin} as ms, {OF_OUTCOMES} from $ended group by 1", ended=ended)  # noqa: S608
    found = {row["ms"]: tuple(row[name] for name in OUTCOMES) for row in engine.rows(grouped)}
    form = "%Y-%m-%d" if step >= _DAY else "%Y-%m-%d %H:%M"
    steps = range(min(found), max(found) + 1, step)
    return Chart(parts=OUTCOMES, rows=[(_moment(at, form), found.get(at, (0,) * len(OUTCOMES))) for at in steps])


def _durations(engine: Engine, ended: Frame) -> Chart:
    """Return how many transactions ended within each class of durations, by cause."""
    classes = " ".join(f"when latency_ms <= {bound} then {number}" for number, bound in enumerate(_DURATIONS))
    grouped = engine.query(
        f"""select cause, case {classes} else {len(_DURATIONS)} end as class, count(*) as count
        from $ended group by 1, 2""",  # noqa: S608
        ended=ended,
    )
    found = {(row["cause"], row["class"]): row["count"] for row in engine.rows(grouped)}
    causes = list(dict.fromkeys([*CAUSES, *(cause for cause, _ in found)]))
    labels = [*(f"up to {_duration(bound)}" for bound in _DURATIONS), "longer"]
    there = [number for _, number in found]
    return Chart(
        parts=[_LABELS.get(cause, cause) for cause in causes],
        rows=[
            (labels[number], tuple(found.get((cause, number), 0) for cause in causes))
            for number in range(min(there), max(there) + 1)
        ],
    )


def _duration(ms: float) -> str:
    for unit, size in (("d", _DAY), ("h", _HOUR), ("min", _MINUTE), ("s", _SECOND)):
        if ms >= size:
            return f"{ms / size:.3g} {unit}"
    return f"{ms:.3g} ms"


def _open_still(engine: Engine, pending: Frame, facts: dict[str, Any], tables: dict[str, Table]) -> None:
    grouped = engine.query(
        """select "group", state, count(*) as transactions, min(since) as oldest from $pending group by 1, 2""",
        pending=pending,
    )
    rows = list(engine.stream(grouped, 'oldest, "group", state'))
    counts = {state: sum(row["transactions"] for row in rows if row["state"] == state) for state in _STATES}
    facts["open"] = {"pending": counts["prepared"], "parked": counts["parked"]}
    shown = ((row["group"], _STATES[row["state"]], row["transactions"], _moment(row["oldest"])) for row in rows)
    tables["pending"] = _table("pending", ("group", "state", "transactions", "oldest_since"), shown)


def _of_audit(engine: Engine, folder: Files, tables: dict[str, Table], wanted: Wanted) -> dict[str, Any]:
    found = Tables(engine, folder)
    if found.run < 0:
        raise PipelineError(f"{folder.uri!r} holds no audit that was finished: run halfway-pipeline audit first")
    summary = dict(found.content["summary"])
    if wanted.since_ms is not None or wanted.until_ms is not None:
        part = wanted.part(engine, found.read(VERDICTS_FOUND), "ended_at", "prepared_at")
        counts = engine.rows(engine.query("select verdict, count(*) as count from $part group by 1", part=part))
        summary |= dict.fromkeys(VERDICTS, 0) | {row["verdict"]: row["count"] for row in counts}
    verdicts = [(name, summary.get(name, 0)) for name in (*ANOMALIES, UNPROVED, NOT_JUDGED, *FINE)]
    strength = " ".join(f"when '{name}' then {number}" for number, name in enumerate(ANOMALIES))
    of_time = wanted.part(engine, found.read(ANOMALIES_FOUND), "ended_at", "prepared_at")
    anomalies = engine.query(
        f"""select *, unix_millis(prepared_at) as prepared_ms, unix_millis(ended_at) as ended_ms,
            case verdict {strength} end as strength from $of_time""",  # noqa: S608
        of_time=of_time,
    )
    header = (
        "verdict", "id", "group", "prepared_at", "ended_at", "topics", "messages_named", "messages_found", "evidence",
    )  # fmt: skip
    tables["anomalies"] = _table("anomalies", header, map(_anomaly, engine.stream(anomalies, "strength, id")))
    return {
        "verdicts": verdicts,
        "proofs": [(topic, _moment(at)) for topic, at in latest_proofs(summary["provable_since"])],
        "anomalies": sum(summary[name] for name in ANOMALIES),
        "transactions": sum(count for _, count in verdicts),
        "quarantined": summary["quarantined"],
        "judged_at": _moment(summary["judged_at"]),
    }


def _anomaly(row: Any) -> tuple[Any, ...]:
    problems = [_problem(each) for each in row["evidence"] or ()]
    if row["verdict"] == "contradicted":
        problems.insert(0, "op has more than one outcome")
    evidence = "; ".join(_first(problems))
    topics = ", ".join(_first(row["topics"]))
    times = _moment(row["prepared_ms"]), _moment(row["ended_ms"])
    return row["verdict"], row["id"], row["group"] or "", *times, topics, row["expected"], row["found"], evidence


def _problem(evidence: Any) -> str:
    places = ", ".join(_first([f"{place['partition']}@{place['offset']}" for place in evidence["places"]]))
    message = f"message {evidence['slot']} of " if evidence["slot"] else ""
    where = f" at {places}" if places else ""
    return f"{message}{evidence['topic']} {evidence['problem']}{where}"


def _first(parts: list[str]) -> list[str]:
    more = len(parts) - _SHOWN_PARTS
    return [*parts[:_SHOWN_PARTS], f"and {more:,} more"] if more > 0 else parts


def _page(facts: Mapping[str, Any], charts: Mapping[str, Chart], tables: Mapping[str, Table]) -> str:
    import jinja2

    source = (files("halfway.pipeline.jobs") / "report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"number": _number, "duration": _duration, "share": "{:.1%}".format}
    return environment.from_string(source).render(facts=facts, charts=charts, tables=tables, anomalies=ANOMALIES)


def _number(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
