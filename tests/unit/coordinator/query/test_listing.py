"""A list while transactions change: it is made in slices, and ends continue between them."""

import asyncio
from collections import Counter

import pytest

from halfway.coordinator.queries import queries as get_and_list
from halfway.coordinator.requests import ListQuery, Page
from halfway.protocol.records import PolicyOverrides
from halfway.protocol.transactions import Outcome, State
from tests.support.ids import named_id
from tests.support.service.world import World
from tests.support.surroundings import no_verdict

MANY = 120
PARKED_SOON = PolicyOverrides(first_check_after_s=1, check_interval_s=1, max_interval_s=1, max_checks=1)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make slices smaller than the number of transactions of a test."""
    monkeypatch.setattr(get_and_list, "_SLICE", 1)


async def start_list(world: World, state: State | None = None) -> "asyncio.Task[Page]":
    """Start a list. When this returns, the first slice of the first shard is read."""
    listing = asyncio.create_task(
        world.coordinator.list(ListQuery(limit=1000, state=state), deadline=world.deadline(20))
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not listing.done()
    return listing


def in_shard(world: World, ids: list[str]) -> list[str]:
    """Return the ids that belong to the first shard."""
    return [name for name in ids if world.coordinator.shards.number_of(name) == 0]


async def list_all(world: World, state: State | None = None) -> Page:
    return await world.coordinator.list(ListQuery(limit=1000, state=state), deadline=world.deadline(20))


def shown(page: Page) -> Counter[str]:
    return Counter(view.id for view in page.transactions)


@pytest.mark.parametrize("outcome", [Outcome.COMMIT, Outcome.ROLLBACK])
async def test_what_ends_while_a_list_is_made_is_listed_once(world: World, outcome: Outcome) -> None:
    """The first one of a shard was read as prepared, and ends before the outcomes are read."""
    ids = [(await world.prepare(transaction_id=named_id(f"t{n}"))).id for n in range(MANY)]
    listing = await start_list(world)
    for name in in_shard(world, ids)[:5]:
        await world.end(name, outcome)
    assert shown(await listing) == Counter(ids)


async def test_what_is_parked_or_resumed_while_a_list_is_made_is_listed_once(world: World) -> None:
    """One is parked when prepared ones are read, and prepared when parked ones are; others the other way round."""
    await world.group("asked", policy=PARKED_SOON)
    world.memory.caller.always(no_verdict())
    parked = [(await world.prepare(transaction_id=named_id(f"p{n}"), group="asked")).id for n in range(4)]
    for _ in range(3):
        await world.scan(after_s=2)
    assert set(shown(await list_all(world, State.PARKED))) == set(parked)
    ids = [(await world.prepare(transaction_id=named_id(f"t{n}"))).id for n in range(MANY)]
    soon = [(await world.prepare(transaction_id=named_id(f"s{n}"), group="asked")).id for n in range(4)]
    await world.scan(after_s=2)
    world.memory.clock.advance(2)

    listing = await start_list(world)
    for name in parked:
        await world.coordinator.resume(name, deadline=world.deadline())
    for shard in world.coordinator.shards.served:
        await world.coordinator.scan(shard, world.memory.clock.now_ms())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not listing.done()
    assert {await world.state(name) for name in soon} == {State.PARKED}
    assert shown(await listing) == Counter(parked + ids + soon)


async def test_others_have_their_turn_while_a_list_looks_through_what_does_not_match(world: World) -> None:
    for n in range(MANY):
        await world.prepare(transaction_id=named_id(f"t{n}"))
    query = ListQuery(limit=1000, error="nothing has this error")
    listing = asyncio.create_task(world.coordinator.list(query, deadline=world.deadline(20)))
    turns = 0
    while not listing.done():
        turns += 1
        await asyncio.sleep(0)
    assert (await listing).transactions == ()
    assert turns > MANY
