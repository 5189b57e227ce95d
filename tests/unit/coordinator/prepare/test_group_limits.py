"""A group that has reached a limit is refused with the name of the limit; other groups are not."""

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from halfway.coordinator import prepare_rules as group_limits
from halfway.coordinator.requests import ServiceLimits
from halfway.protocol.errors import GroupLimitedError, PreparesRejectedError, RetryableError
from halfway.protocol.ids import shard_of
from halfway.protocol.records import LimitOverrides, Message, PolicyOverrides
from halfway.protocol.transactions import Outcome, State
from tests.support.ids import named_id
from tests.support.service.broker import Memory
from tests.support.service.world import LIMITS, SHARDS, World
from tests.support.surroundings import no_verdict


def _service_limits(max_pending: int = LIMITS.max_pending, **of_groups: Any) -> ServiceLimits:
    return dataclasses.replace(LIMITS, max_pending=max_pending, default_limits=LimitOverrides(**of_groups))


async def start_limited(memory: Memory | None = None, **limits: Any) -> World:
    """Start a world whose service has a limit of its own, `max_pending`, or default limits of a group."""
    world = await World.start(memory, limits=_service_limits(**limits))
    for name in ("shop", "other"):
        await world.group(name)
    return world


async def refusal(world: World, *messages: Message, group: str = "shop") -> GroupLimitedError:
    with pytest.raises(GroupLimitedError) as caught:
        await world.prepare(*messages, group=group)
    return caught.value


class Seconds:
    """The clock of the token bucket, which only a test advances."""

    now = 0.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    clock = Seconds()
    monkeypatch.setattr(group_limits, "asyncio", SimpleNamespace(get_running_loop=lambda: clock))
    return clock


async def test_prepares_a_second_are_taken_in_bursts_of_one_second(seconds: Seconds) -> None:
    world = await start_limited(prepares_per_s=5.0)
    for _ in range(5):
        await world.prepare()
    error = await refusal(world)
    assert error.fields == {"group": "shop", "limit": "prepares_per_s"}
    assert 0 < error.retry_after_s <= 0.2
    assert "HALFWAY_LIMITS__PREPARES_PER_S" in error.detail
    await world.prepare(group="other")
    seconds.now += error.retry_after_s
    await world.prepare()
    await refusal(world)
    await world.stop()


async def test_pending_transactions_are_limited_until_they_are_ended() -> None:
    world = await start_limited(pending=4)
    made = [await world.prepare() for _ in range(4)]
    assert (await refusal(world)).fields["limit"] == "pending"
    await world.prepare(group="other")
    await world.end(made[0].id, Outcome.COMMIT)
    await world.prepare()
    await world.stop()


