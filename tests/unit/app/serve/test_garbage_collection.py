import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from halfway.app.serve.process import collect_periodically, collect_rarely, freeze_existing
from tests.support.waiting import GENEROUS_S

IN_FLIGHT = 20_000


@pytest.fixture
def searched_generations() -> Iterator[list[int]]:
    """Provide the list of generations that the collector has searched; restore its settings."""
    thresholds = gc.get_threshold()
    gc.collect()
    seen: list[int] = []

    def record(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(record)
    yield seen
    gc.callbacks.remove(record)
    gc.set_threshold(*thresholds)


def test_a_few_full_batches_in_flight_are_looked_through_once_at_most(searched_generations: list[int]) -> None:
    """Transactions in flight are alive: repeated searches for cycles among them find nothing."""
    collect_rarely()
    in_flight = [[number] for number in range(IN_FLIGHT)]
    assert len(in_flight) == IN_FLIGHT
    assert len(searched_generations) <= 1


def test_cycles_are_still_freed(searched_generations: list[int]) -> None:
    """Errors and closed connections leave cycles, which must not accumulate."""
    collect_rarely()
    for _ in range(10 * IN_FLIGHT):
        cycle: list[object] = []
        cycle.append(cycle)
    assert searched_generations


class Knot:
    def __init__(self) -> None:
        self.me = self


@pytest.mark.usefixtures("searched_generations")
async def test_a_cycle_is_freed_within_its_time_when_little_else_is_made() -> None:
    """An idle coordinator frees a client in a cycle, with its threads and connections."""
    collect_rarely()
    knot = weakref.ref(Knot())
    assert knot() is not None
    looking = asyncio.create_task(collect_periodically(0.01))
    async with asyncio.timeout(GENEROUS_S):
        while knot() is not None:  # noqa: ASYNC110 - there is no event for a collection
            await asyncio.sleep(0.01)
    looking.cancel()


def test_what_stands_is_not_looked_through_again(searched_generations: list[int]) -> None:
    """Modules and the records of a recovery never become garbage."""
    collect_rarely()
    standing = [[number] for number in range(IN_FLIGHT)]
    frozen_before = gc.get_freeze_count()
    freeze_existing()
    assert gc.get_freeze_count() >= frozen_before + len(standing)
    assert searched_generations[-1] == 2
