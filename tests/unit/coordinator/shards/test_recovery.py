"""Work during the recovery of a shard: nothing is forgotten, and nothing is decided twice."""

import asyncio
import gc
from weakref import ref

import pytest

from halfway.coordinator.ports import CheckReply, CheckRequest
from halfway.coordinator.requests import ListQuery, ServiceLimits
from halfway.protocol.errors import GroupInUseError, OutcomeUnknownError, ShardUnavailableError
from halfway.protocol.records import Half, Message, OpKind, PolicyOverrides
from halfway.protocol.transactions import Cause, Outcome, State
from tests.support.ids import named_id
from tests.support.service.world import ROLLBACK_AT_LAST, SHARDS, World
from tests.support.surroundings import no_verdict, unreachable, verdict
from tests.unit.coordinator.resolve.test_ending import ops


class Gate:
    """An endpoint that answers on request of the test."""

    def __init__(self, reply: CheckReply) -> None:
        self.opened = asyncio.Event()
        self.reply = reply

    async def __call__(self, _: CheckRequest) -> CheckReply:
        await self.opened.wait()
        return self.reply


async def lose_the_lane(world: World) -> None:
    """End the incarnation with another transaction, and wait until every shard is served again."""
    innocent = await world.prepare()
    world.memory.faults.lose_next_batch(written=False)
    await world.end(innocent.id, Outcome.ROLLBACK)
    await world.until(lambda: len(world.coordinator.shards.served) == SHARDS)


async def test_a_fold_that_was_lost_is_freed_once_the_next_is_served(world: World) -> None:
    """Until then it is all that is known if Kafka has lost records. An end that still waits does not keep it."""
    prepared = await world.prepare()
    shards = world.coordinator.shards
    fold = ref(shards.get(shards.number_of(prepared.id)).state)
    with world.memory.faults.lane_held():
        ending = asyncio.create_task(world.end(prepared.id, Outcome.COMMIT))
        await world.until(lambda: prepared.id in shards.claims)
        world.memory.lose()
        await world.until(lambda: len(shards.served) == SHARDS)
        gc.collect()
        assert prepared.id in shards.claims
        assert fold() is None
    assert (await ending).changed


async def test_a_check_that_outlives_an_incarnation_is_followed_by_the_next(world: World) -> None:
    """The reply to a check from before a recovery counts in the current shard, and further checks are sent."""
    gate = Gate(no_verdict())
    world.memory.caller.answer = gate
    prepared = await world.prepare()
    await world.scan(after_s=6)
    await lose_the_lane(world)
    await world.scan(after_s=1)
    gate.opened.set()
    await world.scan()
    assert (await world.get(prepared.id)).checks == 1
    world.memory.caller.always(verdict(Outcome.COMMIT))
    for _ in range(15):
        await world.scan(after_s=1)
    assert await world.state(prepared.id) is State.COMMITTED


async def test_a_commit_verdict_that_meets_a_recovery_is_kept(world: World) -> None:
    """A verdict that arrives while its shard is not served is written when the shard is served again."""
    gate = Gate(verdict(Outcome.COMMIT))
    world.memory.caller.answer = gate
    prepared = await world.prepare()
    await world.scan(after_s=6)
    number = world.coordinator.shards.number_of(prepared.id)
    shard = world.coordinator.shards.get(number)
    world.coordinator.shards.lost(number)
    gate.opened.set()
    await asyncio.sleep(0.01)
    world.coordinator.shards.acquired(number, shard.state)
    await world.until(lambda: world.memory.records("orders") and not world.coordinator.shards.claims)
    assert (await world.get(prepared.id)).cause is Cause.CHECK


async def test_a_caller_that_breaks_does_not_stop_the_asking(world: World) -> None:
    """The scan looks at the transaction again after any failure of a check."""

    def broken(_: CheckRequest) -> CheckReply:
        raise RuntimeError("a fault of ours")

    world.memory.caller.answer = broken
    prepared = await world.prepare()
    await world.scan(after_s=6)
    world.memory.caller.always(verdict(Outcome.ROLLBACK))
    for _ in range(80):
        await world.scan(after_s=1)
        if ops(world, prepared.id):
            break
    assert await world.state(prepared.id) is State.ROLLED_BACK


async def test_no_check_is_sent_when_the_end_comes_while_the_payload_is_read(world: World) -> None:
    """A check that is about to be sent is dropped when its transaction is being ended."""
    again = await world.restart(ServiceLimits(shards=SHARDS, outcome_horizon_s=60, payload_cache_bytes=1))
    prepared = await again.prepare()
    with again.memory.faults.lane_held():
        ending = asyncio.create_task(again.end(prepared.id, Outcome.COMMIT))
        await again.until(lambda: prepared.id in again.coordinator.shards.claims)
        await again.scan(after_s=6)
        assert again.memory.caller.requests == []
    await ending
    await again.scan(after_s=6)
    assert again.memory.caller.requests == []
    await again.stop()


