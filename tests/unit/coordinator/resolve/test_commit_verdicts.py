"""Whoever says commit is remembered, in the log before the answer, until the commit is written."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest

from halfway.coordinator.access import KeyedAccess
from halfway.coordinator.commit_verdicts import CommitVerdicts
from halfway.coordinator.ports import LaneWrite
from halfway.coordinator.requests import End, GroupSpec, Prepare
from halfway.coordinator.shards.shard import Shard
from halfway.protocol.entries import Pending
from halfway.protocol.errors import (
    EndUnconfirmedError,
    HalfwayError,
    MessageTooLargeError,
    NotAuthorisedError,
    OverloadedError,
    TopicUnavailableError,
    UnknownTransactionError,
)
from halfway.protocol.keys import MasterSecret
from halfway.protocol.principal import PEER, Principal, PrincipalKind
from halfway.protocol.records import CheckMode, Message, OpKind
from halfway.protocol.transactions import Cause, Outcome, State
from tests.support.ids import named_id
from tests.support.service.broker import Memory, topic
from tests.support.service.world import QUICK, ROLLBACK_AT_LAST, SHARDS, World
from tests.support.surroundings import verdict
from tests.unit.coordinator.resolve.test_ending import ops


@pytest.fixture
async def rolling_back() -> AsyncIterator[World]:
    """One instance with a group that chose rollback after two checks, whose endpoint always says unknown."""
    world = await World.start()
    await world.group(policy=ROLLBACK_AT_LAST)
    world.memory.caller.always(verdict(Outcome.UNKNOWN))
    yield world
    await world.stop()


async def exhaust(world: World) -> None:
    """Let the policy decide after all checks."""
    for _ in range(5):
        await world.scan(after_s=60)


async def refused(world: World, end: End, error: type[HalfwayError] = NotAuthorisedError, within_s: float = 30) -> None:
    with pytest.raises(error):
        await world.coordinator.end(end, deadline=world.deadline(within_s))


@pytest.mark.parametrize("cause", [Cause.PRODUCER, Cause.OPERATOR])
@pytest.mark.parametrize("restarts", [False, True])
async def test_a_refused_commit_is_in_the_log_before_its_answer(
    rolling_back: World, cause: Cause, *, restarts: bool
) -> None:
    """Once, however often it is refused, with who said it. Policy parks; the same end commits once that is possible."""
    prepared = await rolling_back.prepare()
    rolling_back.memory.faults.denied_topics.add("orders")
    commit = End(id=prepared.id, outcome=Outcome.COMMIT, cause=cause)
    for _ in range(3):
        await refused(rolling_back, commit)
        assert [(op.kind, op.cause, op.commit_verdict) for op in ops(rolling_back, prepared.id)] == [
            (OpKind.VERDICT, cause, True)
        ]
        assert not rolling_back.coordinator.shards.unwritten_commit_verdicts
    world = await rolling_back.restart() if restarts else rolling_back
    world.memory.caller.always(verdict(Outcome.UNKNOWN))
    await exhaust(world)
    shown = await world.get(prepared.id)
    assert (shown.state, shown.commit_verdict) == (State.PARKED, True)
    assert "commit was said" in (shown.reason or "")
    world.memory.faults.denied_topics.clear()
    assert (await world.end(prepared.id, Outcome.COMMIT)).changed
    if restarts:
        await world.stop()


@pytest.mark.parametrize("reason", [TopicUnavailableError, MessageTooLargeError, NotAuthorisedError])
async def test_every_reason_that_refuses_a_commit_leaves_it_remembered(
    rolling_back: World, reason: type[HalfwayError]
) -> None:
    """A topic that is gone, a lowered size limit, a permission that was taken away."""
    prepared = await rolling_back.prepare()
    if reason is TopicUnavailableError:
        rolling_back.memory.delete_topic("orders")
    elif reason is MessageTooLargeError:
        rolling_back.memory.create_topic("orders", topic(3, max_message_bytes=1))
    else:
        rolling_back.memory.faults.denied_topics.add("orders")
    await refused(rolling_back, End(id=prepared.id, outcome=Outcome.COMMIT), reason)
    assert [op.kind for op in ops(rolling_back, prepared.id)] == [OpKind.VERDICT]
    await exhaust(rolling_back)
    assert await rolling_back.state(prepared.id) is State.PARKED


async def test_each_refused_commit_of_a_list_is_recorded(rolling_back: World) -> None:
    """A batch or a frame of a stream: all of them, and a refused rollback is not."""
    prepared = [await rolling_back.prepare() for _ in range(3)]
    rolling_back.memory.faults.denied_topics.add("orders")
    ends = [End(id=one.id, outcome=Outcome.COMMIT) for one in prepared]
    answers = await rolling_back.begin_ends(ends, deadline=rolling_back.deadline()).all()
    assert [type(answer) for answer in answers] == [NotAuthorisedError] * 3
    assert [[op.kind for op in ops(rolling_back, one.id)] for one in prepared] == [[OpKind.VERDICT]] * 3
    assert (await rolling_back.end(prepared[0].id, Outcome.ROLLBACK)).changed


async def test_a_refused_commit_that_cannot_be_recorded_in_time_is_unconfirmed(rolling_back: World) -> None:
    """Its error would promise that it is in the log. It is kept here, and recorded before policy decides."""
    prepared = await rolling_back.prepare()
    rolling_back.memory.faults.denied_topics.add("orders")
    lane = rolling_back.memory.lane
    submit, held = lane.submit, rolling_back.memory.faults.lane_held()

    def hold_after_the_refusal(writes: object) -> None:
        submit(writes)  # type: ignore[arg-type]
        lane.submit = submit  # type: ignore[method-assign]
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, held.__enter__)

    lane.submit = hold_after_the_refusal  # type: ignore[method-assign]
    await refused(rolling_back, End(id=prepared.id, outcome=Outcome.COMMIT), EndUnconfirmedError, within_s=0.1)
    assert not ops(rolling_back, prepared.id)
    held.__exit__(None, None, None)
    await exhaust(rolling_back)
    assert await rolling_back.state(prepared.id) is State.PARKED
    assert next(op.kind for op in ops(rolling_back, prepared.id)) is OpKind.VERDICT


async def test_a_late_commit_that_is_then_refused_is_recorded(rolling_back: World) -> None:
    """It was answered `end_unconfirmed` while it waited for the lane, and nobody sends it again."""
    prepared = await rolling_back.prepare()
    with rolling_back.memory.faults.lane_held():
        await refused(rolling_back, End(id=prepared.id, outcome=Outcome.COMMIT), EndUnconfirmedError, within_s=0.02)
        rolling_back.memory.faults.denied_topics.add("orders")
        await exhaust(rolling_back)
    await exhaust(rolling_back)
    assert await rolling_back.state(prepared.id) is State.PARKED


async def test_a_commit_overtakes_a_rollback_by_policy_that_waits_for_the_lane(rolling_back: World) -> None:
    """The policy has the claim, but has written nothing: it gives way, although the commit is refused."""
    prepared = await rolling_back.prepare()
    for _ in range(2):
        await rolling_back.scan(after_s=60)
    rolling_back.memory.faults.denied_topics.add("orders")
    with rolling_back.memory.faults.lane_held():
        await rolling_back.scan(after_s=60)
        assert prepared.id in rolling_back.coordinator.shards.claims
        ending = asyncio.create_task(rolling_back.end(prepared.id, Outcome.COMMIT))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    with pytest.raises(NotAuthorisedError):
        await ending
    await exhaust(rolling_back)
    assert await rolling_back.state(prepared.id) is State.PARKED


async def test_a_commit_whose_caller_went_away_while_it_waited_is_recorded(rolling_back: World) -> None:
    """Another change had claimed the id: the commit goes no further, but it was said."""
    prepared = await rolling_back.prepare()
    with rolling_back.memory.faults.lane_held():
        noting = asyncio.create_task(rolling_back.end(prepared.id, Outcome.UNKNOWN, remark="busy"))
        await rolling_back.until(lambda: prepared.id in rolling_back.coordinator.shards.claims)
        waiting = rolling_back.begin_ends(
            [End(id=prepared.id, outcome=Outcome.COMMIT)], deadline=rolling_back.deadline()
        )
        await asyncio.sleep(0)
        waiting.abandon()
    await noting
    await rolling_back.until(lambda: OpKind.VERDICT in [op.kind for op in ops(rolling_back, prepared.id)])


async def test_a_refused_commit_of_a_parked_transaction_is_remembered_after_a_resume(rolling_back: World) -> None:
    """The parked record is written again with the verdict."""
    await rolling_back.group(policy=QUICK)
    prepared = await rolling_back.prepare()
    await exhaust(rolling_back)
    assert await rolling_back.state(prepared.id) is State.PARKED
    rolling_back.memory.faults.denied_topics.add("orders")
    await refused(rolling_back, End(id=prepared.id, outcome=Outcome.COMMIT))
    await rolling_back.group(policy=ROLLBACK_AT_LAST)
    await rolling_back.coordinator.resume(prepared.id, deadline=rolling_back.deadline())
    await exhaust(rolling_back)
    shown = await rolling_back.get(prepared.id)
    assert (shown.state, shown.commit_verdict) == (State.PARKED, True)


async def test_a_shard_is_not_released_before_what_was_said_is_recorded(rolling_back: World) -> None:
    """The instance stops while the answer to a check is refused, and while it records the commit of a caller."""
    checked, ended = await rolling_back.prepare(), await rolling_back.prepare()
    rolling_back.memory.caller.always(verdict(Outcome.COMMIT))
    rolling_back.memory.faults.denied_topics.add("orders")
    with rolling_back.memory.faults.lane_held():
        await rolling_back.coordinator.check(checked.id, deadline=rolling_back.deadline())
        ending = asyncio.create_task(rolling_back.end(ended.id, Outcome.COMMIT))
        await rolling_back.until(lambda: {checked.id, ended.id} <= rolling_back.coordinator.shards.claims.keys())
        await rolling_back.coordinator.drain()
        stopping = asyncio.create_task(rolling_back.memory.membership.stop(deadline=rolling_back.deadline()))
        await asyncio.sleep(0)
    await stopping
    for one in (checked, ended):
        assert [op.kind for op in ops(rolling_back, one.id)] == [OpKind.VERDICT]
    with pytest.raises(NotAuthorisedError):
        await ending


async def test_a_commit_that_waits_for_its_turn_is_recorded_before_its_shard_is_released(rolling_back: World) -> None:
    """One change has the claim, a second one waits for the release, and the commit for the turn of the second one."""
    prepared = await rolling_back.prepare()
    with rolling_back.memory.faults.lane_held():
        ends = []
        for outcome, remark in ((Outcome.UNKNOWN, "one"), (Outcome.UNKNOWN, "two"), (Outcome.COMMIT, None)):
            ends.append(asyncio.create_task(rolling_back.end(prepared.id, outcome, remark=remark)))
            await asyncio.sleep(0)
        await rolling_back.until(lambda: prepared.id in rolling_back.coordinator.shards.unwritten_commit_verdicts)
        stopping = asyncio.create_task(rolling_back.memory.membership.stop(deadline=rolling_back.deadline()))
        await asyncio.sleep(0)
    await stopping
    assert OpKind.VERDICT in [op.kind for op in ops(rolling_back, prepared.id)]
    for waiting in ends:
        waiting.cancel()
    await asyncio.gather(*ends, return_exceptions=True)


async def test_a_shard_is_not_released_before_a_record_that_a_full_lane_refused(
    rolling_back: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the commit that the check said nor the first record of it finds room in the lane."""
    prepared = await rolling_back.prepare()
    rolling_back.memory.caller.always(verdict(Outcome.COMMIT))
    lane, refusals = rolling_back.memory.lane, 0
    submit = lane.submit

    def refuse_twice(writes: Sequence[LaneWrite]) -> None:
        nonlocal refusals
        if refusals < 2:
            refusals += 1
            raise OverloadedError("the lane is full")
        submit(writes)

    monkeypatch.setattr(lane, "submit", refuse_twice)
    await rolling_back.coordinator.check(prepared.id, deadline=rolling_back.deadline())
    await rolling_back.until(lambda: refusals == 1 and not rolling_back.coordinator.shards.claims)
    await rolling_back.memory.membership.stop(deadline=rolling_back.deadline())
    assert [op.kind for op in ops(rolling_back, prepared.id)] == [OpKind.VERDICT]


