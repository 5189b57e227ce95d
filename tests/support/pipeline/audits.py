"""Audits of logs in memory, and their results."""

import json
import random
import re
from pathlib import Path
from typing import Any

from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.engines.engine import SparkEngine
from halfway.pipeline.jobs import audit, incremental
from halfway.pipeline.jobs.audit import AuditOptions
from halfway.pipeline.tables import ANOMALIES as ANOMALIES_TABLE
from halfway.pipeline.tables import VERDICTS as VERDICTS_TABLE
from halfway.pipeline.tables import LocalFolder
from halfway.pipeline.transforms.verdict import ANOMALIES, VERDICTS
from halfway.protocol.records import Message
from tests.support.pipeline.archives import rows_in, verdicts_in
from tests.support.pipeline.log_writer import Writer
from tests.support.pipeline.logs import HORIZON, SLACK, START, Log, LogSource
from tests.support.pipeline.random_logs import Expected, RandomLog

OPTIONS = AuditOptions(horizon_ms=HORIZON, skew_ms=SLACK)
MESSAGES = [Message(topic="orders", key=b"k", value=b"v")]


class DiedError(Exception):
    """What a run of this process dies of."""


def dying_engine(commits: int) -> DuckEngine:
    """Return an engine that makes so many commits and then dies."""
    engine, left = DuckEngine(), iter(range(commits))

    def dying(write: Any) -> Any:
        def count(*given: Any, **options: Any) -> None:
            if next(left, None) is None:
                raise DiedError
            write(*given, **options)

        return count

    engine.save, engine.merge = dying(engine.save), dying(engine.merge)  # type: ignore[method-assign]
    return engine


class WatchedEngine(SparkEngine):
    """Spark, and for each plan that it has computed the names of the tables that this reads, one for each time."""

    def __init__(self, spark: Any) -> None:
        super().__init__(spark)
        self.reads: list[list[str]] = []

    def keep(self, frame: Any) -> Any:
        return super().keep(self._watched(frame))

    def save(self, frame: Any, *given: Any, **options: Any) -> None:
        super().save(self._watched(frame), *given, **options)

    def rows(self, frame: Any) -> list[dict[str, Any]]:
        return super().rows(self._watched(frame))

    def _watched(self, frame: Any) -> Any:
        plan = frame._jdf.queryExecution().executedPlan().toString()
        self.reads.append(re.findall(r"Location: \w+\(1 paths\)\[[^]]*/(\w+)\]", plan))
        return frame


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
    rows = rows_in(folder, VERDICTS_TABLE)
    last = {(row["id"], row["life"]): row["verdict"] for row in rows}
    assert len(last) == len(rows), "a use has one row"
    return last


def made_at(shard: int, at: int) -> str:
    """Return an id as halfway makes it."""
    digits = f"{at:012x}"
    return f"{digits[:8]}-{digits[8:]}-7000-8000-{shard:012x}"


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
    told = rows_in(folder, ANOMALIES_TABLE)
    reported = [(row["id"], row["life"], row["verdict"]) for row in told]
    assert len(reported) == len(set(reported)), "an anomaly is reported once"
    wanted = {(*key, verdict) for key, verdict in made.expected.items() if verdict in ANOMALIES}
    assert wanted <= set(reported), "and never forgotten"
    summary = json.loads((folder / audit.SUMMARY).read_text())
    assert {name: summary[name] for name in VERDICTS} == {
        name: sum(verdict == name for verdict in made.expected.values()) for name in VERDICTS
    }
