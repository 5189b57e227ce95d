"""The job `report`: one HTML page, which needs nothing else, and CSV files, from the tables of `ledger` and `audit`."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F

from halfway.pipeline.errors import SourceError
from halfway.pipeline.jobs import audit, ledger, reading
from halfway.pipeline.report import plots
from halfway.pipeline.sources.headers import LATEST_MS
from halfway.pipeline.transforms.rollup import CAUSES, OBJECTIVE_SHARE, OUTCOMES, rollup, within
from halfway.pipeline.transforms.verdict import ANOMALIES, FINE, NOT_JUDGED, UNPROVED, VERDICTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pyspark.sql import Column, DataFrame, SparkSession

    from halfway.pipeline.sources.pinned import Source
    from halfway.pipeline.tables.folders import Folder

PAGE: Final = "report.html"
_SHOWN: Final = {"anomalies": 100, "pending": 50, "groups": 20, "over_time": 0, "trail": 100}
"""The number of rows on the page. The CSV file of a table has all of them."""
_SHOWN_PARTS: Final = 5
"""The number of parts of an anomaly's evidence, and of places of a message, on the page."""
_LABELS: Final = {"check": "check-back"}
_PLOTTED_GROUPS: Final = 10
_BINS: Final = 40
_POINTS: Final = 1_440
"""The largest number of minutes or hours that are shown. Longer times are shown by the hour or by the day."""
_MOMENT: Final = "yyyy-MM-dd HH:mm:ss"
_ACTIVE: Final = re.compile(r"[=+\-@\t\r]")
_NUMBER: Final = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")


@dataclass(frozen=True, kw_only=True)
class Table:
    """The part of a CSV file on the page: its first rows, and their number in the file."""

    name: str
    header: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    count: int


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The sources of a report: folders of `ledger` and `audit`, and the topic of the audit trail."""

    ledger: Folder | None = None
    audit: Folder | None = None
    trail: Source | None = None


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The part of the time that is reported (ms, of the outcome), and objectives of groups in ms."""

    since_ms: int | None = None
    until_ms: int | None = None
    objectives: Mapping[str | None, int] = field(default_factory=dict)

    def holds(self, *times: str) -> Column:
        """Return whether the first known one of some timestamps is in the reported time; True if none is known."""
        at = F.coalesce(*(F.unix_millis(time) for time in times))
        since = F.lit(self.since_ms).cast("bigint")
        until = F.lit(self.until_ms).cast("bigint")
        return F.coalesce(at >= since, F.lit(True)) & F.coalesce(at < until, F.lit(True))


def run(spark: SparkSession, sources: Sources, output: Folder, wanted: Wanted = Wanted()) -> str:
    """Write `report.html`, and CSV files beside it, from the sources that are given; return the path of the page."""
    figures: dict[str, str] = {}
    tables: dict[str, Table] = {}
    facts: dict[str, Any] = {"made_at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")}
    if sources.audit is not None:
        facts["audit"] = _of_audit(spark, sources.audit, output, tables, wanted)
    if sources.ledger is not None:
        found = ledger.tables(spark, sources.ledger)
        if found is None:
            raise SourceError(f"{sources.ledger.uri!r} holds no ledger: run halfway-pipeline ledger first")
        ended, pending = found
        _open_still(pending, output, facts, tables)
        ended = ended.where(wanted.holds("ended_at")).persist()
        try:
            facts["ledger"] = _of_ledger(ended, output, tables, figures, wanted.objectives)
        finally:
            ended.unpersist()
        unread = ledger.quarantine(spark, sources.ledger)
        facts["ledger"]["quarantined"] = 0 if unread is None else unread.count()
    if sources.trail is not None:
        tables["trail"] = _trail(sources.trail, output, wanted)
    output.write(_page(facts, figures, tables), PAGE)
    return output.path(PAGE)


