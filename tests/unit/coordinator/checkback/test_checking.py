"""Check-back: when checks are sent and counted, and the effect of a verdict and of no verdict."""

import asyncio
from collections import Counter

import pytest

from halfway.coordinator.checkback.dispatcher import HostRateLimits
from halfway.coordinator.ports import CheckReply, CheckRequest
from halfway.coordinator.requests import ServiceLimits
from halfway.protocol.errors import AlreadyEndedError, InvalidRequestError, NotPendingError
from halfway.protocol.records import Message, OpKind, PolicyOverrides
from halfway.protocol.transactions import Cause, Outcome, State
from tests.support.service.world import SHARDS, World
from tests.support.surroundings import unreachable, verdict
from tests.unit.coordinator.resolve.test_ending import ops


async def test_the_first_check_comes_in_its_time_and_its_verdict_resolves(world: World) -> None:
    """No check is sent before `first_check_after_s`; a commit verdict writes the messages, with the cause check."""
    world.memory.caller.always(verdict(Outcome.COMMIT, remark="in the books"))
    prepared = await world.prepare()
    await world.scan(after_s=4.9)
    assert world.memory.caller.requests == []
    await world.scan(after_s=0.2)
    shown = await world.get(prepared.id)
    assert (shown.state, shown.cause, shown.checks, shown.remark) == (State.COMMITTED, Cause.CHECK, 1, "in the books")
    assert len(world.memory.records("orders")) == 1
    assert [request.attempt for request in world.memory.caller.requests] == [1]


async def test_a_transaction_brings_its_own_first_check(world: World) -> None:
    """`check_after_s` of a prepare overrides the group's `first_check_after_s`."""
    await world.prepare(check_after_ms=60_000)
    await world.scan(after_s=59)
    assert world.memory.caller.requests == []
    await world.scan(after_s=2)
    assert len(world.memory.caller.requests) == 1


async def test_only_what_has_waited_for_a_verdict_since_its_check_was_due_is_overdue(world: World) -> None:
    """A long first check is no reason to alarm. A second one that is due does not hide the first; a verdict ends it."""
    first, second = await world.prepare(check_after_ms=60_000), await world.prepare(check_after_ms=65_000)

    def overdue_s() -> float:
        return world.coordinator.checks_of_group("shop")[-1]

    await world.scan(after_s=59)
    assert overdue_s() == 0
    for after_s in (1, 4, 1, 1):
        await world.scan(after_s=after_s)
    assert overdue_s() == 6
    await world.end(first.id, Outcome.ROLLBACK)
    await world.scan(after_s=30)
    assert 30 <= overdue_s() <= 31
    await world.end(second.id, Outcome.ROLLBACK)
    assert overdue_s() == 0


async def test_a_check_on_demand_is_refused_if_no_endpoint_may_be_called(world: World) -> None:
    """The operator may have changed the rules since the registration of the group; the refusal names the setting."""
    prepared = await world.prepare()
    group = await world.coordinator.get_group("shop", deadline=world.deadline())
    for url in group.check.urls:
        world.memory.caller.refused[url] = "not allowed (HALFWAY_CHECK_HOSTS)"
    with pytest.raises(InvalidRequestError, match="HALFWAY_CHECK_HOSTS"):
        await world.coordinator.check(prepared.id, deadline=world.deadline())
    world.memory.caller.refused.popitem()
    await world.coordinator.check(prepared.id, deadline=world.deadline())


async def test_no_check_after_an_end(world: World) -> None:
    """No check is sent for an ended transaction."""
    prepared = await world.prepare()
    await world.end(prepared.id, Outcome.ROLLBACK)
    await world.scan(after_s=100)
    assert world.memory.caller.requests == []


