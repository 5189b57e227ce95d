"""`audit --continue`: what a run knows of the runs before it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from halfway.pipeline import tables as runs
from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.jobs import audit, incremental
from halfway.pipeline.tables import LocalFolder
from halfway.protocol.records import Message, OpKind
from tests.support.pipeline.archives import rows_in
from tests.support.pipeline.audits import MESSAGES, OPTIONS, committed, continued, counts_in, made_at
from tests.support.pipeline.log_writer import Writer
from tests.support.pipeline.logs import HORIZON, PREFIX, START, Log, LogSource


def test_what_a_run_reads_of_those_before_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten runs the last reads what the fifth reads: of earlier runs what was carried over, and no verdicts."""
    log, folder = Log(), LocalFolder(str(tmp_path))
    writer = Writer(log)
    looked: list[set[str]] = []
    read = runs.Tables.read

    def noted(tables: runs.Tables, name: str) -> Any:
        looked[-1].add(name)
        return read(tables, name)

    monkeypatch.setattr(runs.Tables, "read", noted)
    step = 3_600_000
    for number in range(10):
        at = START + number * step
        for shard in range(3):
            writer.commit(made_at(shard, at), MESSAGES, at + 10, at)
        if number == 0:
            writer.half(made_at(7, at), MESSAGES, at)
        log.settle()
        looked.append(set())
        continued(log, at + 60_000, folder)
    assert looked[-1] == looked[4]
    assert runs.CARRIED in looked[-1]
    assert runs.VERDICTS not in looked[-1]
    assert counts_in(tmp_path) == {"committed_ok": 30, "pending": 1}


def test_an_id_that_was_seen_before_it_was_made_is_judged_with_all_that_was_read_of_it(tmp_path: Path) -> None:
    """Whoever forges an id chooses its time: it is looked for where it was read, not where it should have been."""
    log, folder = Log(), LocalFolder(str(tmp_path))
    writer = Writer(log)
    step = 3_600_000
    forged = made_at(1, START + 3 * step)
    writer.message(forged, MESSAGES[0], "1/1", START, START)
    for number in range(6):
        at = START + number * step
        writer.commit(made_at(0, at), MESSAGES, at + 10, at)
        if number == 5:
            writer.commit(forged, MESSAGES, at + 10, at)
        log.settle()
        continued(log, at + 60_000, folder)
    assert counts_in(tmp_path) == {"committed_ok": 6, "doubled": 1}


def test_what_a_run_knows_of_those_before_does_not_grow_for_ever(tmp_path: Path) -> None:
    """An id that a client brought is looked for in the runs of two weeks; a use after that is a new one."""
    log, folder = Log(), LocalFolder(str(tmp_path))
    writer = Writer(log)
    week = 7 * 24 * 3_600_000
    for number in range(5):
        at = START + number * week
        if number in (0, 4):
            writer.message("weekly", MESSAGES[0], "1/1", at, at)
        writer.commit(made_at(0, at), MESSAGES, at, at)
        log.settle()
        continued(log, at + 60_000, folder)
    engine = DuckEngine()
    state = incremental.State.of(runs.Tables(engine, folder), str(tmp_path))
    engine.close()
    assert [run.number for run in state.runs] == [1, 2, 3, 4]
    assert counts_in(tmp_path) == {"committed_ok": 5, "leaked": 2}
    told = rows_in(tmp_path, runs.ANOMALIES)
    assert sorted((row["run"], row["id"]) for row in told) == [(0, "weekly"), (4, "weekly")]


def test_a_group_that_cannot_be_read_is_told_by_one_run(tmp_path: Path) -> None:
    """Groups are read from the beginning each time. A damaged one is reported once."""
    log, folder = committed(1), LocalFolder(str(tmp_path))
    for number in range(1, 4):
        log.write(PREFIX + "groups", f"g-{number}".encode(), b"damaged", START + number * HORIZON, ())
        log.settle()
        for at in (number * HORIZON, number * HORIZON + 60_000):
            continued(log, START + at, folder)
            assert json.loads((tmp_path / audit.SUMMARY).read_text())["quarantined"] == number


def test_verdicts_without_their_state_are_refused(engine: DuckEngine, tmp_path: Path) -> None:
    """Whichever audit it is, and whether the state is lost or an earlier release has written Parquet."""
    log, folder = committed(2), LocalFolder(str(tmp_path))
    continued(log, START + HORIZON, folder)
    away = (tmp_path / runs.STATE).rename(tmp_path / "away")
    for run in (incremental.run, audit.run):
        with pytest.raises(
            PipelineError, match=r"holds verdicts without their 'state'.*restore the table 'state' from"
        ):
            run(engine, LogSource(engine, log, START + HORIZON), folder, OPTIONS)
    away.rename(tmp_path / runs.STATE)
    continued(log, START + HORIZON, folder)
    assert counts_in(tmp_path) == {"committed_ok": 2}