def _trail(source: Source, output: Folder, wanted: Wanted) -> Table:
    """Return the manual changes and who made them, the newest first."""
    topic = source.prefix + "audit"
    source.pin([topic])
    reading.require(source, ["audit"])
    events = reading.audit_trail(source.committed([topic])).where("error is null")
    at = F.when(F.col("at").between(0, LATEST_MS), F.timestamp_millis("at"))
    events_shown = events.select(
        at.alias("at"),
        F.trim(F.concat_ws(" ", "actor_kind", "actor")).alias("actor"),
        *("key_id", "action", "subject", "group", "result", "detail", "remark"),
    ).where(wanted.holds("at"))
    rows = events_shown.orderBy(F.desc("at"), "subject").withColumn("at", F.date_format("at", _MOMENT))
    blank = rows.select(*(F.coalesce(name, F.lit("")).alias(name) for name in rows.columns))
    return _table(output, "trail", tuple(blank.columns), blank.toLocalIterator())


def _same(row: Any) -> tuple[Any, ...]:
    return tuple(row)


def _table(
    output: Folder,
    name: str,
    header: tuple[str, ...],
    rows: Iterable[Any],
    *,
    cells: Callable[[Any], tuple[Any, ...]] = _same,
    shown: Callable[[Any], tuple[Any, ...]] = _same,
) -> Table:
    """Write the CSV file row by row, and keep the rows that the page shows."""
    kept: list[tuple[Any, ...]] = []
    most = _SHOWN.get(name)
    count = 0
    with output.writing(f"{name}.csv") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for row in rows:
            writer.writerow([_inert(cell) for cell in cells(row)])
            count += 1
            if most is None or count <= most:
                kept.append(shown(row))
    return Table(name=name, header=header, rows=kept, count=count)


def _inert(cell: Any) -> Any:
    """Return a value that no spreadsheet takes for a formula."""
    if isinstance(cell, str) and _ACTIVE.match(cell) and not _NUMBER.fullmatch(cell):
        return f"'{cell}"
    return cell


def _of_ledger(
    ended: DataFrame,
    output: Folder,
    tables: dict[str, Table],
    figures: dict[str, str],
    objectives: Mapping[str | None, int],
) -> dict[str, Any]:
    # Times leave Spark as text or seconds. Timestamps would be in the local time of this machine.
    whole = ended.agg(
        F.count(F.lit(1)).alias("count"),
        F.date_format(F.min("ended_at"), _MOMENT).alias("since"),
        F.date_format(F.max("ended_at"), _MOMENT).alias("until"),
        (F.unix_timestamp(F.max("ended_at")) - F.unix_timestamp(F.min("ended_at"))).alias("seconds"),
        F.max("latency_ms").alias("longest"),
        *(F.count_if(F.col("outcome") == outcome).alias(outcome) for outcome in OUTCOMES),
        *_quantiles(),
    ).first()
    assert whole is not None  # noqa: S101 - an aggregate without groups has one row
    facts: dict[str, Any] = whole.asDict()
    if not whole["count"]:
        return facts
    step = _step(whole["seconds"])
    groups, causes = _by_group(ended, output, objectives), _by_cause(ended, output)
    tables |= {"groups": groups, "causes": causes, "over_time": _over_time(ended, step, output, objectives)}
    if objectives:
        grouped = ended.groupBy("group").agg(*within(objectives))
        facts["missed"] = grouped.where(F.col("share_within") < OBJECTIVE_SHARE).count()
    figures["over time"] = plots.stacked(*_outcomes(ended, step), step)
    figures["time to end"] = plots.histogram(*_latencies(ended, whole["longest"]), [whole["p50"], whole["p99"]])
    by_cause = {row[0]: row[1:] for row in causes.rows}
    figures["ended by"] = plots.bars({_LABELS.get(each, each): by_cause.get(each, (0, 0)) for each in CAUSES}, OUTCOMES)
    slowest = groups.rows[:_PLOTTED_GROUPS]
    figures["groups"] = plots.lines([(row[0], row[4], row[6]) for row in slowest], ("p50", "p99"))
    return facts


def _quantiles() -> list[Any]:
    return [F.percentile("latency_ms", F.lit(share)).alias(f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)]


