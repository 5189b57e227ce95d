"""Audits of histories as a deployment makes them in weeks: no false anomaly, no missed one, nothing young "expired"."""

import os
import random
from pathlib import Path

import pytest

from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.jobs import audit, incremental
from halfway.pipeline.tables.folders import LocalFolder
from halfway.pipeline.transforms.verdict import ANOMALIES
from tests.support.pipeline.archives import verdicts_in
from tests.support.pipeline.audits import OPTIONS, last_in
from tests.support.pipeline.worlds import DAY, REAL_KEPT_MS, World, WorldSource

SEEDS = int(os.environ.get("HISTORIES", "2"))
FIRST = int(os.environ.get("FIRST_SEED", "1"))
seeds = pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS), ids="seed-{}".format)
HOUR = 3_600_000
PLANTED = ("leaked", "lost", "torn", "doubled", "payload_changed", "reordered", "unprepared", "half_left")


def source(engine: DuckEngine, world: World, at: int, seed: int) -> WorldSource:
    chance = random.Random(seed)
    return WorldSource(engine, world, at, lambda: chance.choice((0, 1, 20, 500, 5_000)))


@seeds
def test_a_history_without_a_fault_has_no_anomaly(engine: DuckEngine, tmp_path: Path, seed: int) -> None:
    """Whatever is removed, and whenever it is read. What is expired is older than its topic's retention."""
    world = World(seed)
    at = world.end - random.Random(seed).choice((0, 10_000, 40_000, 1_800_000, 3 * DAY))
    audit.run(engine, source(engine, world, at, seed), LocalFolder(str(tmp_path)), OPTIONS)
    rows = verdicts_in(tmp_path)
    assert not [row for row in rows if row["verdict"] in ANOMALIES], f"seed {seed}"
    expired = [row for row in rows if row["verdict"] == "expired_unknown" and row["ended_at"] is not None]
    young = [row for row in expired if row["ended_at"].timestamp() * 1000 > at - REAL_KEPT_MS + DAY]
    of_compacted = [row for row in young if "state" in row["topics"]]
    assert young == of_compacted, f"seed {seed}"


@seeds
def test_windows_of_a_history_without_a_fault_have_no_anomaly(tmp_path: Path, seed: int) -> None:
    """Whatever is removed between the runs, which can be days apart."""
    world = World(seed)
    chance = random.Random(seed)
    times = sorted({world.end - ago for ago in (*chance.sample(range(10 * DAY), 2), 30_000, -100)})
    for at in times:
        engine = DuckEngine()
        incremental.run(engine, source(engine, world, at, seed), LocalFolder(str(tmp_path)), OPTIONS)
        engine.close()
    assert not {key for key, verdict in last_in(tmp_path).items() if verdict in ANOMALIES}, f"seed {seed}"


@seeds
def test_what_is_planted_is_found_or_said_to_be_unproved(engine: DuckEngine, tmp_path: Path, seed: int) -> None:
    """A minute ago, in topics that have lost records: a missing message is lost, or at least unproved."""
    world = World(seed)
    for number, anomaly in enumerate(PLANTED):
        world.plant(anomaly, ago=HOUR + number * 60_000)
    audit.run(engine, source(engine, world, world.end, seed), LocalFolder(str(tmp_path)), OPTIONS)
    found = {row["id"]: row["verdict"] for row in verdicts_in(tmp_path)}
    wrong = {
        (anomaly, found.get(name))
        for name, anomaly in world.planted.items()
        if found.get(name) not in {anomaly, *(("unproved",) if anomaly in {"lost", "torn", "leaked"} else ())}
    }
    assert not wrong, f"seed {seed}"
