"""The scan: cursors, re-anchoring, payloads that are not in memory, lists."""

from typing import Any

import pytest

from halfway.coordinator.checkback.dispatcher import HostRateLimits
from halfway.coordinator.ports import Appended
from halfway.coordinator.requests import GroupSpec, ServiceLimits
from halfway.protocol.errors import InvalidRequestError, UnknownGroupError
from halfway.protocol.records import CheckMode, Message, PolicyOverrides
from halfway.protocol.transactions import Outcome, State
from tests.support.ids import named_id
from tests.support.service.world import SHARDS, World
from tests.support.surroundings import unreachable, verdict


async def test_a_half_far_behind_is_written_again_so_that_the_cursor_moves(world: World) -> None:
    """Re-anchor keeps checks and content, and a restart finds it from the new cursor."""
    limits = ServiceLimits(shards=SHARDS, outcome_horizon_s=60, max_outcomes_per_shard=1000)
    again = await world.restart(limits)
    await again.group()
    old = await again.prepare(Message(topic="orders", key=b"k", value=b"old"), transaction_id=named_id("old"))
    await again.scan(after_s=6)
    assert (await again.get(named_id("old"))).checks == 1
    number = again.coordinator.shards.number_of(named_id("old"))
    for _ in range(130):
        ended = await again.prepare()
        await again.end(ended.id, Outcome.ROLLBACK)
    await again.scan()
    assert again.memory.cursors is not None
    shard = again.coordinator.shards.get(number)
    assert shard.state.half_tail - shard.state.half_cursor < 50
    partition = again.memory.log.shards[number].half
    partition.compact(partition.end)
    third = await again.restart(limits)
    shown = await third.get(named_id("old"))
    assert (shown.state, shown.checks, shown.prepared_at) == (State.PREPARED, 1, old.prepared_at)
    await third.end(named_id("old"), Outcome.COMMIT)
    assert [record.value for record in third.memory.records("orders")] == [b"old"]
    await third.stop()


async def test_a_backlog_longer_than_the_distance_is_not_written_again_for_ever(world: World) -> None:
    """Each round of re-anchoring moves the end: with a fixed distance the next round would follow at once."""
    limits = ServiceLimits(shards=SHARDS, outcome_horizon_s=60, max_outcomes_per_shard=400)
    again = await world.restart(limits)
    await again.group()
    old = [await again.prepare(Message(topic="orders", key=b"k", value=b"v")) for _ in range(60 * SHARDS)]
    ends = [again.memory.log.shards[number].half.end for number in range(SHARDS)]
    for _ in range(10):
        await again.scan()
    assert [again.memory.log.shards[number].half.end for number in range(SHARDS)] == ends

    for _ in range(200 * SHARDS):
        ended = await again.prepare()
        await again.end(ended.id, Outcome.ROLLBACK)
    for _ in range(10):
        await again.scan()
    for number in range(SHARDS):
        state = again.coordinator.shards.get(number).state
        assert state.half_tail - state.half_cursor <= 4 * state.counts[0]
    assert {(await again.get(one.id)).state for one in old} == {State.PREPARED}


async def test_a_payload_that_is_not_in_memory_is_read_back(world: World) -> None:
    """Without memory for payloads every commit reads its half by offset, also after a restart."""
    limits = ServiceLimits(shards=SHARDS, payload_cache_bytes=1)
    again = await world.restart(limits)
    prepared = [await again.prepare(Message(topic="orders", key=b"k", value=b"%d" % number)) for number in range(5)]
    third = await again.restart(limits)
    for one in prepared:
        await third.end(one.id, Outcome.COMMIT)
    assert sorted(record.value or b"" for record in third.memory.records("orders")) == [b"0", b"1", b"2", b"3", b"4"]
    await third.stop()


@pytest.mark.parametrize(
    "policy,field",
    [
        (PolicyOverrides(max_age_s=700_000), "policy.max_age_s"),
        (PolicyOverrides(check_interval_s=100, max_interval_s=50), "policy.max_interval_s"),
        (PolicyOverrides(first_check_after_s=100, max_age_s=50), "policy.first_check_after_s"),
    ],
)
async def test_policies_that_cannot_work_are_refused(world: World, policy: PolicyOverrides, field: str) -> None:
    """The error names the field and the remedy."""
    spec = GroupSpec(name="g", mode=CheckMode.PUSH, urls=("http://a/",), topics=("orders",), policy=policy)
    with pytest.raises(InvalidRequestError) as raised:
        await world.coordinator.put_group(spec, deadline=world.deadline())
    assert raised.value.fields["errors"][0]["field"] == field  # type: ignore[index]


