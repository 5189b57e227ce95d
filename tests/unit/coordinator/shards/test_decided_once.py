"""An id is decided once, ever: an id whose outcome may be forgotten is not taken for a new one."""

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from halfway.client import transaction_id
from halfway.coordinator.requests import ListQuery, ServiceLimits
from halfway.protocol.errors import IdInFutureError, InvalidRequestError, OutcomeExpiredError, UnknownTransactionError
from halfway.protocol.records import Half
from halfway.protocol.transactions import Outcome, State
from tests.support.domain.histories import half_of
from tests.support.service.world import LIMITS, SHARDS, World

FEW = ServiceLimits(shards=SHARDS, outcome_horizon_s=60, max_outcomes_per_shard=1)


def born(world: World, name: str, age_s: float = 0) -> str:
    """Return the id for a name that was born so long ago by the clock."""
    return transaction_id(name, world.memory.clock.now_ms() - round(age_s * 1000))


async def commit(world: World, name: str) -> str:
    own = born(world, name)
    await world.prepare(transaction_id=own)
    await world.end(own, Outcome.COMMIT)
    await world.settled()
    return own


async def assert_refused(world: World, own: str) -> None:
    """Neither a prepare nor an end of the id is taken, by this owner and by the next one."""
    for restarts in range(2):
        with pytest.raises(OutcomeExpiredError, match="use a new id"):
            await world.prepare(transaction_id=own)
        with pytest.raises(OutcomeExpiredError):
            await world.end(own, Outcome.COMMIT)
        if not restarts:
            world = await world.restart()
    await world.stop()


async def test_an_unknown_id_that_was_born_before_the_horizon_is_refused(world: World) -> None:
    own = born(world, "one", 61)
    with pytest.raises(OutcomeExpiredError) as raised:
        await world.prepare(transaction_id=own)
    assert "60 s" in raised.value.detail
    await assert_refused(world, own)
    assert all(record.key != own for shard in world.memory.log.shards for record in shard.half.records)


async def test_an_id_that_was_born_within_the_horizon_is_new_and_unknown_before(world: World) -> None:
    own = born(world, "one", 59)
    with pytest.raises(UnknownTransactionError):
        await world.end(own, Outcome.COMMIT)
    assert (await world.prepare(transaction_id=own)).created
    world.memory.clock.advance(120)
    assert not (await world.prepare(transaction_id=own)).created, "a repeat of what is known, at any age"
    assert (await world.end(own, Outcome.COMMIT)).changed
    assert not (await world.end(own, Outcome.COMMIT)).changed, "its outcome is remembered from its end on"


@pytest.mark.parametrize("back_s", [0, 1, 30, 3600])
async def test_a_forgotten_id_is_refused_though_the_clock_is_set_back(world: World, back_s: float) -> None:
    own = await commit(world, "one")
    await world.scan(after_s=61)
    assert world.coordinator.shards.of(own).state.find(own) is None
    world.memory.clock.advance(-back_s)
    world.coordinator.clock_was_set()
    with pytest.raises((OutcomeExpiredError, IdInFutureError)):
        await world.prepare(transaction_id=own)
    assert len(world.memory.records("orders")) == 1


@pytest.mark.parametrize("back_s", [0, 60, 900])
async def test_an_id_whose_outcome_was_not_read_is_refused_though_the_clock_is_set_back(
    world: World, back_s: float
) -> None:
    """The clock is set back after the acquisition, rightly or not."""
    own = await commit(world, "one")
    await world.scan(after_s=61)
    await world.scan(after_s=61)
    world.memory.clock.advance(61)
    again = await world.restart()
    again.memory.clock.advance(-back_s)
    again.coordinator.clock_was_set()
    with pytest.raises((OutcomeExpiredError, IdInFutureError)):
        await again.prepare(transaction_id=own)
    await again.stop()


async def test_an_id_whose_outcome_was_forgotten_early_is_refused_and_a_younger_one_is_not(world: World) -> None:
    again = await world.restart(FEW)
    own = await commit(again, "one")
    again.memory.clock.advance(1)
    number = again.coordinator.shards.number_of(own)
    others = [born(again, f"other-{turn}") for turn in range(40)]
    for other in [one for one in others if again.coordinator.shards.number_of(one) == number][:3]:
        await again.prepare(transaction_id=other)
        await again.end(other, Outcome.ROLLBACK)
    await again.settled()
    await again.scan()
    assert again.coordinator.shards.of(own).state.find(own) is None
    with pytest.raises(OutcomeExpiredError):
        await again.prepare(transaction_id=own)
    with pytest.raises(OutcomeExpiredError):
        await again.end(own, Outcome.COMMIT)
    again.memory.clock.advance(0.001)
    assert (await again.prepare(transaction_id=born(again, "fresh"))).created
    await again.stop()


