"""Checks that a group fetches: leases, waiting polls, and the callers that get a check."""

import asyncio
from dataclasses import replace
from itertools import chain, repeat

import msgspec
import pytest

from halfway.coordinator.access import KeyedAccess
from halfway.coordinator.requests import GroupSpec, Prepare
from halfway.protocol.errors import InvalidRequestError, UnauthenticatedError
from halfway.protocol.keys import MasterSecret
from halfway.protocol.principal import PEER, Principal, PrincipalKind
from halfway.protocol.records import CheckMode, Message
from halfway.protocol.transactions import Outcome, State
from tests.support.service.broker import Memory
from tests.support.service.world import LIMITS, QUICK, World


async def test_a_lease_that_passed_is_handed_out_again(world: World) -> None:
    """A producer that fetches a check and does not answer gets it again, until the checks are exhausted."""
    await world.group("puller", mode=CheckMode.PULL, policy=QUICK)
    prepared = await world.prepare(group="puller")
    attempts = []
    for _ in range(200):
        await world.scan(after_s=1)
        attempts += [check.attempt for check in await world.coordinator.lease_checks("puller", at_most=10, wait_s=0)]
    assert attempts == [1, 2, 3]
    assert await world.state(prepared.id) is State.PARKED


async def test_more_checks_than_wait_at_once_are_given_up_if_nobody_fetches() -> None:
    """What was parked makes room for the others, each of which may be fetched before it is parked."""
    limits = replace(LIMITS, check_concurrency=1)
    world = await World.start(limits=limits)
    await world.group("puller", mode=CheckMode.PULL, policy=QUICK)
    prepared = [(await world.prepare(group="puller")).id for _ in range(2 * limits.check_queue)]
    for _ in range(60):
        await world.scan(after_s=30)
    assert {await world.state(each) for each in prepared} == {State.PARKED}
    await world.stop()


async def test_a_check_that_a_worker_has_is_not_handed_to_a_second_one(world: World) -> None:
    """A manual check in the meantime counts no check. After the answer or the end of the lease it is free again."""
    await world.group("puller", mode=CheckMode.PULL, policy=QUICK)
    prepared = await world.prepare(group="puller")

    async def check_now() -> list[tuple[int, str]]:
        await world.coordinator.check(prepared.id, deadline=world.deadline())
        await world.scan()
        found = await world.coordinator.lease_checks("puller", at_most=10, wait_s=0)
        return [(check.attempt, check.check_id) for check in found]

    [(attempt, first)] = await check_now()
    assert attempt == 1
    assert await check_now() == []
    await world.scan(after_s=29)
    assert await check_now() == []
    assert (await world.get(prepared.id)).checks == 1
    await world.end(prepared.id, Outcome.UNKNOWN, check_id=first)
    [(attempt, _)] = await check_now()
    assert attempt == 2
    assert await check_now() == []
    await world.scan(after_s=31)
    assert [attempt for attempt, _ in await check_now()] == [3]


async def test_a_waiting_poll_ends_if_nobody_wants_the_check_that_comes_due(world: World) -> None:
    """For example a client that no longer reads: the poll takes no check, ends, and the event loop continues."""
    await world.group("puller", mode=CheckMode.PULL, policy=QUICK)
    await world.prepare(group="puller")
    asked = 0

    def is_connected() -> bool:
        nonlocal asked
        asked += 1
        assert asked < 100, "the poll asks again and again"
        return False

    poll = asyncio.create_task(
        world.coordinator.lease_checks("puller", at_most=10, wait_s=60, is_connected=is_connected)
    )
    await asyncio.sleep(0.01)
    await world.scan(after_s=6)
    assert list(await poll) == []
    assert len(await world.coordinator.lease_checks("puller", at_most=10, wait_s=0)) == 1