async def test_a_slow_write_holds_up_no_other_transaction(world: World) -> None:
    """While a park waits for the lane, the scan continues and other groups get checks."""
    await world.group(
        "old", policy=PolicyOverrides(first_check_after_s=1, check_interval_s=1, max_interval_s=1, max_checks=1)
    )
    await world.prepare(group="old")
    await world.scan(after_s=1)
    with world.memory.faults.lane_held():
        await world.scan(after_s=5.5)
        await world.prepare()
        await world.scan(after_s=6)
        assert [request.group for request in world.memory.caller.requests] == ["old", "shop"]


async def test_other_content_after_a_lost_answer_waits_for_the_log(world: World) -> None:
    """If the first content was stored after all, the second prepare is refused, not acknowledged."""
    world.memory.faults.next_append_ambiguous(stored=True)
    with pytest.raises(OutcomeUnknownError):
        await world.prepare(Message(topic="orders", key=b"k", value=b"first"), transaction_id=named_id("order-1"))
    with pytest.raises(Exception, match="other content"):
        await world.prepare(Message(topic="orders", key=b"k", value=b"second"), transaction_id=named_id("order-1"))


async def test_what_cannot_be_known_while_shards_are_away_is_not_told(world: World) -> None:
    """Neither a list nor the deletion of a group ignores the transactions of a shard that is not served."""
    prepared = await world.prepare()
    number = world.coordinator.shards.number_of(prepared.id)
    shard = world.coordinator.shards.get(number)
    world.coordinator.shards.lost(number)
    with pytest.raises(ShardUnavailableError):
        await world.coordinator.list(ListQuery(), deadline=world.deadline())
    with pytest.raises(ShardUnavailableError):
        await world.coordinator.delete_group("shop", deadline=world.deadline())
    world.coordinator.shards.acquired(number, shard.state)
    with pytest.raises(GroupInUseError):
        await world.coordinator.delete_group("shop", deadline=world.deadline())


async def test_a_large_backlog_of_an_unreachable_group_is_looked_at_bit_by_bit(world: World) -> None:
    """While its breaker is open, the scan looks per second at no more transactions of a group than may be queued."""
    again = await world.restart(
        ServiceLimits(shards=SHARDS, outcome_horizon_s=60, checks_per_place=5, check_concurrency=2)
    )
    again.memory.caller.always(unreachable())
    for _ in range(200):
        await again.prepare()
    await again.scan(after_s=6)
    now = again.memory.clock.now_ms()
    soon = 0
    for number in again.coordinator.shards.served:
        pending = again.coordinator.shards.get(number).state.pending()
        soon += sum(1 for entry in pending if (entry.look_at or 0) <= now + 3_000)
    assert soon <= 60
    again.memory.caller.always(verdict(Outcome.ROLLBACK))
    for _ in range(60):
        await again.scan(after_s=1)
    assert again.coordinator.shards.unresolved == 0
    await again.stop()


@pytest.mark.parametrize("attempts", [1, 3], ids=["one start", "two starts that die before the log is right"])
async def test_a_late_half_before_an_outage_longer_than_the_horizon_is_not_a_new_transaction(
    world: World, attempts: int
) -> None:
    """The owner remembered its outcome when the half arrived, so each next owner reads that outcome too."""
    await world.prepare(transaction_id=named_id("order-1"))
    shard = world.memory.log.shards[number := world.coordinator.shards.number_of(named_id("order-1"))]
    half = next(record.value for record in shard.half.records if isinstance(record.value, Half))
    await world.end(named_id("order-1"), Outcome.COMMIT)
    await world.scan(after_s=1)
    world.memory.foreign_prepare(number, half)
    for _ in range(attempts):
        world.memory.clock.advance(120)
        world = await world.restart()
    assert await world.state(named_id("order-1")) is State.COMMITTED
    world.memory.caller.always(verdict(Outcome.COMMIT))
    for _ in range(4):
        await world.scan(after_s=10)
    assert len(world.memory.records("orders")) == 1
    await world.stop()


async def test_policy_does_not_decide_over_a_verdict_that_waits_to_be_written(world: World) -> None:
    """Neither the commit nor VERDICT could be written yet: the rollback of the policy must wait."""
    await world.group(policy=ROLLBACK_AT_LAST)
    world.memory.caller.always(verdict(Outcome.COMMIT))
    prepared = await world.prepare(Message(topic="points", key=b"k", value=b"v"))
    world.memory.faults.denied_topics.add("points")
    await world.scan(after_s=6)
    world.memory.caller.always(no_verdict())
    for _ in range(80):
        await world.scan(after_s=1)
    kinds = [op.kind for op in ops(world, prepared.id)]
    assert OpKind.VERDICT in kinds
    assert OpKind.ROLLED_BACK not in kinds
    assert await world.state(prepared.id) is State.PARKED
