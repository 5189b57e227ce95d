"""Random logs, whose verdicts are known by construction, judged whole and in windows."""

import json
import os
import random
import runpy
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pyarrow.dataset as ds
import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from halfway.domain.records import Message, MessageDigest, Op, OpKind
from halfway.domain.transaction import Cause
from halfway.kafka.records import codec
from halfway.pipeline import cli
from halfway.pipeline.engines import SparkEngine
from halfway.pipeline.errors import SourceError
from halfway.pipeline.folders import Folder, LocalFolder
from halfway.pipeline.jobs import audit, incremental
from halfway.pipeline.jobs.audit import AuditOptions
from halfway.pipeline.quick import DuckEngine
from halfway.pipeline.transforms.verdict import ANOMALIES, VERDICTS
from tests.support.pipeline.archives import verdicts_in, write_records
from tests.support.pipeline.logs import (
    HORIZON,
    PREFIX,
    SLACK,
    START,
    Expected,
    Log,
    LogSource,
    RandomLog,
    Writer,
    Written,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEEDS = int(os.environ.get("HISTORIES", "3"))
FIRST = int(os.environ.get("FIRST_SEED", "1"))
OPTIONS = AuditOptions(horizon_ms=HORIZON, skew_ms=SLACK)
EXAMPLES = Path(__file__).parents[4] / "examples" / "audit"
MESSAGES = [Message(topic="orders", key=b"k", value=b"v")]


@pytest.fixture
def engine() -> Iterator[DuckEngine]:
    made = DuckEngine()
    yield made
    made.close()


def found_in(folder: Path) -> Expected:
    return {(row["id"], row["life"]): row["verdict"] for row in verdicts_in(folder)}


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS), ids="seed-{}".format)
def test_a_log_gets_the_verdicts_that_it_was_made_for(engine: DuckEngine, tmp_path: Path, seed: int) -> None:
    """Compaction, re-anchor, resume, reuse, other prefixes, forged and unreadable records, and every anomaly."""
    made = RandomLog(seed)
    if seed % 2 == 0:
        made.compact()
    audit.run(engine, LogSource(engine, made.log, made.end + 60_000), LocalFolder(str(tmp_path)), OPTIONS)
    assert found_in(tmp_path) == made.expected, f"seed {seed}"


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS), ids="seed-{}".format)
def test_windows_give_the_verdicts_of_the_whole(tmp_path: Path, seed: int) -> None:
    """However a log is cut into windows, each transaction gets the same verdict, and each anomaly is told once.

    A run that is killed before it counts leaves nothing behind.
    """
    made = RandomLog(seed, count=30)
    cuts = cuts_of(made, seed)
    folder = LocalFolder(str(tmp_path))
    for number, at in enumerate(cuts):
        engine = DuckEngine()
        if number == 1:
            killed = tmp_path / audit.VERDICTS / "run=1"
            killed.mkdir()
            (killed / "part-0.parquet").write_bytes(b"half written")
        # Some runs find Kafka transactions that are not finished.
        open_since = at - seed % 3 * 600_000 if at < made.end else None
        incremental.run(engine, LogSource(engine, made.log, at, open_since=open_since), folder, OPTIONS)
        engine.close()
    demand_whole(tmp_path, made, f"seed {seed}, windows up to {cuts}")


@pytest.mark.parametrize("windows", [True, False], ids=["windows", "whole"])
@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS), ids="seed-{}".format)
def test_retention_makes_no_anomaly(tmp_path: Path, seed: int, *, windows: bool) -> None:
    """Whatever goes between two runs; and what stands behind that has the verdict that it was made for."""
    made = RandomLog(seed, count=30)
    oldest = START
    cuts = cuts_of(made, seed)
    for at, following in pairwise(cuts):
        if windows:
            continued(made.log, at, LocalFolder(str(tmp_path)))
        oldest = max(oldest, made.age(following))
    continued(made.log, cuts[-1], LocalFolder(str(tmp_path)))
    found = last_in(tmp_path)
    wrong = {name for (name, _), verdict in found.items() if verdict in ANOMALIES}
    assert wrong <= {name for (name, _), verdict in made.expected.items() if verdict in ANOMALIES}, f"seed {seed}"
    written = {name for record in made.log.records if record.at <= oldest + SLACK for name in ids_of(record)}
    whole = {key: verdict for key, verdict in made.expected.items() if key[0] not in written}
    assert whole.items() <= found.items(), f"seed {seed}"