def _by_group(ended: DataFrame, output: Folder, objectives: Mapping[str | None, int]) -> Table:
    """Return groups by their p99, the longest first."""
    grouped = ended.groupBy("group").agg(
        F.count(F.lit(1)).alias("transactions"),
        *(F.count_if(F.col("outcome") == outcome).alias(outcome) for outcome in OUTCOMES),
        *_quantiles(),
        F.round(F.avg("checks"), 3).alias("checks_each"),
        F.round(F.count_if(F.col("cause") == "check") / F.count(F.lit(1)), 4).alias("share_by_check"),
        *within(objectives),
    )
    header = ("group", "transactions", *OUTCOMES, "p50_ms", "p95_ms", "p99_ms", *grouped.columns[7:])
    return _table(output, "groups", header, grouped.orderBy(F.desc("p99"), "group").toLocalIterator())


def _by_cause(ended: DataFrame, output: Folder) -> Table:
    counts = (F.count_if(F.col("outcome") == outcome).alias(outcome) for outcome in OUTCOMES)
    grouped = ended.groupBy("cause").agg(*counts).orderBy("cause")
    return _table(output, "causes", ("cause", *OUTCOMES), grouped.collect())


def _step(seconds: int) -> str:
    return "minute" if seconds <= 60 * _POINTS else "hour" if seconds <= 3_600 * _POINTS else "day"


def _over_time(ended: DataFrame, step: str, output: Folder, objectives: Mapping[str | None, int]) -> Table:
    table = rollup(ended, step, objectives).withColumn(step, F.date_format(step, "yyyy-MM-dd HH:mm"))
    return _table(output, "over_time", tuple(table.columns), table.orderBy(step, "group").toLocalIterator())


def _outcomes(ended: DataFrame, step: str) -> tuple[list[datetime], dict[str, list[int]]]:
    counts = (F.count_if(F.col("outcome") == outcome).alias(outcome) for outcome in OUTCOMES)
    at = F.unix_timestamp(F.date_trunc(step, "ended_at")).alias("at")
    rows = ended.groupBy(at).agg(*counts).orderBy("at").collect()
    times = [datetime.fromtimestamp(row["at"], UTC) for row in rows]
    return times, {outcome: [row[outcome] for row in rows] for outcome in OUTCOMES}


def _latencies(ended: DataFrame, longest: int | None) -> tuple[list[float], dict[str, list[int]]]:
    """Return edges (ms, each by a fixed factor above the previous one) and counts by cause."""
    highest = max(10.0, float(longest or 1))
    edges = [highest ** (number / _BINS) for number in range(_BINS + 1)]
    position = F.floor(F.log(F.greatest(F.col("latency_ms"), F.lit(1))) / F.log(F.lit(highest)) * _BINS)
    counted = ended.groupBy("cause", F.least(position, F.lit(_BINS - 1)).alias("bin")).count().collect()
    counts = {cause: [0] * _BINS for cause in CAUSES}
    for row in counted:
        counts.setdefault(row["cause"], [0] * _BINS)[int(row["bin"])] = int(row["count"])
    return edges, {_LABELS.get(cause, cause): each for cause, each in counts.items()}


def _open_still(pending: DataFrame, output: Folder, facts: dict[str, Any], tables: dict[str, Table]) -> None:
    pending.persist()
    try:
        states = {row["state"]: int(row["count"]) for row in pending.groupBy("state").count().collect()}
        facts["open"] = {"pending": states.get("prepared", 0), "parked": states.get("parked", 0)}
        grouped = pending.groupBy("group", "state").agg(
            F.count(F.lit(1)).alias("transactions"), F.timestamp_millis(F.min("since")).alias("oldest")
        )
        rows = grouped.withColumn("oldest", F.date_format("oldest", _MOMENT)).orderBy("oldest", "group", "state")
        header = ("group", "state", "transactions", "oldest_since")
        tables["pending"] = _table(output, "pending", header, rows.toLocalIterator(), shown=_open)
    finally:
        pending.unpersist()


