"""The simulation finds nothing, and the same seed gives the same run."""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import structlog

from tests.simulation import machine
from tests.simulation.instances import silence
from tests.simulation.mutants import mutated
from tests.simulation.oracles import problems
from tests.simulation.run import Simulation
from tests.simulation.shrinking import shrink, story
from tests.simulation.story import plan

ROOT: Final = Path(__file__).parents[2]
FRESH_S: Final = 15.0
"""How much CPU time fresh seeds get."""
FOUND: Final = (60403, 36140592, 36141347, 36141639, 36300665, 36304041, 36304377, 36306777, 36307805, 36500083)
"""Seeds that have found something once."""


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    """Log nothing, and leave the log to the next test of this process as it was."""
    before = structlog.get_config()
    silence()
    yield
    structlog.configure(**before)


def run(seed: int) -> tuple[str, list[str]]:
    """Run a seed; return the digest of its trace, and what is wrong."""
    simulation = Simulation(plan(seed)).go()
    return simulation.digest.hexdigest(), problems(simulation)


@pytest.mark.parametrize("seed", FOUND)
def test_what_a_seed_found_is_mended(seed: int) -> None:
    assert run(seed)[1] == []


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    seed = 5
    digest, found = run(seed)
    assert found == []
    script = f"from tests.simulation.test_simulation import run, silence; silence(); run(3); print(run({seed})[0])"
    for hash_seed in ("0", "4711"):
        again = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert again.stdout.strip() == digest


@pytest.mark.parametrize(
    "name, seed",
    [
        ("a failed commit is taken for one", 19),
        ("a third message is left out", 1),
        ("an unknown write is acknowledged", 1),
        ("one fatal error ends the writer of halves", 1),
        ("a jump of the clock rolls back unasked", 42),
        ("a commit that met 503 is forgotten", 72),
        ("a late half replaces what was acknowledged", 84),
        ("a former owner is not fenced", 17),
        ("strays are not seen", 162),
        ("the horizon begins at the restart", 1160),
        ("a deleted group is there again after a gap", 18),
        ("names of headers are counted in characters", 14),
        ("what was prepared ahead of time is written so", 19),
    ],
)
def test_a_fault_in_halfway_is_seen(name: str, seed: int) -> None:
    with mutated(name):
        assert run(seed)[1] != []


def test_a_failing_run_is_cut_down_and_told() -> None:
    with mutated("a third message is left out"):
        short, found = shrink(plan(1), run(1)[1], at_most=25)
        told = list(story(short, found))
    assert found[0].startswith("committed_in_part")
    assert len(short.transactions) < len(plan(1).transactions) / 2
    assert short.faults == []
    assert any("append ('_halfway.half'" in line for line in told)


def test_fresh_seeds_find_nothing() -> None:
    first, begun, number = random.SystemRandom().randrange(10**9), time.process_time(), 0
    while time.process_time() - begun < FRESH_S:
        seed = first + number
        assert run(seed)[1] == [], f"make simulate RUNS=1 SEED={seed}"
        number += 1


# --- the only ways to time, chance and threads

PATHS: Final = (
    "coordinator/halfway/protocol",
    "coordinator/halfway/coordinator",
    "adapters/halfway/kafka",
    "adapters/halfway/simulated",
)
NOT_IN_ORDER: Final = {"coordinator/halfway/protocol/outcomes.py: hash"}
"""A hash that only finds an entry."""
NOT_ON_THE_PATH: Final = {"coordinator/halfway/coordinator/tracing.py", "coordinator/halfway/coordinator/logging.py"}
REPLACED: Final = {"time", "threading", "queue", "random", "secrets", "uuid", "concurrent.futures"}
"""Modules of which only that may be used on the path which the simulation replaces."""
KEPT: Final = {"random.Random", "random.SystemRandom", "concurrent.futures.Future", "concurrent.futures.wait"}
"""What is the same in the simulation, or is replaced below."""


def foreign(source: str) -> Iterator[str]:
    """Yield what a module uses that the simulation does not replace."""
    offered = machine.offered()
    imported = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                imported |= {one.name for one in names if one.name in REPLACED}
                yield from (
                    f"import {one.name} as {one.asname}" for one in names if one.name in REPLACED and one.asname
                )
            case ast.ImportFrom(module=str(module), names=names) if module in REPLACED:
                yield from (name for one in names if (name := f"{module}.{one.name}") not in offered | KEPT)
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in imported:
                if f"{module}.{name}" not in offered | KEPT:
                    yield f"{module}.{name}"
            case ast.Attribute(value=ast.Name(id="datetime"), attr="now" | "utcnow" | "today" as name):
                yield f"datetime.{name}"
            case ast.Call(func=ast.Name(id="hash")):
                yield "hash"


def test_the_path_gets_time_chance_and_threads_from_what_the_simulation_replaces() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for folder in PATHS
        for path in (ROOT / folder).rglob("*.py")
        if str(path.relative_to(ROOT)) not in NOT_ON_THE_PATH
        for name in foreign(path.read_text())
    }
    assert found == NOT_IN_ORDER


@pytest.mark.parametrize(
    "source", ["import time\ntime.ctime()", "from threading import Timer", "import random as chance", "hash('a')"]
)
def test_other_ways_are_seen(source: str) -> None:
    assert list(foreign(source))