async def test_unknown_backs_off_and_parks_and_resumes(world: World) -> None:
    """Three checks at growing distances, then parked; resume starts again at 0; a late end still works."""
    prepared = await world.prepare()
    times = []
    for _ in range(120):
        before = len(world.memory.caller.requests)
        await world.scan(after_s=1)
        if len(world.memory.caller.requests) > before:
            times.append(world.memory.clock.now_ms() - prepared.prepared_at)
        if await world.state(prepared.id) is State.PARKED:
            break
    shown = await world.get(prepared.id)
    assert (shown.state, shown.checks) == (State.PARKED, 3)
    assert "max_checks 3" in (shown.reason or "")
    assert len(times) == 3
    assert times[0] >= 5_000
    assert times[2] - times[1] > times[1] - times[0] > 8_000
    assert [op.kind for op in ops(world, prepared.id)] == [OpKind.CHECKED] * 3 + [OpKind.PARKED]
    with pytest.raises(NotPendingError):
        await world.coordinator.check(prepared.id, deadline=world.deadline())

    resumed = await world.coordinator.resume(prepared.id, deadline=world.deadline())
    assert (resumed.state, resumed.checks) == (State.PREPARED, 0)
    again = await world.restart()
    assert (await again.get(prepared.id)).checks == 0
    await again.scan(after_s=6)
    assert len(again.memory.caller.requests) == 1
    assert (await again.end(prepared.id, Outcome.COMMIT)).changed
    await again.stop()


async def test_an_interval_below_the_floor_is_raised_to_it(world: World) -> None:
    """A group that sets an interval of a nanosecond gets a check every second, and sees that interval."""
    await world.group(policy=PolicyOverrides(first_check_after_s=1, check_interval_s=1e-9, max_interval_s=1e-9))
    shown = await world.coordinator.get_group("shop", deadline=world.deadline())
    assert (shown.policy.check_interval_s, shown.policy.max_interval_s) == (1.0, 1.0)
    await world.prepare()
    for _ in range(50):
        await world.scan(after_s=0.2)
    assert 7 <= len(world.memory.caller.requests) <= 10


async def test_max_age_ends_the_asking_whatever_was_sent(world: World) -> None:
    """An endpoint that was never reached does not use up checks; the age still bounds the wait."""
    world.memory.caller.always(unreachable())
    prepared = await world.prepare()
    for _ in range(90):
        await world.scan(after_s=10)
    shown = await world.get(prepared.id)
    assert (shown.state, shown.checks) == (State.PREPARED, 0)
    assert shown.last_error == "connection refused"
    assert len(world.memory.caller.requests) > 3
    for _ in range(12):
        await world.scan(after_s=10)
    shown = await world.get(prepared.id)
    assert (shown.state, shown.checks) == (State.PARKED, 0)
    assert "max_age_s" in (shown.reason or "")


async def test_a_host_gets_no_more_checks_a_second_than_the_operator_allows(world: World) -> None:
    """Checks above the rate are sent in the next second."""
    world.memory.caller.always(verdict(Outcome.COMMIT))
    prepared = [await world.prepare() for _ in range(12)]
    world.coordinator._checks._rates = HostRateLimits(5)
    await world.scan(after_s=6)
    assert len(world.memory.caller.requests) == 5
    for _ in range(4):
        await world.scan(after_s=1)
    assert {await world.state(one.id) for one in prepared} == {State.COMMITTED}


async def test_endpoints_take_turns(world: World) -> None:
    """Each check starts with the next endpoint."""
    for _ in range(4):
        await world.prepare()
    await world.scan(after_s=6)
    firsts = {urls[0] for urls in world.memory.caller.urls}
    assert firsts == {"http://a/", "http://b/"}


async def test_an_operator_asks_at_once(world: World) -> None:
    """A manual check is sent at once; for any transaction that is not prepared it is a conflict."""
    world.memory.caller.always(verdict(Outcome.ROLLBACK))
    prepared = await world.prepare()
    await world.coordinator.check(prepared.id, deadline=world.deadline())
    await world.until_state(prepared.id, State.ROLLED_BACK)
    with pytest.raises(AlreadyEndedError):
        await world.coordinator.check(prepared.id, deadline=world.deadline())


