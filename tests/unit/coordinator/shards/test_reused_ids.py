"""A client may use an id again: nothing is lost, doubled or ended by records of the id's earlier transaction."""

import asyncio

import pytest

from halfway.coordinator.requests import ServiceLimits
from halfway.memory import no_verdict, verdict
from halfway.protocol.errors import OverloadedError
from halfway.protocol.records import Half
from halfway.protocol.transactions import Outcome, State
from tests.support.service.world import LIMITS, SHARDS, World

FEW = ServiceLimits(shards=SHARDS, outcome_horizon_s=60, max_outcomes_per_shard=1)


def in_shard_of(world: World, name: str, prefix: str) -> list[str]:
    """Return ids of the same shard."""
    shards = world.coordinator.shards
    names = [f"{prefix}-{number}" for number in range(50)]
    return [one for one in names if shards.number_of(one) == shards.number_of(name)]


@pytest.fixture
async def crowded(world: World) -> World:
    """A coordinator that has forgotten the outcome of `one`, committed, before the horizon."""
    again = await world.restart(FEW)
    await again.prepare(transaction_id="one")
    await again.end("one", Outcome.COMMIT)
    again.memory.clock.advance(1)
    for other in in_shard_of(again, "one", "other")[:3]:
        await again.prepare(transaction_id=other)
        await again.end(other, Outcome.ROLLBACK)
    await again.scan()
    shards = again.coordinator.shards
    assert shards.get(shards.number_of("one")).state.find("one") is None
    return again


async def assert_prepared_for_the_next_owner(world: World, limits: ServiceLimits = LIMITS) -> None:
    """Restart, and look at `one`."""
    following = await world.restart(limits)
    await following.scan()
    assert await following.state("one") is State.PREPARED
    await following.stop()


async def test_an_id_whose_outcome_was_forgotten_early_is_refused_until_the_horizon(crowded: World) -> None:
    """Accepted, a repeat would be committed again, and the next owner would remove what was acknowledged."""
    with pytest.raises(OverloadedError, match="HALFWAY_MAX_OUTCOMES_PER_SHARD"):
        await crowded.prepare(transaction_id="one")
    fresh = in_shard_of(crowded, "one", "fresh")[0]
    assert (await crowded.prepare(transaction_id=fresh)).created
    await crowded.scan(after_s=60)
    assert (await crowded.prepare(transaction_id="one")).created
    await assert_prepared_for_the_next_owner(crowded, FEW)


async def test_an_id_that_was_forgotten_early_may_be_used_though_the_clock_is_set_back_after_the_horizon(
    crowded: World,
) -> None:
    await crowded.scan(after_s=60)
    await crowded.scan(after_s=0)
    crowded.memory.clock.advance(-30)
    crowded.coordinator.clock_was_set()
    assert (await crowded.prepare(transaction_id="one")).created
    await assert_prepared_for_the_next_owner(crowded, FEW)


@pytest.mark.parametrize("back_s", [60, 62, 300, 900])
async def test_an_owner_that_did_not_read_an_old_outcome_dates_no_prepare_within_its_horizon(
    world: World, back_s: float
) -> None:
    """The clock is set back after the acquisition, rightly or not; the next owner reads the outcome too."""
    await world.prepare(transaction_id="one")
    await world.end("one", Outcome.COMMIT)
    await world.scan()
    world.memory.clock.advance(61)
    second = await world.restart()
    second.memory.clock.advance(-back_s)
    second.coordinator.clock_was_set()
    assert (await second.prepare(transaction_id="one")).created
    await assert_prepared_for_the_next_owner(second)


async def test_after_the_clock_was_set_back_checks_count_from_the_prepare(world: World) -> None:
    """Sent at once, a check could roll back what the producer has not decided yet."""
    await world.prepare(transaction_id="one")
    await world.end("one", Outcome.COMMIT)
    await world.scan(after_s=600)
    await world.scan(after_s=0)
    world.memory.clock.advance(-700)
    world.coordinator.clock_was_set()
    world.memory.caller.always(verdict(Outcome.ROLLBACK))
    name = in_shard_of(world, "one", "fresh")[0]
    await world.prepare(transaction_id=name)
    await world.scan(after_s=1)
    assert world.memory.caller.requests == []
    assert await world.state(name) is State.PREPARED
    await world.scan(after_s=5)
    assert len(world.memory.caller.requests) == 1