def ids_of(record: Written) -> set[Any]:
    """Give the ids that a record tells of."""
    return {
        (record.key or b"").decode(),
        *(value for name, value in record.headers if name == "halfway-transaction-id"),
    }


def test_what_a_run_reads_of_those_before_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten runs the last reads no more folders of earlier ones than the fifth, and finds what one run finds."""
    log, folder = Log(), LocalFolder(str(tmp_path))
    writer = Writer(log)
    looked: list[set[str]] = []
    written = DuckEngine._written

    def noted(engine: DuckEngine, folders: Sequence[str], *, with_run: bool) -> Any:
        looked[-1] |= {part for part in folders if not part.endswith(f"run={len(looked) - 1}")}
        return written(engine, folders, with_run=with_run)

    monkeypatch.setattr(DuckEngine, "_written", noted)
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
    assert len(looked[-1]) == len(looked[4]) > 0
    assert {part.rpartition("run=")[2] for part in looked[-1]} == {"8"}
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


def continued(log: Log, at: int, folder: LocalFolder) -> None:
    """Let `audit --continue` read a log up to a time."""
    engine = DuckEngine()
    incremental.run(engine, LogSource(engine, log, at), folder, OPTIONS)
    engine.close()


def counts_in(folder: Path) -> dict[str, int]:
    """Give the verdicts that there are, of all runs."""
    summary = json.loads((folder / audit.SUMMARY).read_text())
    return {name: count for name, count in summary.items() if name in VERDICTS and count}


def made_at(shard: int, at: int) -> str:
    """Give an id as halfway makes it."""
    digits = f"{at:012x}"
    return f"{shard}-{digits[:8]}-{digits[8:]}-7000-8000-{shard:012x}"


@pytest.mark.parametrize("seed", range(FIRST, FIRST + max(1, SEEDS // 50)), ids="seed-{}".format)
def test_spark_goes_on_where_duckdb_stopped(spark: "SparkSession", tmp_path: Path, seed: int) -> None:
    """A folder is not bound to an engine: a log may grow beyond one machine."""
    made = RandomLog(seed, count=30)
    times = sorted(record.at for record in made.log.records)
    continued(made.log, times[len(times) // 2], LocalFolder(str(tmp_path)))
    engine = SparkEngine(spark)
    incremental.run(engine, LogSource(engine, made.log, made.end + 60_000), Folder(spark, str(tmp_path)), OPTIONS)
    engine.close()
    demand_whole(tmp_path, made, f"seed {seed}")


def cuts_of(made: RandomLog, seed: int) -> list[int]:
    """Give the times up to which the runs read; the last one reads everything."""
    chance = random.Random(seed)
    cuts = sorted(chance.choice(made.log.records).at for _ in range(chance.randrange(1, 4)))
    return [*(min(cut, made.end) for cut in cuts), made.end + 60_000]


def last_in(folder: Path) -> Expected:
    """Give the verdicts of the last run that has one for each use of an id."""
    rows = ds.dataset(folder / audit.VERDICTS, partitioning="hive").to_table().to_pylist()
    last = {(row["id"], row["life"]): row["verdict"] for row in sorted(rows, key=lambda row: row["run"])}
    return {key: verdict for key, verdict in last.items() if verdict is not None}


def demand_whole(folder: Path, made: RandomLog, what: str) -> None:
    assert last_in(folder) == made.expected, what
    told = ds.dataset(folder / audit.ANOMALIES, partitioning="hive").to_table().to_pylist()
    reported = [(row["id"], row["life"], row["verdict"]) for row in told]
    assert len(reported) == len(set(reported)), "an anomaly is reported once"
    wanted = {(*key, verdict) for key, verdict in made.expected.items() if verdict in ANOMALIES}
    assert wanted <= set(reported), "and never forgotten"
    summary = json.loads((folder / audit.SUMMARY).read_text())
    assert {name: summary[name] for name in VERDICTS} == {
        name: sum(verdict == name for verdict in made.expected.values()) for name in VERDICTS
    }


def committed(count: int, *, since: int = START) -> Log:
    """Give a log of commits, a minute apart."""
    log = Log()
    writer = Writer(log)
    for number in range(count):
        at = since + number * 60_000
        writer.commit(f"id-{number}", [Message(topic="orders", key=b"k", value=b"v")], at + 10, at)
    log.settle()
    return log


def test_what_retention_takes_while_it_is_read_is_not_lost(engine: DuckEngine, tmp_path: Path) -> None:
    """A partition that is trimmed between the pin and the reading's end proves nothing about what stood before."""
    log = committed(40)
    source = LogSource(engine, log, START + 3_600_000)
    log.trim("orders", 5)
    # The first part has been read by now, and the rest of what goes has not.
    for record in log.records:
        record.gone = record.topic == "orders" and 10 <= record.offset < 30
    reopen = source.reopened

    def later() -> LogSource:
        log.trim("orders", 30)
        return reopen()

    source.reopened = later  # type: ignore[method-assign]
    audit.run(engine, source, LocalFolder(str(tmp_path)), OPTIONS)
    assert set(found_in(tmp_path).values()) == {"committed_ok", "expired_unknown"}


