"""Random logs, whose verdicts are known by construction, judged whole and in windows."""

import os
import random
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.jobs import audit, incremental
from halfway.pipeline.tables import EVENTS, Folder, LocalFolder
from tests.support.pipeline.audits import (
    OPTIONS,
    DiedError,
    WatchedEngine,
    assert_whole,
    continued,
    cuts_of,
    dying_engine,
    found_in,
)
from tests.support.pipeline.logs import LogSource
from tests.support.pipeline.random_logs import RandomLog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOGS = int(os.environ.get("HISTORIES", "10"))
TOGETHER = 5 if LOGS < 50 else 25
"""Logs that are audited at once. The number is odd, so that every second group begins with an even seed."""
FIRST = int(os.environ.get("FIRST_SEED", "1"))
each_seed = pytest.mark.parametrize("seed", range(FIRST, FIRST + LOGS, TOGETHER), ids="seed-{}".format)


def seeds(first: int) -> range:
    """Return the seeds of the logs that are audited together."""
    return range(first, min(first + TOGETHER, FIRST + LOGS))


@each_seed
def test_logs_get_the_verdicts_that_they_were_made_for(engine: DuckEngine, tmp_path: Path, seed: int) -> None:
    """Compaction, re-anchor, resume, reuse, other prefixes, forged and unreadable records, and every anomaly."""
    made = RandomLog(*seeds(seed))
    if seed % 2 == 0:
        made.compact()
    audit.run(engine, LogSource(engine, made.log, made.end + 60_000), LocalFolder(str(tmp_path)), OPTIONS)
    assert found_in(tmp_path) == made.expected, f"seed {seed}"


@each_seed
def test_windows_give_the_verdicts_of_the_whole(tmp_path: Path, seed: int) -> None:
    """In any windows each transaction gets the same verdict, and each anomaly is reported once.

    A run that is killed before any of its commits is repeated as a whole.
    """
    made = RandomLog(*seeds(seed), count=45)
    cuts = cuts_of(made, seed)
    folder = LocalFolder(str(tmp_path))
    killed = random.Random(seed)
    for at in cuts:
        # Some runs find Kafka transactions that are not finished.
        open_since = at - (seed - 1) % 3 * 600_000 if at < made.end else None
        for engine in (dying_engine(killed.randrange(7)), DuckEngine()):
            with suppress(DiedError):
                incremental.run(engine, LogSource(engine, made.log, at, open_since=open_since), folder, OPTIONS)
            engine.close()
    assert_whole(tmp_path, made, f"seed {seed}, windows up to {cuts}")


@pytest.mark.parametrize("seed", range(FIRST, FIRST + max(TOGETHER, LOGS // 4), TOGETHER), ids="seed-{}".format)
def test_spark_goes_on_where_duckdb_stopped(spark: "SparkSession", tmp_path: Path, seed: int) -> None:
    """A folder is not bound to an engine: a log may grow beyond one machine.

    No step reads again what was read of the ids that are judged: the rows of this run, and of the earlier ones.
    """
    made = RandomLog(*seeds(seed), count=45)
    times = sorted(record.at for record in made.log.records)
    continued(made.log, times[len(times) // 2], LocalFolder(str(tmp_path)))
    engine = WatchedEngine(spark)
    incremental.run(engine, LogSource(engine, made.log, made.end + 60_000), Folder(spark, str(tmp_path)), OPTIONS)
    engine.close()
    assert_whole(tmp_path, made, f"seed {seed}")
    assert sum(tables.count(EVENTS) for tables in engine.reads) == 4  # the ids and what is known of them