async def test_a_poll_that_nobody_waits_for_takes_no_check(world: World) -> None:
    """The check goes to the next poll, and only then counts as sent."""
    await world.group("puller", mode=CheckMode.PULL, policy=QUICK)
    prepared = await world.prepare(group="puller")
    await world.scan(after_s=6)
    looks = chain([True], repeat(False))
    for is_connected in (lambda: False, lambda: next(looks)):
        assert not await world.coordinator.lease_checks("puller", at_most=10, wait_s=0, is_connected=is_connected)
        assert (await world.get(prepared.id)).checks == 0
    [check] = await world.coordinator.lease_checks("puller", at_most=10, wait_s=0)
    assert check.attempt == 1


async def test_a_group_that_is_called_cannot_poll(world: World) -> None:
    """The error names the remedy."""
    with pytest.raises(InvalidRequestError, match="pull"):
        await world.coordinator.lease_checks("shop", at_most=1, wait_s=0)


async def test_two_polls_never_get_the_same_check(world: World) -> None:
    """Concurrent polls get different checks."""
    await world.group("puller", mode=CheckMode.PULL, policy=QUICK)
    prepared = {(await world.prepare(group="puller")).id for _ in range(20)}
    await world.scan(after_s=6)
    polls = await asyncio.gather(*(world.coordinator.lease_checks("puller", at_most=7, wait_s=0.1) for _ in range(5)))
    handed_out = [check.id for poll in polls for check in poll]
    assert sorted(handed_out) == sorted(prepared)


async def test_a_waiting_poll_ends_once_its_key_is_revoked() -> None:
    """Long before its time ends, and with no check: a check that becomes due later goes to permitted callers only."""
    memory = Memory(shards=2, topics={"orders": 1})
    memory.authority = KeyedAccess(memory.keys.table, [MasterSecret(b"s" * 32)], memory.clock)
    world = await World.start(memory)
    spec = GroupSpec(name="puller", mode=CheckMode.PULL, urls=(), topics=("orders",), policy=QUICK)
    await world.coordinator.put_group(spec, deadline=world.deadline(), principal=PEER)
    order = Prepare(group="puller", messages=(Message(topic="orders", key=b"k", value=b"v"),))
    await world.coordinator.prepare(order, deadline=world.deadline(), principal=PEER)
    holders = [Principal(kind=PrincipalKind.GROUP, name="puller", key_id=key_id) for key_id in ("revoked", "valid")]
    revoked, valid = (
        asyncio.create_task(world.coordinator.lease_checks("puller", at_most=1, wait_s=3600, principal=holder))
        for holder in holders
    )
    await asyncio.sleep(0.01)
    memory.keys.table.apply("revoked", None)
    with pytest.raises(UnauthenticatedError, match="revoked"):
        await revoked
    await world.scan(after_s=6)
    assert len(await valid) == 1
    await world.stop()


async def test_after_unknown_the_next_check_comes_by_the_policy_not_after_the_lease(world: World) -> None:
    """When the last one is answered so, nothing delays the parking of its transaction."""
    await world.group("puller", mode=CheckMode.PULL, policy=QUICK)
    prepared = await world.prepare(group="puller")
    await world.scan(after_s=5)
    for attempt in (1, 2):
        [check] = await world.coordinator.lease_checks("puller", at_most=10, wait_s=0)
        assert check.attempt == attempt
        await world.scan()
        await world.end(prepared.id, Outcome.UNKNOWN, check_id=check.check_id)
        await world.scan(after_s=8 * attempt)  # 10 s, then 20 s, with a jitter of a tenth
        assert await world.coordinator.lease_checks("puller", at_most=10, wait_s=0) == []
        await world.scan(after_s=3 * attempt)
    await world.group("puller", mode=CheckMode.PULL, policy=msgspec.structs.replace(QUICK, max_age_s=40))
    [check] = await world.coordinator.lease_checks("puller", at_most=10, wait_s=0)
    await world.scan(after_s=5)
    assert (await world.get(prepared.id)).checks == 3
    assert await world.state(prepared.id) is State.PREPARED, "it is too old, but a worker has its check"
    await world.end(prepared.id, Outcome.UNKNOWN, check_id=check.check_id)
    await world.scan()
    await world.scan()
    assert await world.state(prepared.id) is State.PARKED