def test_a_table_that_is_older_than_the_state_is_refused(tmp_path: Path) -> None:
    """A backup of one table was restored: it lacks what the state says that it holds."""
    log, folder = committed(2), LocalFolder(str(tmp_path))
    continued(log, START + HORIZON, folder)
    shutil.copytree(tmp_path / runs.EVENTS, tmp_path / "backup")
    continued(log, START + HORIZON, folder)
    shutil.rmtree(tmp_path / runs.EVENTS)
    (tmp_path / "backup").rename(tmp_path / runs.EVENTS)
    with pytest.raises(PipelineError, match=r"events has version 0, and the state names 1: restore it from the same"):
        continued(log, START + HORIZON, folder)


def test_tables_are_tidied_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files become few, and a run that follows continues."""
    monkeypatch.setattr(runs, "_TIDIED_AFTER", 3)
    log, folder = Log(), LocalFolder(str(tmp_path))
    for number in range(5):
        at = START + number * HORIZON
        Writer(log).commit(f"id-{number}", MESSAGES, at + 10, at)
        log.settle()
        continued(log, at + 60_000, folder)
    assert len(DeltaTable(tmp_path / runs.EVENTS).file_uris()) == 2
    assert counts_in(tmp_path) == {"committed_ok": 5}


def test_a_whole_audit_leaves_the_folder_of_one_that_goes_on_alone(engine: DuckEngine, tmp_path: Path) -> None:
    """It would replace what the runs have said, and the next one would find nothing of it."""
    log, folder = committed(2), LocalFolder(str(tmp_path))
    continued(log, START + HORIZON, folder)
    with pytest.raises(PipelineError, match="is of an audit with --continue: give another folder"):
        audit.run(engine, LogSource(engine, log, START + HORIZON), folder, OPTIONS)
    assert counts_in(tmp_path) == {"committed_ok": 2}


def test_a_topic_that_is_made_again_is_read_from_its_beginning(tmp_path: Path) -> None:
    """Though it is longer by then than it was."""
    log, folder = committed(3), LocalFolder(str(tmp_path))
    continued(log, START + HORIZON, folder)
    log.make_again("orders")
    writer = Writer(log)
    for number in range(5):
        at = START + 2 * HORIZON + number
        writer.commit(f"later-{number}", MESSAGES, at, at)
    log.settle()
    continued(log, START + 4 * HORIZON, folder)
    assert counts_in(tmp_path) == {"committed_ok": 8}


def test_a_topic_that_is_made_late_can_lose_messages(tmp_path: Path) -> None:
    """A run that did not find it yet, or not at that moment, says nothing about those that do."""
    log, folder = committed(1), LocalFolder(str(tmp_path))
    writer = Writer(log)
    mail = [Message(topic="mails", key=b"k", value=b"v")]
    writer.op("before", OpKind.COMMITTED, mail, START, START)
    log.missing = frozenset(["mails"])
    log.settle()
    continued(log, START + 60_000, folder)
    log.missing = frozenset()
    writer.op("after", OpKind.COMMITTED, mail, START + 100_000, START + 100_000)
    log.settle()
    continued(log, START + 200_000, folder)
    assert counts_in(tmp_path) == {"committed_ok": 1, "expired_unknown": 1, "lost": 1}


def test_runs_that_go_on_know_when_the_topics_were_created(engine: DuckEngine, tmp_path: Path) -> None:
    """An older message is of another deployment in each run, even if a later run uses its id."""
    log = Log()
    writer = Writer(log)
    writer.message("both", MESSAGES[0], "1/1", START, START, prefix=None)
    writer.lay_out(START + HORIZON)
    log.settle()
    incremental.run(engine, LogSource(engine, log, START + 2 * HORIZON), LocalFolder(str(tmp_path)), OPTIONS)
    again = START + 3 * HORIZON
    writer.half("both", MESSAGES, again)
    writer.commit("both", MESSAGES, again + 1, again)
    log.settle()
    incremental.run(engine, LogSource(engine, log, again + HORIZON), LocalFolder(str(tmp_path)), OPTIONS)
    assert [row["verdict"] for row in rows_in(tmp_path, runs.VERDICTS)] == ["committed_ok"]
