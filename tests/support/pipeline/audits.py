"""Audits of logs in memory, and their results."""

import json
import random
from pathlib import Path

import pyarrow.dataset as ds

from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.jobs import audit, incremental
from halfway.pipeline.jobs.audit import AuditOptions
from halfway.pipeline.tables.folders import LocalFolder
from halfway.pipeline.transforms.verdict import ANOMALIES, VERDICTS
from halfway.protocol.records import Message
from tests.support.pipeline.archives import verdicts_in
from tests.support.pipeline.log_writer import Writer
from tests.support.pipeline.logs import HORIZON, SLACK, START, Log, LogSource
from tests.support.pipeline.random_logs import Expected, RandomLog

OPTIONS = AuditOptions(horizon_ms=HORIZON, skew_ms=SLACK)
MESSAGES = [Message(topic="orders", key=b"k", value=b"v")]


def found_in(folder: Path) -> Expected:
    return {(row["id"], row["life"]): row["verdict"] for row in verdicts_in(folder)}


def continued(log: Log, at: int, folder: LocalFolder) -> None:
    """Let `audit --continue` read a log up to a time."""
    engine = DuckEngine()
    try:
        incremental.run(engine, LogSource(engine, log, at), folder, OPTIONS)
    finally:
        engine.close()


def counts_in(folder: Path) -> dict[str, int]:
    """Return the verdicts that there are, of all runs."""
    summary = json.loads((folder / audit.SUMMARY).read_text())
    return {name: count for name, count in summary.items() if name in VERDICTS and count}


def last_in(folder: Path) -> Expected:
    """Return the verdicts of the last run that has one for each use of an id."""
    rows = ds.dataset(folder / audit.VERDICTS, partitioning="hive").to_table().to_pylist()
    last = {(row["id"], row["life"]): row["verdict"] for row in sorted(rows, key=lambda row: row["run"])}
    return {key: verdict for key, verdict in last.items() if verdict is not None}


def made_at(shard: int, at: int) -> str:
    """Return an id as halfway makes it."""
    digits = f"{at:012x}"
    return f"{shard}-{digits[:8]}-{digits[8:]}-7000-8000-{shard:012x}"


def committed(count: int, *, since: int = START) -> Log:
    """Return a log of commits, a minute apart."""
    log = Log()
    writer = Writer(log)
    for number in range(count):
        at = since + number * 60_000
        writer.commit(f"id-{number}", [Message(topic="orders", key=b"k", value=b"v")], at + 10, at)
    log.settle()
    return log


def cuts_of(made: RandomLog, seed: int) -> list[int]:
    """Return the times up to which the runs read; the last one reads everything."""
    chance = random.Random(seed)
    cuts = sorted(chance.choice(made.log.records).at for _ in range(chance.randrange(1, 4)))
    return [*(min(cut, made.end) for cut in cuts), made.end + 60_000]


def assert_whole(folder: Path, made: RandomLog, what: str) -> None:
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
