"""Lists and searches: each filter over two instances, page by page; an instance that cannot read half."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from halfway.coordinator.queries.queries import TailFreshness
from halfway.coordinator.requests import ListQuery
from halfway.protocol.errors import KafkaUnavailableError
from halfway.protocol.records import Message, PolicyOverrides
from halfway.protocol.transactions import Cause, Outcome, State
from tests.support.elapsed_time import WallClock
from tests.support.ids import named_id
from tests.support.service.broker import Memory
from tests.support.service.world import World
from tests.support.surroundings import no_verdict
from tests.support.waiting import until_true

PARKED_SOON = PolicyOverrides(first_check_after_s=1, check_interval_s=1, max_interval_s=1, max_checks=1)


async def ids(world: World, **filters: object) -> list[str]:
    page = await world.coordinator.list(ListQuery(**filters), deadline=world.deadline())  # type: ignore[arg-type]
    shown = [view.id for view in page.transactions]
    assert page.count == len(shown)
    return shown


@pytest.fixture
async def stocked(world: World) -> World:
    """Prepare three parked ones of the group `asked`, then three prepared, one committed, one rolled back of `shop`."""
    await world.group("asked", policy=PARKED_SOON)
    world.memory.caller.always(no_verdict("a:80: status 502, not 200"))
    for number in range(3):
        await world.prepare(transaction_id=named_id(f"p{number}"), group="asked")
        world.memory.clock.advance(0.01)
    for _ in range(3):
        await world.scan(after_s=2)
    for number in range(3):
        await world.prepare(
            Message(topic="points", key=b"%d" % number, value=b"v"), transaction_id=named_id(f"t{number}")
        )
        world.memory.clock.advance(1)
    await world.prepare(transaction_id=named_id("done"))
    await world.end(named_id("done"), Outcome.COMMIT)
    await world.prepare(transaction_id=named_id("undone"))
    await world.end(named_id("undone"), Outcome.ROLLBACK)
    return world


async def test_each_filter_finds_what_it_says(stocked: World) -> None:
    world = stocked
    assert await ids(world, state=State.PARKED) == [named_id(f"p{number}") for number in range(3)]
    assert await ids(world, group="shop", state=State.PREPARED) == [named_id(f"t{number}") for number in range(3)]
    assert await ids(world, id=named_id("t1")[:20]) == [named_id("t1")]
    assert await ids(world, topic="points", key=b"1") == [named_id("t1")]
    assert await ids(world, cause=Cause.PRODUCER) == [named_id("done"), named_id("undone")]
    assert await ids(world, cause=Cause.POLICY) == []
    assert await ids(world, error="STATUS 502", state=State.PREPARED) == []


async def test_two_instances_find_what_one_finds() -> None:
    """On either instance, in the same order, with the oldest first if there is a limit."""
    first = Memory(shards=2, topics={"orders": 3}, owns={0})
    second = Memory(shards=2, owns={1}, beside=first)
    worlds = [await World.start(memory) for memory in (first, second)]
    world = worlds[0]
    await world.group()
    for number in range(20):
        await world.prepare(transaction_id=named_id(f"t{number:02}"))
        first.clock.advance(0.01)
    wanted = [named_id(f"t{number:02}") for number in range(20)]
    for asked in worlds:
        coordinator = asked.coordinator
        assert await ids(asked, id=named_id("t")[:13]) == wanted
        assert len(coordinator.shards.served) == 1
        some = await coordinator.list(ListQuery(id=named_id("t")[:13], limit=5), deadline=asked.deadline())
        assert (some.count, [one.id for one in some.transactions]) == (20, wanted[:5])
    for asked in worlds:
        await asked.stop()


class Log:
    """Half, and the tails of the served shards, as far as they go."""

    def __init__(self) -> None:
        self.served = [0, 1]
        self.stuck: set[int] = set()

    async def half_end(self, shard: int, *, deadline: float) -> int:
        assert deadline > asyncio.get_running_loop().time()
        return 7 + shard

    def get(self, number: int) -> Any:
        async def wait_for_tail(position: int, *, deadline: float) -> None:
            assert (position, bool(deadline)) == (7 + number, True)
            if number in self.stuck:
                raise KafkaUnavailableError(f"shard {number} was not read")

        return SimpleNamespace(wait_for_tail=wait_for_tail)


async def test_the_age_of_the_tail_grows_while_one_shard_cannot_be_read() -> None:
    """It is logged once; a shard that is served no more does not count."""
    half: Any = Log()

    def logged(event: str) -> Callable[[], bool]:
        return lambda: [entry["event"] for entry in seen].count(event) == 1

    with WallClock() as clock, capture_logs() as seen:
        tail = TailFreshness(half, half, late_s=100, every_s=0.01)
        assert tail.age_s < 100
        watching = asyncio.create_task(tail.watch())
        try:
            half.stuck.add(1)
            await asyncio.sleep(0.05)
            clock.advance(1000)
            await until_true(lambda: tail.is_late)
            await until_true(logged("tail_not_current"))
            assert seen[0]["error"] == "shard 1 was not read"
            half.stuck.clear()
            await until_true(lambda: not tail.is_late)
            await until_true(logged("tail_current_again"))
            half.stuck.add(1)
            half.served.remove(1)
            await asyncio.sleep(0.05)
            clock.advance(1000)
            await until_true(lambda: not tail.is_late)
        finally:
            watching.cancel()
    assert len(seen) <= 4