def test_what_is_removed_before_it_is_settled_is_not_lost(engine: DuckEngine, tmp_path: Path) -> None:
    """An open Kafka transaction holds back what was committed behind it, and all of it goes just before it is read."""
    log = committed(4)
    at = START + HORIZON
    source = LogSource(engine, log, at)
    pin, unsettled = source.pin, source.unsettled

    def held_back(topics: Sequence[str]) -> None:
        source._committed_until = START + 150_000 if "orders" in topics else at
        pin(topics)

    def late(topics: Sequence[str]) -> Any:
        if "orders" in topics:
            log.trim("orders", 4)
        return unsettled(topics)

    source.pin = held_back  # type: ignore[method-assign]
    source.unsettled = late  # type: ignore[method-assign]
    audit.run(engine, source, LocalFolder(str(tmp_path)), OPTIONS)
    assert set(found_in(tmp_path).values()) == {"committed_ok", "expired_unknown"}


def test_what_retention_takes_between_two_runs_is_not_lost(tmp_path: Path) -> None:
    """No run has read it; what was read before needs no proof."""
    log, folder = committed(40), LocalFolder(str(tmp_path))
    continued(log, START + 10 * 60_000, folder)
    log.trim("orders", 30)
    continued(log, START + 3_600_000, folder)
    assert counts_in(tmp_path) == {"committed_ok": 20, "expired_unknown": 20}


def test_a_topic_that_was_emptied_is_not_lost(engine: DuckEngine, tmp_path: Path) -> None:
    """By hand, or by a retention that was short for a while: that it is long now tells nothing of then."""
    log = committed(4)
    log.kept_ms = 1000 * HORIZON
    log.trim("orders", 4)
    audit.run(engine, LogSource(engine, log, START + HORIZON), LocalFolder(str(tmp_path)), OPTIONS)
    assert set(found_in(tmp_path).values()) == {"expired_unknown"}


def test_a_topic_that_was_not_there_yet_is_not_lost(engine: DuckEngine, tmp_path: Path) -> None:
    """One that is made while the others are read, or that a broker has not heard of yet, is there when all is read."""
    log = committed(4)
    log.missing = frozenset(["orders"])
    source = LogSource(engine, log, START + HORIZON)
    reopen = source.reopened

    def later() -> LogSource:
        log.missing = frozenset()
        return reopen()

    source.reopened = later  # type: ignore[method-assign]
    audit.run(engine, source, LocalFolder(str(tmp_path)), OPTIONS)
    assert set(found_in(tmp_path).values()) == {"expired_unknown"}


def test_a_topic_that_is_made_again_while_it_is_read_is_not_lost(engine: DuckEngine, tmp_path: Path) -> None:
    """Nothing of what was written to the one before was there to be read."""
    log = committed(4)
    source = LogSource(engine, log, START + HORIZON)
    reopen, committed_of = source.reopened, source.committed

    def later() -> LogSource:
        log.made["orders"] = 1
        return reopen()

    def none_of_it(topics: Sequence[str]) -> Any:
        return committed_of([name for name in topics if name != "orders"])

    source.reopened = later  # type: ignore[method-assign]
    source.committed = none_of_it  # type: ignore[method-assign]
    audit.run(engine, source, LocalFolder(str(tmp_path)), OPTIONS)
    assert set(found_in(tmp_path).values()) == {"expired_unknown"}


