"""Verdicts in a job or a notebook of a user's own: DataFrames in, DataFrames out."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from halfway.pipeline.engines.decoding import LIMITS
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.jobs.judge import Judged, judge
from tests.support.pipeline.archives import AT, HISTORY, PREFIX, verdicts_of, write_archive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOTEBOOK = Path(__file__).parents[3] / "examples" / "audit" / "judge.ipynb"


def test_the_notebook_judges_an_archive(
    spark: "SparkSession", monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Cell after cell, on a real Spark: the rows of an audit, in the reader's own session, whose settings stay."""
    history = {**HISTORY, "doubled": []}
    write_archive(tmp_path / "archive", **history)
    monkeypatch.setenv("ARCHIVE", str(tmp_path / "archive"))
    before = spark.conf.getAll
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)  # noqa: S102 - the project's own notebook
    judged: Judged = names["judged"]
    assert judged.verdicts.sparkSession is names["spark"]
    rows = [row.asDict(recursive=True) for row in judged.verdicts.orderBy("id").collect()]
    wanted = verdicts_of(**history)
    kept = ("id", "life", "verdict", "group", "topics", "expected", "found", "evidence")
    assert [{name: row[name] for name in kept} for row in rows] == [
        {name: row[name] for name in kept} for row in wanted
    ]
    assert {row["id"] for row in judged.anomalies.collect()} == {*history["lost"]}
    assert judged.quarantine.isEmpty()
    assert spark.conf.getAll == before
    assert "gone-1" in capsys.readouterr().out


def test_what_lies_before_the_records_proves_nothing(spark: "SparkSession", tmp_path: Path) -> None:
    """Messages behind the first record that is given may have been there: none of them is called lost."""
    write_archive(tmp_path / "archive", **HISTORY)
    records = spark.read.parquet(str(tmp_path / "archive" / "committed"))
    part = records.where(f"topic like '{PREFIX}%' or offset >= 100")
    found = judge(part, at_ms=AT + 60_000).verdicts.groupBy("verdict").count().collect()
    assert {row["verdict"]: row["count"] for row in found} == {"committed_ok": 100, "unproved": 102, "doubled": 1}


def test_nothing_of_the_callers_jvm_is_changed(spark: "SparkSession", tmp_path: Path) -> None:
    """A job of halfway bounds what Avro allocates, for all that decodes in its JVM. This one is somebody else's."""
    write_archive(tmp_path / "archive", **HISTORY)
    jvm: Any = spark._jvm
    system = jvm.java.lang.System
    before = {name: system.getProperty(name) for name in LIMITS}
    for name in LIMITS:
        system.clearProperty(name)
    try:
        judge(spark.read.parquet(str(tmp_path / "archive" / "committed")), at_ms=AT + 60_000)
        assert {system.getProperty(name) for name in LIMITS} == {None}
    finally:
        for name, value in before.items():
            system.setProperty(name, value)


def test_records_without_headers_are_refused(spark: "SparkSession") -> None:
    """Without them no message is anybody's."""
    with pytest.raises(PipelineError, match="no column headers: read them with includeHeaders=true"):
        judge(
            spark.createDataFrame(
                [], "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp"
            )
        )