async def test_an_endpoint_that_the_operator_does_not_allow_cannot_be_registered(world: World) -> None:
    """The error names the field and says why; the group stays as it was."""
    world.memory.caller.refused["http://inside/"] = "the operator does not allow the host 'inside'"
    with pytest.raises(InvalidRequestError, match="'inside'") as raised:
        await world.group("g", urls=("http://a/", "http://inside/"))
    assert raised.value.fields["errors"][0]["field"] == "check.urls[1]"  # type: ignore[index]
    with pytest.raises(UnknownGroupError):
        await world.prepare(group="g")


async def test_a_clock_that_was_set_ahead_makes_no_outcome_forgotten(world: World) -> None:
    """By such a clock a recent outcome is older than the horizon; a repeat of the prepare must still find it."""
    await world.prepare(transaction_id=named_id("one"))
    await world.end(named_id("one"), Outcome.COMMIT)
    world.memory.clock.advance(3600)
    world.coordinator.clock_was_set()
    await world.scan()
    assert (await world.prepare(transaction_id=named_id("one"))).state is State.COMMITTED
    world.memory.clock.advance(-3600)
    world.coordinator.clock_was_set()
    await world.scan()
    assert (await world.prepare(transaction_id=named_id("one"))).state is State.COMMITTED


async def test_an_outcome_is_never_older_than_its_prepare(world: World) -> None:
    """With a clock that is set back in between; otherwise a recovery would attribute it to an earlier life."""
    await world.prepare(transaction_id=named_id("one"))
    world.memory.clock.advance(-3600)
    await world.end(named_id("one"), Outcome.COMMIT)
    world.memory.clock.advance(3600)
    again = await world.restart()
    await again.scan()
    assert (await again.prepare(transaction_id=named_id("one"))).state is State.COMMITTED
    assert len(again.memory.records("orders")) == 1
    await again.stop()


async def test_what_was_prepared_by_a_clock_ahead_is_asked_about_when_the_clock_is_right_again(world: World) -> None:
    """Not only at the time that the wrong clock has recorded."""
    world.memory.clock.advance(600)
    prepared = await world.prepare()
    await world.scan()
    world.memory.clock.advance(-600)
    await world.scan()
    assert (await world.get(prepared.id)).checks == 0
    world.coordinator.clock_was_set()
    await world.scan()
    assert (await world.get(prepared.id)).checks == 1


@pytest.mark.parametrize(
    "limits",
    [
        ServiceLimits(shards=SHARDS, outcome_horizon_s=60, breaker_failures=1),
        ServiceLimits(shards=SHARDS, outcome_horizon_s=60, checks_per_place=1, check_concurrency=1),
    ],
    ids=["the breaker was open", "the queue was full"],
)
async def test_what_was_put_off_by_a_clock_ahead_is_asked_about_soon(world: World, limits: ServiceLimits) -> None:
    """The endpoint was unavailable or busy before the clock was corrected."""
    again = await world.restart(limits)
    again.memory.caller.always(unreachable())
    prepared = [await again.prepare() for _ in range(5)]
    again.memory.clock.advance(600)
    await again.scan()
    again.memory.clock.advance(-600)
    again.coordinator.clock_was_set()
    again.memory.caller.always(verdict(Outcome.COMMIT))
    for _ in range(60):
        await again.scan(after_s=1)
    assert [await again.state(one.id) for one in prepared] == [State.COMMITTED] * len(prepared)
    await again.stop()


async def test_a_clock_that_is_set_back_during_a_scan_makes_nothing_due_again(world: World) -> None:
    """Otherwise the scan would look at the same transactions until the time of its own start."""
    number = 0
    shard = world.coordinator.shards.get(number)
    names = map(named_id, map(str, range(2_000)))
    ids = [name for name in names if world.coordinator.shards.number_of(name) == number][:500]
    for name in ids:
        await world.prepare(transaction_id=name)
    world.memory.clock.advance(600)
    now, looks, take = world.memory.clock.now_ms(), list[str](), shard.agenda.pop_up_to

    def taken(limit: int) -> str | None:
        if len(looks) == len(ids) // 2:
            world.memory.clock.advance(-300)
        looks.append(name := take(limit) or "")
        assert len(looks) <= 2 * len(ids), "it looks at them again and again"
        return name or None

    shard.agenda.pop_up_to = taken  # type: ignore[method-assign] # of this one shard
    await world.coordinator.scan(number, now)
    assert sorted(looks[:-1]) == sorted(ids), "each once"