async def test_a_correction_that_is_written_again_removes_no_later_transaction(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane is lost after a stray was corrected, and the outcome passes the horizon before it is corrected again.

    The half of the later transaction is in the log already, but neither its acknowledgement nor the tail has come.
    """
    await world.prepare(transaction_id="one")
    shards, membership = world.coordinator.shards, world.memory.membership
    number = shards.number_of("one")
    half = world.memory.log.shards[number].half.records[-1].value
    assert isinstance(half, Half)
    await world.end("one", Outcome.COMMIT)
    world.memory.foreign_prepare(number, half)  # the late write of a paused former owner
    before = shards.get(number)
    await world.until(before.state.strays)
    world.memory.faults.lose_next_batch(written=True)
    await world.coordinator.scan(number, world.memory.clock.now_ms())
    await world.until(lambda: shards.find(number) not in (None, before))
    with world.memory.faults.lane_held():
        await world.until(lambda: "one" in shards.claims and shards.claims["one"].write is not None)
        assert not shards.get(number).state.strays()  # it is corrected already
        world.memory.clock.advance(61)
        await world.coordinator.scan(number, world.memory.clock.now_ms())
        monkeypatch.setattr(membership, "_tail", lambda *_: None)  # the tail is a moment behind
        append, acknowledged, stored = world.memory.half_log._append, asyncio.Event(), asyncio.Event()

        async def slowly(shard: int, half: Half) -> int:
            offset = await append(shard, half)
            stored.set()
            await acknowledged.wait()
            return offset

        monkeypatch.setattr(world.memory.half_log, "_append", slowly)
        preparing = asyncio.create_task(world.prepare(transaction_id="one"))
        storing = asyncio.create_task(stored.wait())
        await asyncio.wait([preparing, storing], return_when=asyncio.FIRST_COMPLETED)
        storing.cancel()
    await world.until(lambda: "one" not in shards.claims)
    monkeypatch.undo()
    membership._tails[number].wake()
    acknowledged.set()
    again = await preparing
    assert again.created is (await world.state("one") is State.PREPARED)
    assert again.created or again.state is State.COMMITTED  # not forgotten yet


async def test_an_id_that_was_forgotten_early_is_refused_though_the_clock_is_set_ahead(crowded: World) -> None:
    """As an outcome that is still remembered is."""
    crowded.memory.clock.advance(3600)
    crowded.coordinator.clock_was_set()
    await crowded.scan()
    with pytest.raises(OverloadedError):
        await crowded.prepare(transaction_id="one")


async def test_an_id_that_is_forgotten_early_after_the_clock_was_set_ahead_is_refused(world: World) -> None:
    again = await world.restart(FEW)
    await again.prepare(transaction_id="one")
    await again.end("one", Outcome.COMMIT)
    again.memory.clock.advance(3600)
    again.coordinator.clock_was_set()
    for other in in_shard_of(again, "one", "other")[:3]:
        await again.prepare(transaction_id=other)
        await again.end(other, Outcome.ROLLBACK)
    await again.scan()
    with pytest.raises(OverloadedError):
        await again.prepare(transaction_id="one")


async def dated_ahead(world: World, seconds: float) -> World:
    """Acquire the shards while the clock is ahead, and set it back."""
    world.memory.clock.advance(seconds)
    again = await world.restart()
    again.memory.clock.advance(-seconds)
    again.coordinator.clock_was_set()
    again.memory.caller.always(no_verdict())
    return again


@pytest.mark.parametrize("ahead_s, left_s", [(3600, 3000), (900, 55)])
async def test_after_a_resume_checks_count_from_the_clock(world: World, ahead_s: float, left_s: float) -> None:
    again = await dated_ahead(world, ahead_s)
    prepared_at = (await again.prepare(transaction_id="one")).prepared_at
    while await again.state("one") is not State.PARKED:
        await again.scan(after_s=10)
    again.memory.clock.set(prepared_at - round(left_s * 1000))
    sent = len(again.memory.caller.requests)
    await again.coordinator.resume("one", deadline=again.deadline())
    await again.scan(after_s=1)
    assert len(again.memory.caller.requests) == sent, "at once"
    await again.scan(after_s=5)
    assert len(again.memory.caller.requests) == sent + 1, "late"


async def test_the_age_of_what_is_dated_ahead_counts_from_the_clock(world: World) -> None:
    again = await dated_ahead(world, 3600)
    prepared = await again.prepare(transaction_id="one")
    again.memory.clock.advance(100)
    shards = again.coordinator.shards
    (stats,) = [one for one in shards.stats() if one.shard == shards.number_of(prepared.id)]
    assert stats.oldest_pending_s == 100
