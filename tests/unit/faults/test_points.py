"""The points at which a process is killed are those of the product, and a kill that does not come is a failure."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from halfway.coordinator.checkback.scan import Scan
from halfway.kafka.lane.lane import LaneThread
from halfway.kafka.ownership.acquisition import Acquisition
from tests.faults.injection import resolve
from tests.faults.plan import Fault
from tests.faults.points import STEPS
from tests.support.coordinator.faulty import FaultyCoordinator
from tests.support.waiting import until_true

_ROOT = Path(__file__).resolve().parents[3]
_COUNT_WRAPPED = """
import runpy
from halfway.app.cli import main as cli
from tests.faults.injection import resolve
from tests.faults.points import STEPS

def count():
    found = [getattr(*resolve(*place)) for place in STEPS.values()]
    print(sum(hasattr(one, "__wrapped__") for one in found), len(found))

cli.main = count
runpy.run_module("tests.faults", run_name="__main__")
"""


@cache
def _names_read(source: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Give the names that a module reads, and the attributes that it reads of anything."""
    nodes = list(ast.walk(ast.parse(source.read_text(encoding="utf-8"))))
    names = (node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return frozenset(names), frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute))


@pytest.mark.parametrize("step", STEPS)
def test_every_step_is_taken_by_the_product(step: str) -> None:
    """A fault at a function that was renamed or moved, or that nothing calls any more, would never take effect.

    A function is replaced in one module, and a private method is private to one: it must be called from there. Any
    other method may be called from anywhere.
    """
    module, qualified_name = STEPS[step]
    resolve(module, qualified_name)
    holder, _, name = qualified_name.rpartition(".")
    own = Path(importlib.import_module(module).__file__ or "")
    if not holder:
        assert name in _names_read(own)[0]
    elif name.startswith("_"):
        assert name in _names_read(own)[1]
    else:
        product = [path for folder in ("adapters", "coordinator") for path in (_ROOT / folder).rglob("*.py")]
        assert any(name in _names_read(path)[1] for path in product)


@pytest.mark.parametrize(
    "area, numbered", [("lane", LaneThread.commit_batch), ("acquire", Acquisition.acquire), ("scan", Scan.scan)]
)
def test_the_table_covers_every_numbered_step(area: str, numbered: object) -> None:
    """The steps are those that the product's own docstring numbers."""
    steps = set(re.findall(r"^\s+(\d+)\. ", numbered.__doc__ or "", re.MULTILINE))
    assert steps
    in_table = {step.split(".")[1] for step in STEPS if step.startswith(f"{area}.")}
    assert {part for part in in_table if part.isdigit()} == steps


@pytest.mark.parametrize("asked", [False, True])
def test_nothing_is_wrapped_unless_it_is_asked_for(asked: bool, tmp_path: Path) -> None:
    """Without `--in` the launcher is the ordinary command line."""
    arguments = ["--in", str(tmp_path)] if asked else []
    ran = subprocess.run(
        [sys.executable, "-c", _COUNT_WRAPPED, *arguments], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == [str(len(STEPS) if asked else 0), str(len(STEPS))]


NOBODY = "127.0.0.1:1"


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[FaultyCoordinator]:
    """Give a coordinator that looks for a Kafka which is not there."""
    coordinator = FaultyCoordinator(NOBODY, tmp_path)
    coordinator.launch()
    yield coordinator
    coordinator.close()


async def test_a_kill_without_the_point_fails(coordinator: FaultyCoordinator) -> None:
    """Somebody else killed it: its point was never reached."""
    coordinator.faults.plan(Fault(point="lane.5.commit.before", action="kill"))
    coordinator.kill()
    with pytest.raises(AssertionError, match="reached none"):
        await coordinator.killed_at_its_fault()


async def test_another_end_than_by_signal_9_fails(coordinator: FaultyCoordinator) -> None:
    """It stopped by itself, or in good order."""
    await until_true(lambda: '"listening"' in coordinator.log, what="it runs")
    coordinator.terminate()
    with pytest.raises(AssertionError, match="was not killed"):
        await coordinator.killed_at_its_fault()
