"""The report: one page that needs nothing else, and the same tables as CSV."""

import csv
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from halfway.pipeline.errors import SourceError
from halfway.pipeline.folders import Folder
from halfway.pipeline.jobs import ledger, report

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

START = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
UGLY = "<script>alert(1)</script>"
ENDED = (
    "id string, `group` string, outcome string, cause string, prepared_at timestamp, ended_at timestamp, "
    "latency_ms bigint, checks int, topics array<string>, messages int, size bigint, shard int, op_offset bigint"
)


def write_ledger(spark: "SparkSession", folder: Path) -> None:
    """Three minutes of two groups, one of which has a name that does not belong into a page."""
    rows = []
    for number in range(90):
        group = UGLY if number % 3 == 0 else "shop"
        outcome, cause = ("committed", "producer") if number % 2 else ("rolled_back", "check")
        ended = START + timedelta(seconds=2 * number)
        rows.append((f"tx-{number}", group, outcome, cause, ended, ended, number * 10, 1, ["orders"], 1, 5, 0, number))
    spark.createDataFrame(rows, ENDED).write.parquet(str(folder / ledger.ENDED / "batch=0"))
    columns = "id string, `group` string, state string, since bigint, shard int, `offset` bigint"
    open_still = [("p-1", "shop", "parked", round(START.timestamp() * 1000), 0, 1)]
    spark.createDataFrame(open_still, columns).write.parquet(str(folder / ledger.PENDING / "batch=0"))


def test_the_page_shows_what_the_ledger_holds_and_needs_nothing_else(spark: "SparkSession", tmp_path: Path) -> None:
    """Plots and tables stand in it; nothing is loaded from elsewhere; names of groups are text, whatever they are."""
    write_ledger(spark, tmp_path / "ledger")
    path = report.run(spark, Folder(spark, str(tmp_path / "ledger")), None, Folder(spark, str(tmp_path / "report")))
    page = Path(path).read_text()
    assert page.count("<svg") == 4
    assert "<b>90</b>ended" in page
    assert "<b>45</b>committed" in page
    assert "parked" in page
    assert UGLY not in page
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!#)""", page) == []
    assert "<script" not in page
    assert "@import" not in page


def test_tables_stand_beside_the_page_as_csv(spark: "SparkSession", tmp_path: Path) -> None:
    """Each minute and group has its row, each group its percentiles."""
    write_ledger(spark, tmp_path / "ledger")
    report.run(spark, Folder(spark, str(tmp_path / "ledger")), None, Folder(spark, str(tmp_path / "report")))
    with (tmp_path / "report" / "minutes.csv").open() as file:
        minutes = list(csv.DictReader(file))
    assert {(row["minute"], row["group"]) for row in minutes} == {
        (f"2026-01-02 03:0{minute}", group) for minute in (4, 5, 6) for group in ("shop", UGLY)
    }
    assert sum(int(row["transactions"]) for row in minutes) == 90
    with (tmp_path / "report" / "groups.csv").open() as file:
        groups = {row["group"]: row for row in csv.DictReader(file)}
    assert groups["shop"]["transactions"] == "60"
    assert float(groups[UGLY]["p50_ms"]) == 435.0


def test_without_a_ledger_the_remedy_is_told(spark: "SparkSession", tmp_path: Path) -> None:
    """An empty folder is no empty ledger."""
    with pytest.raises(SourceError, match="run halfway-pipeline ledger first"):
        report.run(spark, Folder(spark, str(tmp_path)), None, Folder(spark, str(tmp_path / "report")))