async def test_a_check_on_demand_waits_for_a_change_in_progress(world: World) -> None:
    """It is sent once the change has released the id, not at a later look; once, however often it is demanded."""
    prepared = await world.prepare()
    with world.memory.faults.lane_held():
        noting = asyncio.create_task(world.end(prepared.id, Outcome.UNKNOWN, remark="busy"))
        await world.until(lambda: prepared.id in world.coordinator.shards.claims)
        for _ in range(2):
            await world.coordinator.check(prepared.id, deadline=world.deadline())
        assert not world.memory.caller.requests
    await noting
    await world.until(lambda: world.memory.caller.requests)
    await world.scan()
    assert [request.attempt for request in world.memory.caller.requests] == [1]


async def test_whoever_asks_again_and_again_makes_no_more_checks_than_the_floor_allows(world: World) -> None:
    """Otherwise calls without a body could flood an endpoint with checks that carry the whole payload."""
    world.memory.caller.always(verdict(Outcome.UNKNOWN))
    prepared = await world.prepare()
    for asked in (1, 2):
        for _ in range(5):
            await world.coordinator.check(prepared.id, deadline=world.deadline())
            await world.scan(after_s=0.05)
        assert len(world.memory.caller.requests) == asked
        await world.scan(after_s=1)
    await world.until(lambda: len(ops(world, prepared.id)) == 2)
    for _ in range(100):
        await world.scan(after_s=1)
    assert len(world.memory.caller.requests) > 2, "its own checks go on"


@pytest.mark.parametrize(
    "limits",
    [
        ServiceLimits(shards=SHARDS, outcome_horizon_s=60, check_bytes=5_000),
        ServiceLimits(shards=SHARDS, outcome_horizon_s=60, checks_in_flight=2),
    ],
    ids=["bytes", "number"],
)
async def test_checks_under_way_of_all_groups_are_bounded_too(limits: ServiceLimits) -> None:
    """Groups that hang hold what is allowed and one check each; waiting checks are sent afterwards."""
    gate = asyncio.Event()

    async def answer(_: CheckRequest) -> CheckReply:
        await gate.wait()
        return verdict(Outcome.COMMIT)

    world = await World.start(limits=limits)
    world.memory.caller.answer = answer
    prepared = []
    for name in ("one", "two", "three"):
        await world.group(name)
        large = Message(topic="orders", key=b"k", value=b"v" * 2_000)
        prepared += [await world.prepare(large, group=name) for _ in range(4)]
    await world.scan(after_s=6)
    asked = Counter(request.group for request in world.memory.caller.requests)
    assert set(asked) == {"one", "two", "three"}
    assert asked.total() <= 2 + 2
    gate.set()
    for _ in range(6):
        await world.scan(after_s=2)
    assert {await world.state(one.id) for one in prepared} == {State.COMMITTED}
    await world.stop()


async def test_an_open_breaker_holds_checks_back_and_closes_again(world: World) -> None:
    """Unreachable endpoints get no checks for a while; afterwards every transaction is checked and resolved."""
    world.memory.caller.always(unreachable())
    prepared = [await world.prepare() for _ in range(60)]
    await world.scan(after_s=6)
    tried = len(world.memory.caller.requests)
    assert tried < 60
    world.memory.caller.always(verdict(Outcome.COMMIT))
    for _ in range(20):
        await world.scan(after_s=1)
    assert {await world.state(one.id) for one in prepared} == {State.COMMITTED}


async def test_a_deleted_group_leaves_no_queue_and_no_open_breaker_to_a_later_group(world: World) -> None:
    checks = world.coordinator._checks
    breaker = checks.queue("shop").breaker
    for _ in range(100):
        breaker.record_failure(world.memory.clock.now_ms())
    assert checks.figures("shop")[2] is not None
    await world.coordinator.delete_group("shop", deadline=asyncio.get_running_loop().time() + 60)
    await world.group("other")
    checks.queue("other")
    await world.group("shop")
    assert checks.figures("shop")[2] is None
    assert set(checks._queues) == {"other"}