def test_a_first_message_that_is_dated_in_the_future_hides_no_loss(engine: DuckEngine, tmp_path: Path) -> None:
    """Anybody can write one, and retention can make it the first that is there."""
    log = committed(40)
    dated = [record for record in log.records if record.topic == "orders"][20]
    dated.told_at += 1_000 * 24 * 3_600_000
    log.trim("orders", dated.offset)
    at = START + 3_600_000
    Writer(log).op("gone", OpKind.COMMITTED, MESSAGES, at, at)
    log.settle()
    audit.run(engine, LogSource(engine, log, at + HORIZON), LocalFolder(str(tmp_path)), OPTIONS)
    found = found_in(tmp_path)
    assert {key for key, verdict in found.items() if verdict in ANOMALIES} == {("gone", 0)}
    assert found["gone", 0] == "lost"


def test_a_whole_audit_leaves_the_folder_of_one_that_goes_on_alone(engine: DuckEngine, tmp_path: Path) -> None:
    """It would replace what the runs have said, and the next one would find nothing of it."""
    log, folder = committed(2), LocalFolder(str(tmp_path))
    continued(log, START + HORIZON, folder)
    with pytest.raises(SourceError, match="is of an audit with --continue: give another folder"):
        audit.run(engine, LogSource(engine, log, START + HORIZON), folder, OPTIONS)
    assert counts_in(tmp_path) == {"committed_ok": 2}


def test_a_group_that_cannot_be_read_is_told_by_one_run(tmp_path: Path) -> None:
    """Groups are read whole each time, what is wrong in them is told once."""
    log, folder = committed(1), LocalFolder(str(tmp_path))
    for number in range(1, 4):
        log.write(PREFIX + "groups", f"g-{number}".encode(), b"damaged", START + number * HORIZON, ())
        log.settle()
        for at in (number * HORIZON, number * HORIZON + 60_000):
            continued(log, START + at, folder)
            assert json.loads((tmp_path / audit.SUMMARY).read_text())["quarantined"] == number


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
    state = incremental.State.read(folder)
    assert state is not None
    assert [run.number for run in state.runs] == [1, 2, 3, 4]
    assert folder.names(incremental.EVENTS, "ops") == ["run=1", "run=2", "run=3", "run=4"]
    assert counts_in(tmp_path) == {"committed_ok": 5, "leaked": 2}
    told = ds.dataset(tmp_path / audit.ANOMALIES, partitioning="hive").to_table().to_pylist()
    assert [(row["run"], row["id"]) for row in told] == [(0, "weekly"), (4, "weekly")]


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


def test_messages_that_are_older_than_the_topics_are_of_somebody_else(engine: DuckEngine, tmp_path: Path) -> None:
    """A new prefix finds the messages of the one before, which named none, in its real topics."""
    log = committed(3, since=START + 3_600_000)
    older = Writer(log)
    older.message("theirs", Message(topic="orders", key=b"k", value=b"v"), "1/1", START, START, prefix=None)
    older.lay_out(START + 3_000_000)
    log.settle()
    audit.run(engine, LogSource(engine, log, START + 7_200_000), LocalFolder(str(tmp_path)), OPTIONS)
    assert set(found_in(tmp_path).values()) == {"committed_ok"}


def test_runs_that_go_on_know_when_the_topics_were_created(engine: DuckEngine, tmp_path: Path) -> None:
    """An older message is of somebody else in each run, also if its id is used in a later one."""
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
    rows = engine.rows(engine.read_runs(str(tmp_path / audit.VERDICTS), [0, 1]))
    assert [row["verdict"] for row in rows] == ["committed_ok"]


def test_a_clock_behind_the_creation_of_the_topics_loses_nothing(engine: DuckEngine, tmp_path: Path) -> None:
    """Messages say that they were prepared before there were topics, but ops name them."""
    log = Log()
    writer = Writer(log)
    writer.lay_out(START)
    log.ahead, prepared_at = -3_600_000, START - 3_000_000
    writer.half("behind", MESSAGES, START, prepared_at=prepared_at)
    writer.commit("behind", MESSAGES, START, prepared_at)
    writer.half("set-right", MESSAGES, START, prepared_at=prepared_at)
    log.ahead = 0
    writer.commit("set-right", MESSAGES, START, prepared_at)
    log.settle()
    audit.run(engine, LogSource(engine, log, START + 7_200_000), LocalFolder(str(tmp_path)), OPTIONS)
    assert found_in(tmp_path) == {("behind", 0): "committed_ok", ("set-right", 0): "committed_ok"}


