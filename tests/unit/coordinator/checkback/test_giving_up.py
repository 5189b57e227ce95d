"""The policy does nothing against a verdict, and rolls back only transactions that were checked."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from halfway.coordinator.ports import CheckReply, CheckRequest
from halfway.coordinator.requests import LeasedCheck, ListQuery, ServiceLimits
from halfway.protocol.errors import HalfwayError, NotAuthorisedError
from halfway.protocol.records import CheckMode, OnExhausted, OpKind, PolicyOverrides
from halfway.protocol.transactions import Cause, Outcome, State
from tests.support.service.world import ROLLBACK_AT_LAST, SHARDS, World
from tests.support.surroundings import unreachable, verdict
from tests.unit.coordinator.resolve.test_ending import ops

SHORT_LIVED = PolicyOverrides(
    first_check_after_s=5,
    check_interval_s=10,
    max_interval_s=40,
    max_checks=9,
    max_age_s=40,
    on_exhausted=OnExhausted.ROLLBACK,
)


@pytest.fixture
async def pull_world() -> AsyncIterator[World]:
    """One instance with a group that fetches its checks and chose rollback after two checks."""
    world = await World.start()
    await world.group(mode=CheckMode.PULL, policy=ROLLBACK_AT_LAST)
    yield world
    await world.stop()


async def fetch_due(world: World) -> list[LeasedCheck]:
    """Fetch the due checks, and wait until they are recorded."""
    checks = await world.coordinator.lease_checks("shop", at_most=10, wait_s=0)
    await world.scan()
    return list(checks)


async def fetch_next(world: World) -> list[LeasedCheck]:
    """Advance the clock to the next checks, and fetch them."""
    await world.scan(after_s=60)
    return await fetch_due(world)


async def commit_refused(world: World, check: LeasedCheck) -> None:
    """Answer a check with commit while the topic cannot be written."""
    world.memory.faults.denied_topics.add("orders")
    with pytest.raises(NotAuthorisedError):
        await world.end(check.id, Outcome.COMMIT, check_id=check.check_id)


async def test_a_fetched_check_that_said_commit_is_never_rolled_back_by_policy(pull_world: World) -> None:
    """Each commit was refused because of its topic: the verdict is recorded; the policy parks, after a restart too."""
    prepared = await pull_world.prepare()
    for _ in range(2):
        await pull_world.scan(after_s=60)
        for check in await fetch_due(pull_world):
            await commit_refused(pull_world, check)
            await pull_world.scan()
    shown = await pull_world.get(prepared.id)
    assert (shown.commit_verdict, shown.checks) == (True, 2)

    again = await pull_world.restart()
    again.memory.faults.denied_topics.add("orders")
    for _ in range(3):
        await again.scan(after_s=60)
    shown = await again.get(prepared.id)
    assert (shown.state, shown.commit_verdict) == (State.PARKED, True)
    assert "commit was said" in (shown.reason or "")
    again.memory.faults.denied_topics.clear()
    assert (await again.end(prepared.id, Outcome.COMMIT)).changed
    await again.stop()


async def test_a_fetched_check_whose_caller_went_away_is_kept_too(pull_world: World) -> None:
    """The connection broke during the commit, and then the topic refused it."""
    prepared = await pull_world.prepare()
    await pull_world.scan(after_s=6)
    (check,) = await fetch_due(pull_world)
    with pull_world.memory.faults.lane_held():
        ending = asyncio.create_task(pull_world.end(check.id, Outcome.COMMIT, check_id=check.check_id))
        await pull_world.until(lambda: check.id in pull_world.coordinator.shards.claims)
        ending.cancel()
        await asyncio.wait([ending])
        pull_world.memory.faults.denied_topics.add("orders")
    await pull_world.until(lambda: OpKind.VERDICT in [op.kind for op in ops(pull_world, prepared.id)])


async def test_a_refused_commit_of_what_is_parked_is_remembered_when_it_is_resumed(pull_world: World) -> None:
    """The answer comes after the policy gave up: after a restart and a resume nothing rolls it back."""
    await pull_world.group(mode=CheckMode.PULL, policy=msgspec.structs.replace(ROLLBACK_AT_LAST, max_checks=9))
    prepared = await pull_world.prepare()
    await pull_world.scan(after_s=6)
    (check,) = await fetch_due(pull_world)
    await pull_world.group(
        mode=CheckMode.PULL, policy=PolicyOverrides(first_check_after_s=5, max_checks=1, check_interval_s=5)
    )
    await pull_world.scan(after_s=100)
    await pull_world.scan()
    assert await pull_world.state(prepared.id) is State.PARKED
    await commit_refused(pull_world, check)
    await pull_world.until(lambda: len(ops(pull_world, prepared.id)) == 3)
    assert [op.kind for op in ops(pull_world, prepared.id)] == [OpKind.CHECKED, OpKind.PARKED, OpKind.PARKED]

    again = await pull_world.restart()
    again.memory.faults.denied_topics.add("orders")
    shown = await again.get(prepared.id)
    assert (shown.state, shown.commit_verdict) == (State.PARKED, True)
    await again.group(mode=CheckMode.PULL, policy=ROLLBACK_AT_LAST)
    await again.coordinator.resume(prepared.id, deadline=again.deadline())
    for _ in range(5):
        await again.scan(after_s=60)
        await fetch_due(again)
    assert await again.state(prepared.id) is State.PARKED
    await again.stop()


@pytest.mark.parametrize("turns", [0, 1, 4, 20])
async def test_a_verdict_that_arrives_as_the_age_ends_is_not_rolled_back(world: World, turns: int) -> None:
    """The check was in flight all the time; the scan comes some turns of the event loop after its answer."""
    await world.group(policy=SHORT_LIVED)
    prepared = await world.prepare()
    world.memory.faults.denied_topics.add("orders")
    reply: asyncio.Future[CheckReply] = asyncio.get_running_loop().create_future()

    async def late(_: CheckRequest) -> CheckReply:
        return await reply

    world.memory.caller.answer = late
    await world.scan(after_s=6)
    assert len(world.memory.caller.requests) == 1
    await world.scan(after_s=40)
    assert await world.state(prepared.id) is State.PREPARED
    reply.set_result(verdict(Outcome.COMMIT))
    for _ in range(turns):
        await asyncio.sleep(0)
    await world.scan()
    await world.scan(after_s=2)
    shown = await world.get(prepared.id)
    assert (shown.state, shown.commit_verdict) == (State.PARKED, True)
    assert [op.kind for op in ops(world, prepared.id)] == [OpKind.VERDICT, OpKind.PARKED]


async def test_a_verdict_overtakes_a_rollback_by_policy_that_waits_for_the_lane(pull_world: World) -> None:
    """Its lease had ended, and the policy had decided; nothing was written yet, so the verdict wins."""
    prepared = await pull_world.prepare()
    checks = [check for _ in range(2) for check in await fetch_next(pull_world)]
    with pull_world.memory.faults.lane_held():
        await pull_world.scan(after_s=60)
        assert prepared.id in pull_world.coordinator.shards.claims
        ending = asyncio.create_task(pull_world.end(prepared.id, Outcome.COMMIT, check_id=checks[0].check_id))
        await asyncio.sleep(0)
    assert (await ending).state is State.COMMITTED
    assert [op.kind for op in ops(pull_world, prepared.id)] == [OpKind.CHECKED] * 2 + [OpKind.COMMITTED]


async def test_a_rollback_by_policy_is_decided_again_after_a_lost_lane(pull_world: World) -> None:
    """A decision from before the loss of the lane is not written after a verdict that came in the meantime."""
    prepared = await pull_world.prepare()
    checks = [check for _ in range(2) for check in await fetch_next(pull_world)]
    pull_world.memory.faults.lose_next_batch(written=False)
    pull_world.memory.clock.advance(60)
    await pull_world.coordinator.scan(0, pull_world.memory.clock.now_ms())
    await pull_world.coordinator.scan(1, pull_world.memory.clock.now_ms())
    await pull_world.until(lambda: pull_world.memory.observer.count("lane_failed") == 1)
    await pull_world.until(lambda: len(pull_world.coordinator.shards.served) == len(pull_world.memory.log.shards))
    assert (await pull_world.end(prepared.id, Outcome.COMMIT, check_id=checks[0].check_id)).changed
    assert [op.kind for op in ops(pull_world, prepared.id)] == [OpKind.CHECKED] * 2 + [OpKind.COMMITTED]


@pytest.mark.parametrize("chosen", [OnExhausted.PARK, OnExhausted.ROLLBACK])
@pytest.mark.parametrize("answer", [Outcome.COMMIT, Outcome.ROLLBACK, Outcome.UNKNOWN, None], ids=str)
async def test_after_an_outage_longer_than_max_age_the_group_is_asked(
    world: World, answer: Outcome | None, chosen: OnExhausted
) -> None:
    """Nobody was asked meanwhile. One check that brings nothing, so late, is no reason to roll back."""
    await world.group(policy=msgspec.structs.replace(ROLLBACK_AT_LAST, on_exhausted=chosen))
    prepared = await world.prepare()
    world.memory.clock.advance(1001)
    again = await world.restart()
    again.memory.caller.always(unreachable() if answer is None else verdict(answer))
    for after_s in (0, 0) if answer in (Outcome.COMMIT, Outcome.ROLLBACK) else (0, 0, 41, 41, 300, 0):
        await again.scan(after_s=after_s)
    ended: dict[Outcome | None, State] = {Outcome.COMMIT: State.COMMITTED, Outcome.ROLLBACK: State.ROLLED_BACK}
    shown = await again.get(prepared.id)
    assert shown.state is ended.get(answer, State.PARKED)
    if answer is None:
        assert shown.checks == 0
    if shown.state is State.PARKED:
        assert ops(again, prepared.id)[-1].cause is Cause.POLICY
        assert (shown.reason or "").startswith("older than max_age_s 1000")
        no_check = "no check was sent" + (" before" if answer else "")
        assert (f"not rolled back, because {no_check}" in (shown.reason or "")) == (chosen is OnExhausted.ROLLBACK)
    await again.stop()


async def test_the_reason_for_parking_names_the_last_error(world: World) -> None:
    """The filter on the error finds the transaction, also after a restart."""
    await world.group(policy=PolicyOverrides(first_check_after_s=1, check_interval_s=1, max_age_s=4))
    world.memory.caller.always(unreachable("shop:9000: the connection was refused"))
    prepared = await world.prepare()
    for _ in range(5):
        await world.scan(after_s=1)
    reason = "older than max_age_s 4; last error: shop:9000: the connection was refused"
    assert (await world.get(prepared.id)).reason == reason
    assert ops(world, prepared.id)[-1].remark == reason
    again = await world.restart()
    for error in ("refused", "older"):
        page = await again.coordinator.list(
            ListQuery(state=State.PARKED, error=error, limit=10), deadline=again.deadline()
        )
        assert [one.id for one in page.transactions] == [prepared.id]
    await again.stop()


@pytest.mark.parametrize("clock_is_set", [False, True])
async def test_a_lease_has_its_time_before_policy_rolls_back(pull_world: World, clock_is_set: bool) -> None:
    """Also if the clock jumps ahead, so that the age and the lease seem to have ended."""
    await pull_world.group(mode=CheckMode.PULL, policy=SHORT_LIVED)
    prepared = await pull_world.prepare()
    if not clock_is_set:
        pull_world.memory.clock.advance(33)
    await pull_world.scan(after_s=6)
    (check,) = await fetch_due(pull_world)
    if clock_is_set:
        pull_world.memory.clock.advance(3600)
        pull_world.coordinator.clock_was_set()
    await pull_world.scan(after_s=20)
    assert await pull_world.state(prepared.id) is State.PREPARED
    await pull_world.scan(after_s=9)
    assert await pull_world.state(prepared.id) is State.PREPARED
    await pull_world.scan(after_s=2)
    await pull_world.scan()
    shown = await pull_world.get(prepared.id)
    assert (shown.state, shown.cause, shown.checks) == (State.ROLLED_BACK, Cause.POLICY, 1)
    with pytest.raises(HalfwayError):
        await pull_world.end(prepared.id, Outcome.COMMIT, check_id=check.check_id)


@pytest.mark.parametrize("answer", [Outcome.COMMIT, Outcome.UNKNOWN, None], ids=["commit", "unknown", "unreachable"])
@pytest.mark.parametrize("max_checks", [9, 1], ids=["by age", "by number"])
@pytest.mark.parametrize("seen", [True, False], ids=["a jump of the clock", "the process stood still"])
async def test_after_a_gap_policy_asks_again_before_it_rolls_back(
    world: World, answer: Outcome | None, *, max_checks: int, seen: bool
) -> None:
    """A machine was suspended or a clock stepped past `max_age_s`. The service has committed since it said unknown."""
    await world.group(policy=msgspec.structs.replace(SHORT_LIVED, max_checks=max_checks))
    prepared = await world.prepare()
    world.memory.caller.always(verdict(Outcome.UNKNOWN))
    await world.scan(after_s=6)
    world.memory.caller.always(unreachable() if answer is None else verdict(answer))
    world.memory.clock.advance(59)
    if seen:
        world.coordinator.clock_was_set()
    for after_s in (0, 0, 41, 0, 41, 0):
        await world.scan(after_s=after_s)
    asked, last = len(world.memory.caller.requests), ops(world, prepared.id)[-1].kind
    if not seen and max_checks == 1:  # every check was sent, and the last one had its time
        assert (asked, last) == (1, OpKind.ROLLED_BACK)
        return
    assert asked >= 2
    assert last is {Outcome.COMMIT: OpKind.COMMITTED, Outcome.UNKNOWN: OpKind.ROLLED_BACK, None: OpKind.PARKED}[answer]


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "not to be reached"])
async def test_a_new_owner_gives_up_by_what_its_own_check_brings(*, asked: bool) -> None:
    """It rolls back if a check was sent without a verdict, and parks if none could be sent."""
    world = await World.start()
    await world.group(policy=SHORT_LIVED)
    prepared = await world.prepare()
    await world.scan(after_s=6)
    await world.until(lambda: [op.kind for op in ops(world, prepared.id)] == [OpKind.CHECKED])

    again = await world.restart()
    again.memory.caller.always(verdict(Outcome.UNKNOWN) if asked else unreachable())
    for after_s in (60, 0, 41, 0):
        await again.scan(after_s=after_s)
    assert await again.state(prepared.id) is (State.ROLLED_BACK if asked else State.PARKED)
    if not asked:
        assert "since the shard was taken over" in ((await again.get(prepared.id)).reason or "")
    await again.stop()


async def test_a_new_owner_tries_again_to_ask_before_it_parks() -> None:
    """The endpoint was unavailable for a moment, as after a common failure: that is no reason to park."""
    world = await World.start()
    await world.group(policy=SHORT_LIVED)
    prepared = await world.prepare()
    await world.scan(after_s=6)
    await world.until(lambda: [op.kind for op in ops(world, prepared.id)] == [OpKind.CHECKED])

    again = await world.restart()
    again.memory.caller.always(unreachable())
    await again.scan(after_s=60)
    await again.scan()
    again.memory.caller.always(verdict(Outcome.COMMIT))
    for after_s in (11, 0, 31, 0):
        await again.scan(after_s=after_s)
    assert await again.state(prepared.id) is State.COMMITTED
    await again.stop()


async def test_what_an_open_breaker_holds_back_is_parked_when_nobody_could_be_asked(world: World) -> None:
    """A new owner must ask before a rollback. One probe at a time is sent: most are never asked."""
    await world.group(policy=SHORT_LIVED)
    world.memory.caller.always(verdict(Outcome.UNKNOWN))
    prepared = [await world.prepare() for _ in range(30)]
    await world.scan(after_s=6)
    again = await world.restart(ServiceLimits(shards=SHARDS, outcome_horizon_s=60, breaker_failures=1))
    again.memory.caller.always(unreachable())
    for _ in range(20):
        await again.scan(after_s=5)
    assert [await again.state(one.id) for one in prepared] == [State.PARKED] * len(prepared)
    await again.stop()