async def test_a_clock_that_was_ahead_at_the_start_and_is_set_right_refuses_no_new_id(world: World) -> None:
    """What was not read is not younger than the newest outcome that was."""
    for number in range(8):
        await commit(world, f"old-{number}")
    await world.scan(after_s=61)
    await world.scan(after_s=61)
    for number in range(8):
        await commit(world, f"new-{number}")
    world.memory.clock.advance(3600 + 61)
    again = await world.restart()
    again.memory.clock.advance(-3600)
    again.coordinator.clock_was_set()
    for number in range(8):
        assert (await again.prepare(transaction_id=born(again, f"next-{number}"))).created
    await again.stop()


async def test_an_id_of_the_future_is_refused_and_the_clock_is_named(world: World) -> None:
    """Instances and callers may differ by a minute."""
    assert (await world.prepare(transaction_id=born(world, "near", -60))).created
    own = born(world, "far", -61)
    with pytest.raises(IdInFutureError) as raised:
        await world.prepare(transaction_id=own)
    assert {"Date", "clock"} <= set(raised.value.detail.replace("'", " ").split())
    with pytest.raises(IdInFutureError, match="9999-12-31"):
        await world.prepare(transaction_id="ffffffff-ffff-7000-8000-000000000000")
    with pytest.raises(UnknownTransactionError):
        await world.end(own, Outcome.COMMIT)
    world.memory.clock.advance(1)
    assert (await world.prepare(transaction_id=own)).created
    world.memory.clock.advance(-3600)
    assert not (await world.prepare(transaction_id=own)).created, "it is known"


async def test_the_outcome_of_an_id_from_ahead_is_kept_a_horizon_after_its_birth(world: World) -> None:
    own = born(world, "one", -60)
    await world.prepare(transaction_id=own)
    await world.end(own, Outcome.COMMIT)
    await world.scan(after_s=61)
    assert not (await world.end(own, Outcome.COMMIT)).changed
    await world.scan(after_s=60)
    await assert_refused(world, own)


async def test_a_half_that_is_stored_after_the_horizon_of_its_id_is_prepared(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was new when it came."""
    begun: list[Callable[[], None]] = []
    append = world.memory.half_log.append
    monkeypatch.setattr(world.memory.half_log, "append", lambda *a, **given: begun.append(partial(append, *a, **given)))
    own = born(world, "one", 59)
    preparing = asyncio.create_task(world.prepare(transaction_id=own))
    await world.until(lambda: begun)
    await world.scan(after_s=2)
    begun[0]()
    assert (await preparing).created
    again = await world.restart()
    assert (await again.end(own, Outcome.COMMIT)).changed
    await again.stop()


async def test_a_prepare_before_the_horizon_waits_for_what_the_tail_has_not_read(world: World) -> None:
    """A former owner may have stored it."""
    prepared = await world.prepare(transaction_id=born(world, "one"))
    number = world.coordinator.shards.number_of(prepared.id)
    half = next(one.value for one in world.memory.log.shards[number].half.records if isinstance(one.value, Half))
    world.memory.clock.advance(61)
    again = await world.restart()
    own = born(again, "two", 61)
    number = again.coordinator.shards.number_of(own)
    again.memory.foreign_prepare(number, msgspec.structs.replace(half, id=own))
    assert not (await again.prepare(transaction_id=own)).created
    await again.stop()


@pytest.mark.parametrize("other", ["order-1", "0-0199a000-0000-7000-8000-000000000001", "X" * 32])
async def test_an_id_of_an_old_form_lives_on_in_its_log_and_none_is_taken_anew(world: World, other: str) -> None:
    number = world.coordinator.shards.number_of(other)
    world.memory.foreign_prepare(number, half_of(other, "A", world.memory.clock.now_ms()))
    await world.until(lambda: world.coordinator.shards.of(other).state.find(other))
    assert await world.state(other) is State.PREPARED
    listed = await world.coordinator.list(ListQuery(), deadline=world.deadline())
    assert [one.id for one in listed.transactions] == [other]
    assert (await world.end(other, Outcome.COMMIT)).changed
    assert not (await world.end(other, Outcome.COMMIT)).changed
    with pytest.raises(InvalidRequestError, match="UUIDv7") as raised:
        await world.prepare(transaction_id=other)
    assert raised.value.fields["errors"][0]["field"] == "id"  # type: ignore[index]
    again = await world.restart(LIMITS)
    assert await again.state(other) is State.COMMITTED
    await again.stop()