async def test_what_is_being_prepared_while_the_clock_is_set_right_is_asked_about_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stored with the former time, and acknowledged after the scan looked at every transaction again."""
    append = world.memory.half_log.append

    def set_right_meanwhile(shard: int, halves: Any, appended: Appended[Any], *, deadline: float) -> None:
        def answer(results: Any) -> None:
            world.memory.clock.advance(-600)
            world.coordinator.clock_was_set()
            appended(results)

        append(shard, halves, answer, deadline=deadline)

    monkeypatch.setattr(world.memory.half_log, "append", set_right_meanwhile)
    world.memory.clock.advance(600)
    prepared = await world.prepare()
    await world.scan()
    assert (await world.get(prepared.id)).checks == 1


@pytest.mark.parametrize(
    "before, after",
    [
        pytest.param(
            PolicyOverrides(first_check_after_s=500), PolicyOverrides(first_check_after_s=5), id="the first check"
        ),
        pytest.param(
            PolicyOverrides(first_check_after_s=5, check_interval_s=300, max_interval_s=300),
            PolicyOverrides(first_check_after_s=5, check_interval_s=5, max_interval_s=5),
            id="the interval",
        ),
    ],
)
async def test_a_changed_policy_reaches_what_is_pending(
    world: World, before: PolicyOverrides, after: PolicyOverrides
) -> None:
    """A check that it makes due sooner is sent by the next scan, without a restart."""
    await world.group(policy=before)
    world.memory.caller.always(verdict(Outcome.UNKNOWN))
    prepared = await world.prepare()
    for _ in range(2):
        await world.scan(after_s=10)
    asked = len(world.memory.caller.requests)
    await world.group(policy=after)
    assert ((await world.get(prepared.id)).next_check_at or 0) <= world.memory.clock.now_ms()
    await world.scan()
    assert len(world.memory.caller.requests) == asked + 1


async def test_a_lower_age_reaches_what_is_pending(world: World) -> None:
    """Its group is asked by the next scan, then it is given up; what another group prepared is left alone."""
    for name in ("shop", "other"):
        await world.group(name, policy=PolicyOverrides(first_check_after_s=500, max_age_s=1000))
    prepared, of_another = await world.prepare(), await world.prepare(group="other")
    await world.scan(after_s=30)
    await world.group(policy=PolicyOverrides(first_check_after_s=5, max_age_s=20))
    world.memory.caller.always(verdict(Outcome.UNKNOWN))
    await world.scan()
    await world.scan(after_s=31)
    assert len(world.memory.caller.requests) == 1
    assert await world.state(prepared.id) is State.PARKED
    assert await world.state(of_another.id) is State.PREPARED


async def test_changed_endpoints_are_called_at_once(world: World) -> None:
    """The breaker was open, because the former ones could not be reached; so does a group that no longer fetches."""
    again = await world.restart(ServiceLimits(shards=SHARDS, outcome_horizon_s=60, breaker_failures=1))
    again.memory.caller.always(unreachable())
    await again.group(urls=("http://gone/",))
    await again.group("fetching", mode=CheckMode.PULL)
    prepared = await again.prepare()
    fetched = await again.prepare(group="fetching")
    for _ in range(3):
        await again.scan(after_s=6)
    assert again.coordinator._checks.queue("shop").breaker.is_open
    again.memory.caller.always(verdict(Outcome.COMMIT))
    await again.group(urls=("http://moved/",))
    await again.group("fetching")
    await again.scan()
    await again.until_state(prepared.id, State.COMMITTED)
    await again.until_state(fetched.id, State.COMMITTED)
    await again.stop()


async def test_what_a_changed_policy_makes_due_later_is_not_asked_about_sooner(world: World) -> None:
    """A look at the former time decides by the new policy."""
    await world.group(policy=PolicyOverrides(first_check_after_s=5))
    await world.prepare()
    await world.scan()
    await world.group(policy=PolicyOverrides(first_check_after_s=50))
    await world.scan(after_s=6)
    assert not world.memory.caller.requests
    await world.scan(after_s=45)
    assert len(world.memory.caller.requests) == 1


TEN_OF_ONE = tuple(f"http://SHOP.:{port}/check" for port in range(9000, 9010))


def test_a_host_gets_so_many_checks_each_second_whatever_its_urls() -> None:
    """Ports, paths and the case of letters do not make another host; the next second starts at 0."""
    rates = HostRateLimits(3)
    assert [rates.admits("shop", TEN_OF_ONE, 0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert not rates.admits("shop", ("http://shop/other",), 999)
    assert rates.admits("shop", ("http://cart/",), 999)
    assert rates.admits("shop", TEN_OF_ONE, 1000)


def test_no_group_is_kept_from_a_host_by_others() -> None:
    """If other groups have used up the rate, a group can still send one check per second."""
    rates = HostRateLimits(3)
    assert [rates.admits("busy", TEN_OF_ONE, 0) for _ in range(4)] == [True] * 3 + [False]
    assert [rates.admits("other", TEN_OF_ONE, 0) for _ in range(2)] == [True, False]
