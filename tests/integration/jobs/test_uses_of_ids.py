"""Uses of an id that a client brings keep their numbers, and what is known of them."""

from pathlib import Path
from typing import Any

import pytest

from halfway.pipeline import tables as runs
from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.jobs import audit, incremental
from halfway.pipeline.tables import LocalFolder
from halfway.protocol.records import OpKind
from tests.support.pipeline.archives import rows_in
from tests.support.pipeline.audits import MESSAGES, OPTIONS, continued, counts_in, found_in, last_in
from tests.support.pipeline.log_writer import Writer
from tests.support.pipeline.logs import HORIZON, PREFIX, START, Log, LogSource

DAY = 24 * 3_600_000


def test_an_id_that_is_used_daily_keeps_the_numbers_of_its_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the first uses are forgotten by then: each leak is reported, none twice, and all are counted."""
    log, folder = Log(), runs.LocalFolder(str(tmp_path))
    writer = Writer(log)
    monkeypatch.setattr(incremental, "KEPT_MS", 3 * DAY)
    days = 9
    for day in range(days):
        at = START + day * DAY
        writer.half("daily", MESSAGES, at)
        if day % 3 != 1:
            writer.commit("daily", MESSAGES, at + 10, at)
        else:
            writer.message("daily", MESSAGES[0], "1/1", at, at)
            writer.roll_back("daily", at + 10, at)
        log.settle()
        continued(log, at + 60_000, folder)
    wanted = {("daily", day): "leaked" if day % 3 == 1 else "committed_ok" for day in range(days)}
    assert last_in(tmp_path) == wanted
    assert counts_in(tmp_path) == {"committed_ok": 6, "leaked": 3}
    told = rows_in(tmp_path, runs.ANOMALIES)
    assert sorted((row["run"], row["life"]) for row in told) == [(day, day) for day in range(1, days, 3)]


def test_a_message_that_an_earlier_run_has_read_is_not_lost_when_that_run_is_forgotten(tmp_path: Path) -> None:
    """One run reads the message, the next one its op; two weeks later the first of them is forgotten, and the id used.

    So it is with a loss that was proved when it was found: it is counted, although nothing of it can be proved now.
    """
    log, folder = Log(), runs.LocalFolder(str(tmp_path))
    writer = Writer(log)
    writer.commit("other", MESSAGES, START, START)
    writer.message("mine", MESSAGES[0], "1/1", START, START)
    log.settle()
    continued(log, START + 1, folder)
    writer.op("mine", OpKind.COMMITTED, MESSAGES, START + 2, START)
    writer.op("lost", OpKind.COMMITTED, MESSAGES, START + 2, START)
    log.settle()
    for at in (START + 600_000, START + 14 * DAY + 300_000):
        continued(log, at, folder)
    again = START + 14 * DAY + 400_000
    log.trim("orders", 2)
    for name in ("mine", "lost"):
        writer.commit(name, MESSAGES, again, again)
    log.settle()
    continued(log, again + 60_000, folder)
    assert counts_in(tmp_path) == {"committed_ok": 4, "lost": 1}


def test_an_id_that_is_open_keeps_the_numbers_of_its_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is open is carried from run to run, after the first uses have been forgotten too."""
    log, folder = Log(), runs.LocalFolder(str(tmp_path))
    writer = Writer(log)
    monkeypatch.setattr(incremental, "KEPT_MS", 3 * DAY)
    days = [0, 2, 4, 5, 6]
    for day in days:
        at = START + day * DAY
        writer.half("mine", MESSAGES, at)
        if day == 5:
            log.settle()
            continued(log, at + 60_000, folder)
        writer.commit("mine", MESSAGES, at + 120_000, at)
        log.settle()
        continued(log, at + 180_000, folder)
    assert last_in(tmp_path) == {("mine", use): "committed_ok" for use in range(len(days))}
    assert counts_in(tmp_path) == {"committed_ok": len(days)}


def test_an_earlier_use_is_not_open_once_a_later_one_is_known(tmp_path: Path) -> None:
    """Kafka has removed its tombstone and its outcome between two runs, which nobody has read."""
    log = Log(compacted=frozenset(PREFIX + kind for kind in ("half", "op", "parked")))
    writer, folder, again = Writer(log), LocalFolder(str(tmp_path)), START + DAY
    for name in ("pending", "parked"):
        writer.half(name, MESSAGES, START)
    writer.park("parked", MESSAGES, START + 10, START)
    log.settle()
    continued(log, START + 60_000, folder)
    assert counts_in(tmp_path) == {"pending": 1, "parked": 1}
    writer.write_tombstone("parked", "parked", START + 100_000, "prepared")
    for name in ("pending", "parked"):
        writer.commit(name, MESSAGES, START + 120_000, START)
        writer.half(name, MESSAGES, again)
        writer.commit(name, MESSAGES, again + 10, again)
    log.settle()
    for topic in log.compacted:
        log.compact(topic, again + HORIZON)
    continued(log, again + HORIZON, folder)
    assert counts_in(tmp_path) == {"expired_unknown": 2, "committed_ok": 2}


def test_a_forged_message_between_two_uses_does_not_join_them(tmp_path: Path) -> None:
    """Anyone can date a message, so halfway's own records distinguish uses."""
    log, engine = Log(), DuckEngine()
    writer = Writer(log)
    again = START + HORIZON + 60_000
    for at in (START, again):
        writer.half("mine", MESSAGES, at)
        writer.commit("mine", MESSAGES, at + 10, at)
    for dated in (START + HORIZON // 2, START + HORIZON - 60_000):
        writer.message("mine", MESSAGES[0], "1/1", again + 1_000, dated)
    log.settle()
    audit.run(engine, LogSource(engine, log, again + HORIZON), runs.LocalFolder(str(tmp_path)), OPTIONS)
    engine.close()
    assert found_in(tmp_path) == {("mine", 0): "doubled", ("mine", 1): "committed_ok"}


def test_a_run_beside_another_one_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs at once would both report what is new, and one would replace what the other has left."""
    log, folder = Log(), runs.LocalFolder(str(tmp_path))
    writer = Writer(log)
    writer.op("mine", OpKind.ROLLED_BACK, (), START, START)
    log.settle()
    evidence = audit.evidence

    def beside(*parts: Any, **options: Any) -> Any:
        monkeypatch.setattr(audit, "evidence", evidence)
        continued(log, START + HORIZON, folder)
        return evidence(*parts, **options)

    monkeypatch.setattr(audit, "evidence", beside)
    with pytest.raises(PipelineError, match=r"another audit has written into .* at the same time: run one at a time"):
        continued(log, START + HORIZON, folder)
    assert counts_in(tmp_path) == {"rolled_back_ok": 1}


def test_what_another_release_has_left_is_not_continued(tmp_path: Path) -> None:
    """Its tables can lack what this one reads."""
    engine = DuckEngine()
    tables = runs.Tables(engine, runs.LocalFolder(str(tmp_path)))
    tables.begin()
    tables.end({"format": 3, "runs": []}, at=START)
    engine.close()
    with pytest.raises(PipelineError, match="was written by another release of audit --continue: begin in another"):
        continued(Log(), START, runs.LocalFolder(str(tmp_path)))