async def test_another_groups_end_does_not_drop_a_commit_verdict_that_is_kept() -> None:
    """Otherwise the policy could roll back against a commit verdict that cannot be written for long."""
    memory = Memory(shards=SHARDS, topics={"orders": 1})
    memory.authority = KeyedAccess(memory.keys.table, [MasterSecret(b"s" * 32)], memory.clock)
    world = await World.start(memory)
    coordinator = world.coordinator
    shop, other = (Principal(kind=PrincipalKind.GROUP, name=name) for name in ("shop", "other"))
    spec = GroupSpec(name="shop", mode=CheckMode.PULL, urls=(), topics=("orders",), policy=QUICK)
    await coordinator.put_group(spec, deadline=world.deadline(), principal=PEER)
    order = Prepare(group="shop", id=named_id("order-1"), messages=(Message(topic="orders", key=b"k", value=b"v"),))
    await coordinator.prepare(order, deadline=world.deadline(), principal=shop)
    await world.scan(after_s=6)
    [check] = await coordinator.lease_checks("shop", at_most=1, wait_s=0, principal=shop)
    commit = End(id=named_id("order-1"), outcome=Outcome.COMMIT, check_id=check.check_id)
    with memory.faults.lane_held():
        with pytest.raises(UnknownTransactionError):
            await coordinator.end(commit, deadline=world.deadline(), principal=other)
        assert named_id("order-1") not in coordinator.shards.unwritten_commit_verdicts
        with pytest.raises(EndUnconfirmedError):
            await coordinator.end(commit, deadline=world.deadline(0.02), principal=shop)
        assert named_id("order-1") in coordinator.shards.unwritten_commit_verdicts
        with pytest.raises(UnknownTransactionError):
            await coordinator.end(commit, deadline=world.deadline(), principal=other)
        assert named_id("order-1") in coordinator.shards.unwritten_commit_verdicts
    await world.stop()


async def test_to_keep_many_commits_costs_each_of_them_as_much_as_one(
    rolling_back: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While Kafka takes no writes, every commit is kept. Those of shards served elsewhere are dropped now and then."""
    monkeypatch.setattr("halfway.coordinator.commit_verdicts._CLEANUP_AT", 10)
    shards = rolling_back.coordinator.shards
    verdicts, looks, find = CommitVerdicts(shards, rolling_back.coordinator._ending.record_verdict), 0, shards.find
    prepared = await rolling_back.prepare()
    entry = shards.of(prepared.id).state.find(prepared.id)
    assert isinstance(entry, Pending)

    def counted(number: int) -> Shard | None:
        nonlocal looks
        looks += 1
        return find(number)

    monkeypatch.setattr(shards, "find", counted)
    for number in range(1_000):
        verdicts.keep(msgspec.structs.replace(entry, id=f"id-{number}"), 0, Cause.PRODUCER)
    assert len(shards.unwritten_commit_verdicts) == 1_000
    assert looks <= 3_000