async def test_an_answer_that_comes_before_its_lease_is_noted_ends_the_lease(world: World) -> None:
    """The lane is slow: the check is recorded after its answer, which does not restore the lease."""
    await world.group("puller", mode=CheckMode.PULL, policy=QUICK)
    prepared = await world.prepare(group="puller")
    await world.scan(after_s=5)
    with world.memory.faults.lane_held():
        [check] = await world.coordinator.lease_checks("puller", at_most=10, wait_s=0)
        answer = asyncio.create_task(world.end(prepared.id, Outcome.UNKNOWN, check_id=check.check_id))
        await world.scan()
    await answer
    await world.scan(after_s=1)
    assert (await world.get(prepared.id)).checks == 1
    await world.scan(after_s=11)
    assert len(await world.coordinator.lease_checks("puller", at_most=10, wait_s=0)) == 1


async def test_a_lease_that_is_noted_after_the_clock_was_set_back_keeps_its_duration(world: World) -> None:
    """It was given by a clock a day ahead (seed 60403 of the simulation); nobody answers."""
    await world.group("puller", mode=CheckMode.PULL, policy=QUICK)
    prepared = await world.prepare(group="puller")
    world.memory.clock.advance(86_400)
    world.coordinator.clock_was_set()
    await world.scan()
    with world.memory.faults.lane_held():
        assert len(await world.coordinator.lease_checks("puller", at_most=10, wait_s=0)) == 1
        world.memory.clock.advance(-86_400)
        world.coordinator.clock_was_set()
    entry = world.coordinator.shards.get(world.coordinator.shards.number_of(prepared.id)).state.halves[prepared.id]
    await world.until(lambda: entry.checks == 1)
    for _ in range(2):
        await world.scan(after_s=31)
    assert len(await world.coordinator.lease_checks("puller", at_most=10, wait_s=0)) == 1


async def test_a_late_answer_to_an_earlier_check_leaves_the_lease_of_the_last_one(world: World) -> None:
    """Two workers had a check each, one after the other."""
    await world.group("puller", mode=CheckMode.PULL, policy=QUICK)
    prepared = await world.prepare(group="puller")
    await world.scan(after_s=5)
    [first] = await world.coordinator.lease_checks("puller", at_most=10, wait_s=0)
    await world.scan()
    await world.scan(after_s=31)
    await world.group("puller", mode=CheckMode.PULL, policy=msgspec.structs.replace(QUICK, max_age_s=40))
    [second] = await world.coordinator.lease_checks("puller", at_most=10, wait_s=0)
    await world.scan()
    await world.end(prepared.id, Outcome.UNKNOWN, check_id=first.check_id)
    await world.scan(after_s=10)
    await world.scan()
    assert await world.state(prepared.id) is State.PREPARED, "it is too old, but a worker has its check"
    await world.end(prepared.id, Outcome.UNKNOWN, check_id=second.check_id)
    await world.scan()
    await world.scan()
    assert await world.state(prepared.id) is State.PARKED


@pytest.mark.parametrize("answered", [True, False])
async def test_a_new_owner_waits_for_a_lease_of_the_former_one_unless_it_is_answered(*, answered: bool) -> None:
    """The new owner knows only that a check was sent."""
    former = await World.start()
    policy = msgspec.structs.replace(QUICK, max_age_s=10, max_checks=1)
    await former.group("puller", mode=CheckMode.PULL, policy=policy)
    prepared = await former.prepare(group="puller")
    await former.scan(after_s=5)
    [check] = await former.coordinator.lease_checks("puller", at_most=10, wait_s=0)
    await former.scan()
    world = await former.restart()
    if answered:
        await world.end(prepared.id, Outcome.UNKNOWN, check_id=check.check_id)
    await world.scan(after_s=6)
    await world.scan()
    assert await world.state(prepared.id) is (State.PARKED if answered else State.PREPARED)
    await world.scan(after_s=25)
    await world.scan()
    assert await world.state(prepared.id) is State.PARKED
    await world.stop()
