"""The job `report`: one HTML page with everything in it, and CSV files, from the tables of `ledger` and `audit`."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F

from halfway.pipeline import plots
from halfway.pipeline.errors import SourceError
from halfway.pipeline.jobs import audit, ledger
from halfway.pipeline.transforms.rollup import CAUSES, OUTCOMES, rollup
from halfway.pipeline.transforms.verdict import ANOMALIES, FINE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

    from halfway.pipeline.folders import Folder

PAGE: Final = "report.html"
_SHOWN_ANOMALIES: Final = 500
_SHOWN_GROUPS: Final = 20
_SHOWN_PENDING: Final = 50
_BINS: Final = 40
_MINUTES: Final = 1_440
"""Points of the plot by minute; a longer time is told by the hour or by the day."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows as they are shown and as they stand in a CSV file."""

    name: str
    header: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def csv(self) -> str:
        """Return it as CSV."""
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow(self.header)
        writer.writerows(self.rows)
        return out.getvalue()


def run(spark: SparkSession, ledger_folder: Folder | None, audit_folder: Folder | None, output: Folder) -> str:
    """Write `report.html` and the CSV files beside it, and return the page's path; either folder may be None."""
    tables: list[Table] = []
    figures: dict[str, str] = {}
    facts: dict[str, Any] = {"made_at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")}
    if ledger_folder is not None:
        ended = ledger.ended(spark, ledger_folder)
        if ended is None:
            raise SourceError(f"{ledger_folder.uri!r} holds no ledger: run halfway-pipeline ledger first")
        ended.persist()
        try:
            facts |= _of_ledger(ended, tables, figures)
        finally:
            ended.unpersist()
        _open_still(ledger.pending(spark, ledger_folder), tables)
    if audit_folder is not None:
        if not audit_folder.exists(audit.VERDICTS):
            raise SourceError(f"{audit_folder.uri!r} holds no audit: run halfway-pipeline audit first")
        facts |= _of_audit(spark, audit_folder, tables)
    for table in tables:
        output.write(table.csv(), f"{table.name}.csv")
    output.write(_page(facts, figures, {table.name: table for table in tables}), PAGE)
    return output.path(PAGE)


def _of_ledger(ended: DataFrame, tables: list[Table], figures: dict[str, str]) -> dict[str, Any]:
    quantiles = [F.percentile("latency_ms", F.lit(share)).alias(f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)]
    whole = ended.agg(
        F.count(F.lit(1)).alias("count"),
        F.min("ended_at").alias("since"),
        F.max("ended_at").alias("until"),
        F.avg("checks").alias("checks_each"),
        *(F.count_if(F.col("outcome") == outcome).alias(outcome) for outcome in OUTCOMES),
        *quantiles,
    ).first()
    assert whole is not None  # noqa: S101 - an aggregate over everything has one row
    facts: dict[str, Any] = {"ledger": whole.asDict()}
    if not whole["count"]:
        return facts
    tables += [_by_group(ended), _by_cause(ended), _by_minute(ended)]
    figures["time to end"] = plots.histogram(*_latencies(ended), [whole["p50"], whole["p95"], whole["p99"]])
    figures["outcomes over time"] = plots.stacked(*_over_time(ended, (whole["until"] - whole["since"]).total_seconds()))
    by_cause = {row[0]: row[1:] for row in tables[-2].rows}
    figures["resolved by"] = plots.bars({cause: by_cause.get(cause, (0, 0)) for cause in CAUSES}, OUTCOMES)
    worst = tables[-3].rows[:10]
    figures["worst groups"] = plots.lines({row[0]: (row[4], row[6]) for row in worst}, ("p50", "p99"))
    return facts


def _by_group(ended: DataFrame) -> Table:
    """Worst first: those with the longest p99."""
    grouped = ended.groupBy("group").agg(
        F.count(F.lit(1)).alias("transactions"),
        *(F.count_if(F.col("outcome") == outcome).alias(outcome) for outcome in OUTCOMES),
        *(F.percentile("latency_ms", F.lit(share)).alias(f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)),
        F.round(F.avg("checks"), 3).alias("checks_each"),
        F.round(F.count_if(F.col("cause") == "check") / F.count(F.lit(1)), 4).alias("share_by_check"),
    )
    header = ("group", "transactions", *OUTCOMES, "p50_ms", "p95_ms", "p99_ms", "checks_each", "share_by_check")
    return Table(name="groups", header=header, rows=_rows(grouped.orderBy(F.desc("p99"), "group")))


