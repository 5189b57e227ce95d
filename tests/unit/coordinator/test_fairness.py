"""What callers share is divided among them: one that takes all it can leaves others their share."""

import asyncio

import pytest

from halfway.coordinator.fairness import Places, Shares, Turns
from halfway.protocol.errors import ShuttingDownError
from tests.support.waiting import GENEROUS_S


def until() -> float:
    return asyncio.get_running_loop().time() + GENEROUS_S


def test_one_caller_alone_may_hold_all() -> None:
    shares = Shares(10)
    shares.take("a", 10)
    assert (shares.room("a"), shares.total) == (0, 10)


def test_a_caller_below_its_share_gets_more_although_another_one_holds_all() -> None:
    shares = Shares(10)
    shares.take("a", 10)
    assert shares.room("b") == 5
    shares.take("b", 5)
    assert (shares.room("a"), shares.room("b"), shares.room("c")) == (0, 0, 3)
    shares.leave("a", 6)
    assert (shares.room("a"), shares.room("b")) == (1, 1)


def test_all_callers_together_hold_at_most_twice_the_bound() -> None:
    shares = Shares(100)
    for number in range(1000):
        shares.take(f"g{number}", shares.room(f"g{number}"))
    assert shares.total == 200
    for number in range(1000):
        shares.leave(f"g{number}", shares._held.get(f"g{number}", 0))
    assert (shares.total, shares.room("a")) == (0, 100)


async def test_places_are_given_to_the_callers_in_turn() -> None:
    """Ten of one caller wait before one of another, which gets the second place that is freed."""
    places, entered = Places(1), []
    assert places.take(1) == 1

    async def work(caller: str) -> None:
        async with places.place(caller, until=until()):
            entered.append(caller)

    async with asyncio.TaskGroup() as tasks:
        for caller in [*"aaaaaaaaaa", "b"]:
            tasks.create_task(work(caller))
        await asyncio.sleep(0)
        assert (places.waiting, places.waiting_of("a")) == (11, 10)
        places.leave()
    assert entered == ["a", "b", *"aaaaaaaaa"]
    assert places.taken == places.waiting == 0


async def test_a_place_that_is_given_to_a_cancelled_caller_is_passed_on() -> None:
    places = Places(1)
    assert places.take(1) == 1
    first, second = (asyncio.create_task(places.enter("a", until=until())) for _ in range(2))
    await asyncio.sleep(0)
    places.leave()
    first.cancel()
    await second
    assert (places.taken, places.waiting) == (1, 0)


async def test_nobody_waits_for_a_place_past_its_time_or_after_the_close() -> None:
    places = Places(1)
    assert places.take(1) == 1
    with pytest.raises(TimeoutError):
        await places.enter("a", until=asyncio.get_running_loop().time())
    waiting = asyncio.create_task(places.enter("a", until=until()))
    await asyncio.sleep(0)
    places.close(ShuttingDownError)
    for entering in (waiting, places.enter("b", until=until())):
        with pytest.raises(ShuttingDownError):
            await entering


async def test_one_slice_is_done_in_a_turn_of_the_loop_and_callers_take_turns() -> None:
    """Thirty works of one caller have ten slices each; the two slices of another are among the first ones."""
    turns, done = Turns(), []
    loop_turns = 0

    async def work(caller: str, slices: int) -> None:
        for _ in range(slices):
            await turns.next(caller)
            done.append((caller, loop_turns))

    async def count() -> None:
        nonlocal loop_turns
        while True:
            await asyncio.sleep(0)
            loop_turns += 1

    counting = asyncio.create_task(count())
    async with asyncio.TaskGroup() as tasks:
        for _ in range(30):
            tasks.create_task(work("a", 10))
        tasks.create_task(work("b", 2))
    counting.cancel()
    assert len(done) == 302
    assert len({turn for _, turn in done}) >= 301  # the first one may be done in the turn in which it was asked for
    assert [caller for caller, _ in done[:6]].count("b") == 2


async def test_a_caller_that_gives_up_its_turn_stops_nobody() -> None:
    turns = Turns()
    await turns.next("a")
    given_up = asyncio.create_task(turns.next("b"))
    following = asyncio.create_task(turns.next("c"))
    await asyncio.sleep(0)
    given_up.cancel()
    await following
    for _ in range(3):
        await asyncio.sleep(0)
    await asyncio.wait_for(turns.next("a"), GENEROUS_S)
