"""Audits of histories as a deployment makes them in weeks: no false anomaly, no missed one, nothing young "expired"."""

import os
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.engines.engine import Engine, SparkEngine
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.jobs import audit, incremental
from halfway.pipeline.tables import STATE, Folder, LocalFolder
from tests.support.pipeline.archives import verdicts_in
from tests.support.pipeline.audits import OPTIONS
from tests.support.pipeline.worlds import DAY, Worlds, WorldSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEEDS = int(os.environ.get("HISTORIES", "2"))
TOGETHER = 10 if SEEDS < 100 else 50
"""Histories in one deployment, which are audited at once: an audit of one costs nearly as much as one of fifty."""
DEPLOYMENTS = max(8, 4 * SEEDS // TOGETHER)
FIRST = int(os.environ.get("FIRST_SEED", "1"))
HOUR = 3_600_000
PLANTED = ("leaked", "lost", "torn", "doubled", "payload_changed", "reordered", "unprepared", "half_left")
MODES = ("once", "again", "windows", "windows, with a lost state")


def judged(folder: Path, world: Worlds, engine: Engine | None = None) -> tuple[list[dict[str, Any]], int]:
    """Audit worlds in the mode of their seed; return the rows, and when the last audit began.

    Their anomalies were planted if it is odd. Runs are not as far apart as op keeps outcomes: nobody would know then.
    `engine` makes the last audit in place of DuckDB.
    """
    chance = random.Random(world.seed)
    mode = MODES[world.seed // 2 % len(MODES)]
    times = [world.end - chance.choice((0, 10_000, 40_000, 1_800_000, 3 * DAY))]
    if world.seed % 2:
        times = [world.end]
        for number, anomaly in enumerate(PLANTED):
            world.plant(anomaly, ago=HOUR + number * 60_000)
    if mode != "once":
        times = sorted({*(times[0] - ago for ago in chance.sample(range(1, 6 * DAY), 2)), *times})
    job: Any = incremental if "windows" in mode else audit
    lost = times[1] if "lost" in mode else None
    for at in times:
        if at == lost:
            shutil.rmtree(folder / STATE)
            with pytest.raises(PipelineError, match="without their 'state'"):
                run(job, DuckEngine(), folder, world, at)
            shutil.rmtree(folder)
        run(job, (engine if at == times[-1] else None) or DuckEngine(), folder, world, at)
    return verdicts_in(folder), times[-1]


def run(job: Any, engine: Any, folder: Path, world: Worlds, at: int) -> None:
    """Audit worlds as of a time. Reading takes its time, and everything goes on meanwhile."""
    steps = random.Random(world.seed)
    source = WorldSource(engine, world, at, lambda: steps.choice((0, 1, 20, 500, 5_000)))
    try:
        path = str(folder)
        place = Folder(engine.spark, path) if isinstance(engine, SparkEngine) else LocalFolder(path)
        job.run(engine, source, place, OPTIONS)
    finally:
        engine.close()


@pytest.mark.parametrize("seed", range(FIRST, FIRST + DEPLOYMENTS), ids="seed-{}".format)
def test_an_audit_says_what_happened(tmp_path: Path, seed: int) -> None:
    """Whatever is removed, whenever it is read, whole or in windows that can be days apart, and after a lost state."""
    world = Worlds(seed, TOGETHER)
    rows, at = judged(tmp_path / "audit", world)
    assert not world.disagreements(rows, at), f"seed {seed}"


@pytest.mark.parametrize("seed", range(FIRST, FIRST + DEPLOYMENTS // 8), ids="seed-{}".format)
def test_spark_says_the_same_to_the_row(spark: "SparkSession", tmp_path: Path, seed: int) -> None:
    """As DuckDB, of the same history."""
    rows, _ = judged(tmp_path / "duckdb", Worlds(seed, TOGETHER))
    assert judged(tmp_path / "spark", Worlds(seed, TOGETHER), SparkEngine(spark))[0] == rows, f"seed {seed}"