def test_a_resume_that_half_has_not_shown_yet_is_pending(engine: DuckEngine, tmp_path: Path) -> None:
    """Its Kafka transaction shows in parked already, and in half not yet."""
    log = Log()
    writer = Writer(log)
    messages = [Message(topic="orders", key=b"k", value=b"v")]
    writer.half("resumed", messages, START)
    writer.park("resumed", messages, START + 10_000, START)
    writer.write_tombstone("parked", "resumed", START + 20_000, "prepared")
    writer.half("resumed", messages, START + 20_001, prepared_at=START)
    log.settle()
    source = LogSource(engine, log, START + 60_000, open_since=START + 20_000)
    audit.run(engine, source, LocalFolder(str(tmp_path)), OPTIONS)
    assert found_in(tmp_path) == {("resumed", 0): "pending"}


def test_a_clock_that_is_set_back_before_a_commit_loses_nothing(engine: DuckEngine, tmp_path: Path) -> None:
    """The messages' own time lies hours before their prepare then: they are of its use all the same."""
    log = Log()
    writer = Writer(log)
    writer.half("mine", MESSAGES, START)
    log.ahead = -4 * HORIZON
    writer.commit("mine", MESSAGES, START + 10_000, START)
    log.settle()
    audit.run(engine, LogSource(engine, log, START + HORIZON), LocalFolder(str(tmp_path)), OPTIONS)
    assert found_in(tmp_path) == {("mine", 0): "committed_ok"}


def test_an_outcome_that_a_later_use_has_compacted_away_makes_no_leak(engine: DuckEngine, tmp_path: Path) -> None:
    """Of an audit that reads what an earlier one read, op may have gone on."""
    log = committed(2)
    writer = Writer(log)
    again = START + 3 * HORIZON
    writer.commit("id-0", [Message(topic="orders", key=b"k", value=b"v")], again, again)
    log.settle()
    log.compact(PREFIX + "op", again + 1)
    audit.run(engine, LogSource(engine, log, START + HORIZON), LocalFolder(str(tmp_path)), OPTIONS)
    assert found_in(tmp_path) == {("id-0", 0): "expired_unknown", ("id-1", 0): "committed_ok"}


def test_no_number_that_somebody_writes_stops_an_audit(engine: DuckEngine, tmp_path: Path) -> None:
    """Avro bounds no number: what cannot be is told as an error, and the others are judged."""
    log = committed(1)
    numbers = (-1, 1 << 40, (1 << 63) - 1, -(1 << 63), 1 << 64, 1 << 80, 0)
    for field in ("prepared_at", "at", "size", "checks"):
        for number in numbers:
            size = number if field == "size" else 1
            message = MessageDigest(topic="orders", key_hash=None, value_hash=None, size=size)
            told: dict[str, Any] = {"prepared_at": START, "at": START, "checks": 0, field: number}
            told.pop("size", None)
            name = f"{field}-{number}"
            op = Op(
                kind=OpKind.COMMITTED, id=name, group="g", half_offset=0, cause=Cause.PRODUCER, messages=(message,),
                **told,
            )  # fmt: skip
            Writer(log).raw_op(name, codec.encode_op(op), START + 60_000, "committed")
    log.settle()
    audit.run(engine, LogSource(engine, log, START + 3_600_000), LocalFolder(str(tmp_path)), OPTIONS)
    found = found_in(tmp_path)
    assert len(found) == 1 + 4 * len(numbers)
    assert found["id-0", 0] == "committed_ok"
    assert {verdict for (name, _), verdict in found.items() if name != "id-0"} == {"not_judged", "lost"}
    assert found[f"prepared_at-{(1 << 63) - 1}", 0] == found[f"size-{(1 << 63) - 1}", 0] == "not_judged"


def hostile() -> tuple[Log, Expected]:
    """Give a log of what one engine could take for something, and another for nothing, or stop at."""
    log = committed(1)
    writer = Writer(log)
    expected: Expected = {("id-0", 0): "committed_ok"}
    late = START + 3 * HORIZON
    # START by the rules of some languages. As it is none here, each is a message of another, later use.
    times = (f"{START}.0", "17e11", "1_700_000_000_000", f" {START}", f"{START:#x}", f"+{START}")
    for number, told in enumerate(times):
        name = f"time-{number}"
        writer.commit(name, MESSAGES, START + 10, START)
        writer.message(name, MESSAGES[0], "1/1", late, told)
        expected |= {(name, 0): "committed_ok", (name, 1): "leaked"}
    for number, place in enumerate(("1/1\n", " 1/1", "1/1/1", "+1/1", "01/1", "1/")):
        writer.message(f"place-{number}", MESSAGES[0], place, START, START)
        writer.op(f"place-{number}", OpKind.COMMITTED, MESSAGES, START, START)
        expected[f"place-{number}", 0] = "leaked"
    for number, time in enumerate((-1, (1 << 63) - 1, 1 << 80)):
        op = Op(
            kind=OpKind.COMMITTED, id=f"op-{number}", group="g", half_offset=0, cause=Cause.PRODUCER, prepared_at=time,
            at=START, messages=(),
        )  # fmt: skip
        writer.raw_op(op.id, codec.encode_op(op), START, "committed")
        expected[op.id, 0] = "not_judged"
    of_nobody: list[tuple[str, str | bytes | None]] = [("halfway-transaction-id", b"\xff\xfe")]
    log.write("orders", b"k", b"v", START, of_nobody)
    log.write("orders", b"k", b"v", START, [("halfway-transaction-id", "unlike"), ("halfway-prefix", b"\xff")])
    expected["unlike", 0] = "leaked"
    log.settle()
    return log, expected


