"""A whole audit beside one with --continue: they agree, and differences are reported."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from deltalake import DeltaTable

from halfway.pipeline import cli
from halfway.pipeline import tables as runs
from halfway.pipeline.cli import say
from halfway.pipeline.commands.alerts import rule, status
from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.engines.engine import SparkEngine
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.jobs import audit, incremental
from halfway.pipeline.jobs.audit import Summary
from halfway.pipeline.tables import Folder, LocalFolder
from halfway.protocol.records import Message
from tests.integration.jobs.test_random_logs import each_seed, seeds
from tests.support.pipeline.audits import OPTIONS, continued, cuts_of
from tests.support.pipeline.log_writer import Writer
from tests.support.pipeline.logs import HORIZON, PREFIX, START, LogSource
from tests.support.pipeline.random_logs import RandomLog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def compared(made: RandomLog, folder: Path, at: int) -> Summary:
    """Compare as of a time with the runs into `continued`."""
    engine = DuckEngine()
    whole, other = LocalFolder(str(folder / "whole")), LocalFolder(str(folder / "continued"))
    try:
        return incremental.compare(engine, LogSource(engine, made.log, at), whole, other, OPTIONS)
    finally:
        engine.close()


def windows(seed: int, folder: Path) -> tuple[RandomLog, int]:
    """Audit a random log in windows."""
    made = RandomLog(*seeds(seed), count=45)
    cuts = cuts_of(made, seed)
    for at in cuts:
        continued(made.log, at, LocalFolder(str(folder / "continued")))
    return made, cuts[-1]


@pytest.mark.parametrize("removed", ["nothing", "by age", "by compaction"])
@each_seed
def test_windows_and_whole_agree(tmp_path: Path, seed: int, removed: str) -> None:
    """On every log, with records since the last run, and with any records removed."""
    made, at = windows(seed, tmp_path)
    if removed == "by age":
        made.age(made.end)
    elif removed == "by compaction":
        made.compact()
    summary = compared(made, tmp_path, at + 600_000)
    assert summary.differences == 0, (f"seed {seed}", summary.differing)


@each_seed
def test_only_what_the_runs_have_read_is_compared(tmp_path: Path, seed: int) -> None:
    """The runs have stopped in the middle of the log, and found Kafka transactions that were not finished.

    Each of halfway's topics is compacted by itself since, or is not.
    """
    made = RandomLog(*seeds(seed), count=45)
    folder = LocalFolder(str(tmp_path / "continued"))
    at = cuts_of(made, seed)[0]
    engine = DuckEngine()
    source = LogSource(engine, made.log, at, open_since=at - 600_000)
    incremental.run(engine, source, folder, OPTIONS)
    engine.close()
    chance = random.Random(seed)
    for kind in chance.sample(("half", "op", "parked"), chance.randrange(4)):
        made.log.compact(PREFIX + kind, at + 600_000)
    summary = compared(made, tmp_path, at + 600_000)
    assert summary.differences == 0, (f"seed {seed}", summary.differing)


def test_what_was_resumed_and_compacted_since_is_no_difference(tmp_path: Path) -> None:
    """Of a parked transaction nothing is left then but the tombstone of its half."""
    made = RandomLog(1, count=1)
    writer, messages, at = Writer(made.log), [Message(topic="orders", key=None, value=b"v")], made.end + HORIZON
    writer.half("resumed", messages, at - HORIZON)
    writer.park("resumed", messages, at - 60_000, at - HORIZON)
    made.log.settle()
    continued(made.log, at, LocalFolder(str(tmp_path / "continued")))
    writer.half("resumed", messages, at + 60_000, prepared_at=at - HORIZON)
    writer.write_tombstone("parked", "resumed", at + 60_000, "prepared")
    made.log.settle()
    made.log.compact(PREFIX + "parked", at + 120_000)
    summary = compared(made, tmp_path, at + 600_000)
    assert summary.verdicts["lost"] == 1, "as of then it cannot be told"
    assert summary.differences == 0, summary.differing


def change(table: Path, old: str, new: str | None) -> str:
    """Write another verdict in place of the first row with one, or leave that row out; give its id."""
    there = DeltaTable(table)
    changed = next(row for row in there.to_pyarrow_table().to_pylist() if row["verdict"] == old)
    which = f"id = '{changed['id']}' and life = {changed['life']} and verdict = '{old}'"
    if new is None:
        there.delete(which)
    else:
        there.update(new_values={"verdict": new}, predicate=which)
    # The state names the versions that count.
    state = DeltaTable(table.parent / runs.STATE)
    [row] = state.to_pyarrow_table().to_pylist()
    row["versions"] = json.dumps({**json.loads(row["versions"]), table.name: there.version()})
    state.update(new_values={"versions": row["versions"]})
    return str(changed["id"])


def test_differences_are_told_and_have_the_exit_status_of_an_anomaly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing anomaly, and one that only the runs find: in the table, the summary and the exit status."""
    made, at = windows(1, tmp_path)
    there = tmp_path / "continued"
    forgotten = change(there / runs.ANOMALIES, "torn", None)
    unseen = change(there / runs.VERDICTS, "lost", "committed_ok")
    invented = change(there / runs.VERDICTS, "rolled_back_ok", "leaked")
    summary = compared(made, tmp_path, at)
    found = {(row["id"], row["whole"], row["continued"]) for row in summary.differing}
    assert found == {
        (forgotten, "torn", "torn"),
        (unseen, "lost", "committed_ok"),
        (unseen, None, "lost"),
        (invented, "rolled_back_ok", "leaked"),
    }
    assert summary.differences == len(found)
    assert json.loads((tmp_path / "whole" / audit.SUMMARY).read_text())["differences"] == len(found)
    assert status([rule("leaked=1000")], summary) == 1
    say(summary, "whole")
    printed = capsys.readouterr().out
    assert "4 differences from the audit with --continue: whole/differences" in printed
    assert [invented, "0", "rolled_back_ok", "leaked"] in [line.split() for line in printed.splitlines()]


