"""A cell of the kill matrix fails where its coordinator did not die as it was to die."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.plan import Fault
from tests.support.coordinator.faulty import FaultyCoordinator
from tests.support.waiting import until_true

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