def _by_cause(ended: DataFrame) -> Table:
    counts = (F.count_if(F.col("outcome") == outcome).alias(outcome) for outcome in OUTCOMES)
    return Table(
        name="causes",
        header=("cause", *OUTCOMES),
        rows=_rows(ended.groupBy("cause").agg(*counts).orderBy("cause")),
    )


def _by_minute(ended: DataFrame) -> Table:
    table = rollup(ended).withColumn("minute", F.date_format("minute", "yyyy-MM-dd HH:mm"))
    return Table(name="minutes", header=tuple(table.columns), rows=_rows(table.orderBy("minute", "group")))


def _latencies(ended: DataFrame) -> tuple[list[float], list[int]]:
    """Return edges (ms, each a fixed factor above the one before) and counts."""
    most = ended.agg(F.max("latency_ms")).first()
    highest = max(10.0, float(most[0] if most is not None and most[0] is not None else 1))
    edges = [highest ** (number / _BINS) for number in range(_BINS + 1)]
    position = F.floor(F.log(F.greatest(F.col("latency_ms"), F.lit(1))) / F.log(F.lit(highest)) * _BINS)
    counted = ended.groupBy(F.least(position, F.lit(_BINS - 1)).alias("bin")).count().collect()
    counts = [0] * _BINS
    for row in counted:
        counts[int(row["bin"])] = int(row["count"])
    return edges, counts


def _over_time(ended: DataFrame, seconds: float) -> tuple[list[datetime], dict[str, list[int]], str]:
    step = "minute" if seconds <= 60 * _MINUTES else "hour" if seconds <= 3_600 * _MINUTES else "day"
    counts = (F.count_if(F.col("outcome") == outcome).alias(outcome) for outcome in OUTCOMES)
    rows = ended.groupBy(F.date_trunc(step, "ended_at").alias("at")).agg(*counts).orderBy("at").collect()
    return [row["at"] for row in rows], {outcome: [row[outcome] for row in rows] for outcome in OUTCOMES}, step


def _open_still(pending: DataFrame | None, tables: list[Table]) -> None:
    if pending is None:
        return
    grouped = pending.groupBy("group", "state").agg(
        F.count(F.lit(1)).alias("transactions"), F.timestamp_millis(F.min("since")).alias("oldest")
    )
    shown = grouped.withColumn("oldest", F.date_format("oldest", "yyyy-MM-dd HH:mm:ss"))
    rows = _rows(shown.orderBy("oldest").limit(_SHOWN_PENDING))
    tables.append(Table(name="pending", header=("group", "state", "transactions", "oldest_since"), rows=rows))


def _of_audit(spark: SparkSession, folder: Folder, tables: list[Table]) -> dict[str, Any]:
    counts = {
        row["verdict"]: int(row["count"])
        for row in spark.read.parquet(folder.path(audit.VERDICTS)).groupBy("verdict").count().collect()
    }
    verdicts = [(name, counts.get(name, 0)) for name in (*FINE, *ANOMALIES)]
    tables.append(Table(name="verdicts", header=("verdict", "transactions"), rows=list(verdicts)))
    anomalies = spark.read.parquet(folder.path(audit.ANOMALIES)).orderBy("verdict", "id")
    found = sum(counts.get(name, 0) for name in ANOMALIES)
    rows = [
        (
            row["verdict"],
            row["id"],
            row["group"] or "",
            ", ".join(row["topics"]),
            row["expected"],
            row["found"],
            "; ".join(_told(each) for each in row["evidence"] or ()),
        )
        for row in anomalies.limit(_SHOWN_ANOMALIES).collect()
    ]
    header = ("verdict", "id", "group", "topics", "messages named", "messages found", "evidence")
    tables.append(Table(name="anomalies", header=header, rows=rows))
    return {"anomalies": found, "anomalies_shown": len(rows)}


def _told(evidence: Any) -> str:
    places = ", ".join(f"{place['partition']}@{place['offset']}" for place in evidence["places"])
    message = f"message {evidence['slot']} of " if evidence["slot"] else ""
    where = f" at {places}" if places else ""
    return f"{message}{evidence['topic']} {evidence['problem']}{where}"


def _rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in frame.collect()]


def _page(facts: Mapping[str, Any], figures: Mapping[str, str], tables: Mapping[str, Table]) -> str:
    import jinja2

    source = (files("halfway.pipeline") / "report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["number"] = _number
    return environment.from_string(source).render(
        facts=facts, figures=figures, tables=tables, shown_groups=_SHOWN_GROUPS, anomalies=ANOMALIES
    )


def _number(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