async def test_prepares_that_wait_for_facts_about_a_topic_are_limited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them counts before it is stored, so all of them would pass at once."""
    world = await start_limited(pending=4)
    monkeypatch.setattr(type(world.memory.topics), "known", lambda _topics, _names: None)
    results = await asyncio.gather(*[world.prepare() for _ in range(20)], return_exceptions=True)
    refused = [result for result in results if isinstance(result, GroupLimitedError)]
    assert len(results) - len(refused) == 4
    assert {error.fields["limit"] for error in refused} == {"pending"}
    await world.stop()


async def test_a_repeat_of_a_pending_prepare_is_answered_at_the_limit() -> None:
    """It adds nothing, and its caller must learn that it is stored."""
    world = await start_limited(pending=1)
    made = await world.prepare(transaction_id=named_id("order-1"))
    assert (await refusal(world)).fields["limit"] == "pending"
    repeated = await world.prepare(transaction_id=named_id("order-1"))
    assert (repeated.id, repeated.created) == (made.id, False)
    await world.stop()


@pytest.mark.parametrize("limit", ["pending", "max_pending"])
async def test_parked_transactions_count_until_they_are_ended(limit: str) -> None:
    """Otherwise a group without verdicts would fill the memory. Parked transactions can still be resumed and ended."""
    changed: dict[str, Any] = {limit: 2}
    world = await start_limited(**changed)
    world.memory.caller.always(no_verdict("status 502"))
    await world.group(
        "shop", policy=PolicyOverrides(first_check_after_s=1, check_interval_s=1, max_interval_s=1, max_checks=1)
    )
    made = [await world.prepare() for _ in range(2)]
    for _ in range(4):
        await world.scan(after_s=2)
    for one in made:
        await world.until_state(one.id, State.PARKED)
    with pytest.raises(RetryableError) as refused:
        await world.prepare()
    assert "pending or parked" in refused.value.detail

    await world.coordinator.resume(made[0].id, deadline=world.deadline())
    await world.until_state(made[0].id, State.PREPARED)
    assert (await world.end(made[0].id, Outcome.COMMIT)).changed
    await world.prepare()
    with pytest.raises(RetryableError):
        await world.prepare()
    assert (await world.end(made[1].id, Outcome.ROLLBACK)).changed
    await world.prepare()
    await world.stop()


async def test_prepares_on_their_way_count_as_pending() -> None:
    world = await start_limited(pending=4)
    made = await asyncio.gather(*(world.prepare() for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(one, GroupLimitedError) for one in made) == 16
    await world.stop()


async def two_instances(**limits: Any) -> list[World]:
    """Start two instances that share the log, with one shard each."""
    first = Memory(shards=SHARDS, topics={"orders": 3}, owns={0})
    second = Memory(shards=SHARDS, owns={1}, beside=first)
    worlds = [await World.start(memory, _service_limits(**limits)) for memory in (first, second)]
    await worlds[0].group()
    return worlds


async def test_the_limit_of_what_is_pending_holds_over_all_instances() -> None:
    """Each instance has the share of the shards that it serves."""
    worlds = await two_instances(pending=6)
    taken = 0
    ids = [named_id(f"t-{number}") for number in range(40)]
    for world, transaction_id in zip(worlds * 20, [None, *ids], strict=False):  # the owner of an id may be the other
        try:
            await world.prepare(transaction_id=transaction_id)
        except GroupLimitedError:
            continue
        taken += 1
    assert taken == 6
    for transaction_id in ids:
        with pytest.raises(GroupLimitedError):
            await worlds[0].prepare(transaction_id=named_id(f"more-{transaction_id}"))
    for world in worlds:
        await world.stop()


@pytest.mark.usefixtures("seconds")
async def test_to_ask_another_instance_than_the_owner_gets_around_no_limit() -> None:
    """Pending transactions and bytes in flight count at the owner, the rate at the instance that gets the request."""
    large = Message(topic="orders", key=b"k", value=b"v" * 700)
    for limits, taken in (({"pending": 6}, 3), ({"bytes_in_flight": 1000}, 1), ({"prepares_per_s": 4.0}, 4)):
        asked, owner = await two_instances(**limits)
        names = [name for name in map(named_id, map(str, range(100))) if shard_of(name, SHARDS) == 1][:10]
        made = await asyncio.gather(
            *(asked.prepare(large, transaction_id=name) for name in names), return_exceptions=True
        )
        refused = [one for one in made if isinstance(one, GroupLimitedError)]
        assert len(made) - len(refused) == taken, limits
        assert refused[0].fields["group"] == "shop"
        await owner.stop()
        await asked.stop()


async def test_bytes_in_flight_are_limited_and_given_back() -> None:
    world = await start_limited(bytes_in_flight=1000)
    large = Message(topic="orders", key=b"k", value=b"v" * 700)
    made = await asyncio.gather(*(world.prepare(large) for _ in range(3)), return_exceptions=True)
    assert sum(isinstance(one, GroupLimitedError) for one in made) == 2
    await world.prepare(large)
    await world.prepare(Message(topic="orders", key=b"k", value=b"v" * 5000))  # larger than the limit, and alone
    assert (await asyncio.gather(world.prepare(large), world.prepare(large, group="other")))[1].group == "other"
    await world.stop()


async def test_a_prepare_that_fails_gives_its_bytes_back() -> None:
    world = await start_limited(bytes_in_flight=1000)
    missing = Message(topic="missing", key=b"k", value=b"v" * 700)
    for _ in range(3):
        with pytest.raises(Exception, match="missing"):
            await world.prepare(missing)
    await world.stop()


async def test_a_limit_of_the_groups_own_overrides_the_setting(seconds: Seconds) -> None:
    """It may be higher or lower, holds from the change on, and leaves the other groups as they are."""
    world = await start_limited(pending=4, prepares_per_s=3.0)
    await world.group("shop", limits=LimitOverrides(pending=40, prepares_per_s=2.0))
    for _ in range(2):
        await world.prepare()
    assert (await refusal(world)).fields["limit"] == "prepares_per_s"
    for _ in range(3):
        await world.prepare(group="other")
    seconds.now += 1
    await world.prepare(group="other")
    assert (await refusal(world, group="other")).fields["limit"] == "pending"
    await world.group("shop", limits=LimitOverrides(bytes_in_flight=1000))
    seconds.now += 1
    large = Message(topic="orders", key=b"k", value=b"v" * 700)
    made = await asyncio.gather(*(world.prepare(large) for _ in range(2)), return_exceptions=True)
    assert [one.fields["limit"] for one in made if isinstance(one, GroupLimitedError)] == ["bytes_in_flight"]
    await world.group("shop")  # such as a service does that knows no limits
    made = await asyncio.gather(*(world.prepare(large) for _ in range(2)), return_exceptions=True)
    assert sum(isinstance(one, GroupLimitedError) for one in made) == 1
    await world.stop()


async def test_an_operator_has_the_new_transactions_of_a_group_refused() -> None:
    """Every instance refuses them at once; ends work, and other groups prepare."""
    worlds = await two_instances()
    before = await worlds[1].prepare()
    await worlds[0].group("other")
    await worlds[0].group("shop", reject_prepares=True)
    for world in worlds:
        with pytest.raises(PreparesRejectedError, match="halfway groups accept"):
            await world.prepare()
        await world.prepare(group="other")
    assert (await worlds[1].end(before.id, Outcome.COMMIT)).state is State.COMMITTED
    await worlds[1].group("shop", reject_prepares=False)
    await worlds[0].prepare()
    for world in worlds:
        await world.stop()