def _open(row: Any) -> tuple[Any, ...]:
    return row["group"], "pending" if row["state"] == "prepared" else row["state"], row["transactions"], row["oldest"]


def _of_audit(
    spark: SparkSession, folder: Folder, output: Folder, tables: dict[str, Table], wanted: Wanted
) -> dict[str, Any]:
    if not folder.exists(audit.SUMMARY):
        if folder.exists(audit.VERDICTS):
            raise SourceError(
                f"{folder.uri!r} has no {audit.SUMMARY}: its audit was not finished; run halfway-pipeline audit again"
            )
        raise SourceError(f"{folder.uri!r} holds no audit: run halfway-pipeline audit first")
    summary = json.loads(folder.read(audit.SUMMARY))
    if wanted.since_ms is not None or wanted.until_ms is not None:
        judged = spark.read.parquet(folder.path(audit.VERDICTS))
        if "run" in judged.columns:
            last = F.max_by(F.struct("verdict", "ended_at", "prepared_at"), "run").alias("last")
            judged = judged.groupBy("id", "life").agg(last).select("last.*").where("verdict is not null")
        judged = judged.where(wanted.holds("ended_at", "prepared_at"))
        summary |= dict.fromkeys(VERDICTS, 0) | {row[0]: row[1] for row in judged.groupBy("verdict").count().collect()}
    verdicts = [(name, summary.get(name, 0)) for name in (*ANOMALIES, UNPROVED, NOT_JUDGED, *FINE)]
    tables["verdicts"] = _table(output, "verdicts", ("verdict", "transactions"), verdicts)
    strength = F.array_position(F.array(*map(F.lit, ANOMALIES)), F.col("verdict"))
    anomalies = spark.read.parquet(folder.path(audit.ANOMALIES)).where(wanted.holds("ended_at", "prepared_at"))
    header = ("verdict", "id", "group", "topics", "messages_named", "messages_found", "evidence")
    tables["anomalies"] = _table(
        output,
        "anomalies",
        header,
        anomalies.orderBy(strength, "id").toLocalIterator(),
        cells=_anomaly,
        shown=lambda row: _anomaly(row, parts=_SHOWN_PARTS),
    )
    return {
        "anomalies": sum(summary[name] for name in ANOMALIES),
        "transactions": sum(count for _, count in verdicts),
        "quarantined": summary["quarantined"],
        "judged_at": datetime.fromtimestamp(summary["judged_at"] // 1000, UTC).strftime("%Y-%m-%d %H:%M:%S"),
    }


def _anomaly(row: Any, *, parts: int | None = None) -> tuple[Any, ...]:
    problems = [_problem(each, parts) for each in row["evidence"] or ()]
    if row["verdict"] == "contradicted":
        problems.insert(0, "op has more than one outcome")
    evidence = "; ".join(_first(problems, parts))
    topics = ", ".join(_first(row["topics"], parts))
    return row["verdict"], row["id"], row["group"] or "", topics, row["expected"], row["found"], evidence


def _problem(evidence: Any, parts: int | None) -> str:
    places = ", ".join(_first([f"{place['partition']}@{place['offset']}" for place in evidence["places"]], parts))
    message = f"message {evidence['slot']} of " if evidence["slot"] else ""
    where = f" at {places}" if places else ""
    return f"{message}{evidence['topic']} {evidence['problem']}{where}"


def _first(all_of_them: list[str], parts: int | None) -> list[str]:
    if parts is None or len(all_of_them) <= parts:
        return all_of_them
    return [*all_of_them[:parts], f"and {len(all_of_them) - parts:,} more"]


def _page(facts: Mapping[str, Any], figures: Mapping[str, str], tables: Mapping[str, Table]) -> str:
    import jinja2

    source = (files("halfway.pipeline.report") / "report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"number": _number, "duration": plots.duration, "share": "{:.1%}".format}
    return environment.from_string(source).render(facts=facts, figures=figures, tables=tables, anomalies=ANOMALIES)


def _number(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