def test_spark_finds_the_same_differences(spark: "SparkSession", tmp_path: Path) -> None:
    made, at = windows(1, tmp_path)
    invented = change(tmp_path / "continued" / runs.VERDICTS, "rolled_back_ok", "leaked")
    engine = SparkEngine(spark)
    whole, other = Folder(spark, str(tmp_path / "whole")), Folder(spark, str(tmp_path / "continued"))
    summary = incremental.compare(engine, LogSource(engine, made.log, at), whole, other, OPTIONS)
    engine.close()
    assert [(row["id"], row["continued"]) for row in summary.differing] == [(invented, "leaked")]


def test_a_folder_without_a_run_is_named_with_what_to_do(tmp_path: Path) -> None:
    """It is missing, too old, or the folder of the output."""
    made = RandomLog(1, count=1)
    with pytest.raises(PipelineError, match=r"--cross-check '.*continued' has no run of --continue: let one run"):
        compared(made, tmp_path, made.end)
    continued(made.log, START, LocalFolder(str(tmp_path / "continued")))
    with pytest.raises(PipelineError, match=r"--cross-check '.*continued': the last run .* ago: let one run first"):
        compared(made, tmp_path, START + 7_200_000)
    engine = DuckEngine()
    same = LocalFolder(str(tmp_path))
    with pytest.raises(PipelineError, match="is the folder of --output"):
        incremental.compare(engine, LogSource(engine, made.log, START), same, same, OPTIONS)
    engine.close()


def test_rules_that_the_runs_did_not_have_are_refused(tmp_path: Path) -> None:
    """By name: another horizon or grace gives other verdicts."""
    made, at = windows(1, tmp_path)
    engine = DuckEngine()
    whole, other = LocalFolder(str(tmp_path / "whole")), LocalFolder(str(tmp_path / "continued"))
    options = replace(OPTIONS, grace_ms=7_000)
    with pytest.raises(PipelineError, match=r"continued': the last run had --grace-s 5: give the same"):
        incremental.compare(engine, LogSource(engine, made.log, at), whole, other, options)
    engine.close()


def test_a_topic_that_only_a_run_was_told_of_is_read(tmp_path: Path) -> None:
    """Neither ops nor groups name it: --topic need not be given again."""
    made = RandomLog(1, count=1)
    Writer(made.log).message("rogue", Message(topic="rogue", key=None, value=b"v"), "1/1", START + 1, START + 1)
    made.log.settle()
    at = made.end + 60_000
    engine = DuckEngine()
    told = replace(OPTIONS, topics=["rogue"])
    incremental.run(engine, LogSource(engine, made.log, at), LocalFolder(str(tmp_path / "continued")), told)
    engine.close()
    summary = compared(made, tmp_path, at)
    assert (summary.differences, summary.verdicts["leaked"]) == (0, 1)


@pytest.mark.parametrize("other", ["--continue", "--since=2026-01-31", "--snapshot=archive", "--offsets=offsets.json"])
def test_no_other_bounds_are_taken_beside_it(other: str) -> None:
    told = ["audit", "--output", "whole", "--cross-check", "continued", other]
    refused = CliRunner().invoke(cli.pipeline, told)
    assert refused.exit_code == 2, refused.output
    assert "--cross-check reads what the runs of" in refused.output