def test_duckdb_takes_nothing_for_what_it_is_not(engine: DuckEngine, tmp_path: Path) -> None:
    """As Spark does, of what anybody can write."""
    log, expected = hostile()
    audit.run(engine, LogSource(engine, log, START + 3_600_000), LocalFolder(str(tmp_path)), OPTIONS)
    assert found_in(tmp_path) == expected


def test_spark_takes_nothing_for_what_it_is_not(spark: "SparkSession", tmp_path: Path) -> None:
    """As DuckDB does, of what anybody can write."""
    log, expected = hostile()
    engine = SparkEngine(spark)
    audit.run(engine, LogSource(engine, log, START + 3_600_000), Folder(spark, str(tmp_path)), OPTIONS)
    engine.close()
    assert found_in(tmp_path) == expected


def test_outcomes_that_nobody_can_read_have_an_exit_status_of_their_own(tmp_path: Path) -> None:
    """An audit that is older than the coordinator finds nothing, and says that it could not."""
    at = datetime.fromtimestamp(START / 1000, UTC)
    headers = codec.record_headers("op", "shop", "committed")
    newer = b"\xc3\x01newer...and what it says"
    write_records(tmp_path / "archive", [(b"x", newer, PREFIX + "op", 0, 0, at, headers)], at=START + 60_000)
    told = ["audit", "--snapshot", str(tmp_path / "archive"), "--output", str(tmp_path / "audit")]
    found = CliRunner().invoke(cli.pipeline, told)
    assert found.exit_code == 3, found.output
    assert "1 outcomes could not be read" in found.output
    chosen = CliRunner().invoke(cli.pipeline, [*told, "--fail-on", "not_judged=2"])
    assert chosen.exit_code == 0, chosen.output
    both = CliRunner().invoke(cli.pipeline, [*told, "--offsets", "offsets.json"])
    assert both.exit_code == 2, "a wrong command"
    assert "give one of them" in both.output


def test_the_example_for_kubernetes_names_what_the_command_line_has() -> None:
    """An audit that goes on, and a whole one that is compared with its very folder."""
    folders = []
    for job in YAML(typ="safe").load_all((EXAMPLES / "cronjob.yaml").read_text()):
        [container] = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
        _, name, *rest = container["args"]
        with cli.pipeline.commands[name].make_context(name, rest) as context:
            folders.append((context.params["on"], context.params["output"], context.params["against"]))
    assert folders == [(True, "/audit/continued", None), (False, "/audit/whole", "/audit/continued")]


def test_the_example_for_airflow_names_what_the_command_line_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be imported, and its commands parse."""
    commands: list[str] = []

    def operator(*, bash_command: str, **_: object) -> None:
        commands.append(bash_command)

    operators = "airflow.providers.standard.operators"
    for name in ("airflow", "airflow.providers", "airflow.providers.standard", operators):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    bash, sdk = ModuleType(f"{operators}.bash"), ModuleType("airflow.sdk")
    vars(bash)["BashOperator"] = operator
    vars(sdk)["DAG"] = lambda *_, **__: nullcontext()
    monkeypatch.setitem(sys.modules, bash.__name__, bash)
    monkeypatch.setitem(sys.modules, sdk.__name__, sdk)
    runpy.run_path(str(EXAMPLES / "airflow_dag.py"))
    assert len(commands) == 2
    for command in commands:
        _, job, *rest = shlex.split(command.replace("{{ ds }}", "day"))
        with cli.pipeline.commands[job].make_context(job, rest) as context:
            assert context.params["output"]
