"""Ends: claimed, written once, and answered by the state that results, even if the lane is lost."""

import asyncio
import gc

import pytest

from halfway.coordinator.ports import LaneWrite, Written
from halfway.coordinator.requests import End, EndResult
from halfway.protocol.errors import (
    AlreadyEndedError,
    EndUnconfirmedError,
    KafkaUnavailableError,
    LaneLostError,
    OutcomeExpiredError,
    OverloadedError,
    ShardUnavailableError,
    UnknownTransactionError,
)
from halfway.protocol.records import Half, Message, Op, OpKind
from halfway.protocol.transactions import Cause, Outcome, State
from tests.support.ids import named_id
from tests.support.service.broker import Memory
from tests.support.service.world import SHARDS, World
from tests.support.surroundings import unreachable


def ops(world: World, transaction_id: str) -> list[Op]:
    """Return the op markers of an id, oldest first."""
    return [
        record.value
        for shard in world.memory.log.shards
        for record in shard.op.records
        if isinstance(record.value, Op) and record.key == transaction_id
    ]


@pytest.mark.parametrize("cached", [True, False])
async def test_a_payload_counts_as_found_in_memory_or_as_read_back(world: World, *, cached: bool) -> None:
    """Once for its end, and not at all for the same end again."""
    prepared, payloads = await world.prepare(), world.coordinator.shards.payloads
    if not cached:
        payloads.drop(prepared.id)
    assert (await world.end(prepared.id, Outcome.COMMIT)).changed
    assert not (await world.end(prepared.id, Outcome.COMMIT)).changed
    assert (payloads.hits, payloads.misses) == ((1, 0) if cached else (0, 1))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("first,second", [(Outcome.COMMIT, Outcome.ROLLBACK), (Outcome.ROLLBACK, Outcome.COMMIT)])
async def test_an_outcome_of_a_clock_that_was_set_back_is_remembered(
    world: World, first: Outcome, second: Outcome, *, cached: bool
) -> None:
    """By more than the horizon, with or without the payload in memory: the end is known, and the id is not free."""
    prepared = await world.prepare(transaction_id=named_id("one"))
    if not cached:
        world.coordinator.shards.payloads.drop(named_id("one"))
    world.memory.clock.advance(-3600)
    assert (await world.end(named_id("one"), first)).changed
    assert not (await world.end(named_id("one"), first)).changed
    with pytest.raises(AlreadyEndedError):
        await world.end(named_id("one"), second)
    world.memory.clock.advance(3600)
    await world.scan()
    assert not (await world.prepare(transaction_id=named_id("one"))).created
    [op] = ops(world, named_id("one"))
    assert op.at >= prepared.prepared_at


@pytest.mark.parametrize("written", [True, False])
async def test_a_lost_lane_is_settled_by_the_fold(world: World, *, written: bool) -> None:
    """The caller waits across incarnations; the answer says that its end changed the state, written before or not."""
    prepared = await world.prepare()
    world.memory.faults.lose_next_batch(written=written)
    ended = await world.end(prepared.id, Outcome.COMMIT)
    assert (ended.state, ended.changed) == (State.COMMITTED, True)
    assert len(world.memory.records("orders")) == 1
    assert len(ops(world, prepared.id)) == 1


async def test_an_end_that_may_stand_is_unconfirmed_if_nobody_serves_its_shard(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not `shard_unavailable`, which means that nothing was done; the write stands when the shard is served again."""
    prepared = await world.prepare()
    membership, nobody = world.memory.membership, asyncio.Event()
    with monkeypatch.context() as patched:
        patched.setattr(membership, "_begin_incarnation", nobody.wait)
        patched.setattr("halfway.coordinator.ending.WRITE_LIMIT_S", 0.1)
        # The timer of its call would give the same answer at nearly the same moment.
        patched.setattr(world.coordinator._ending._deadlines, "watch", lambda *_: None)
        world.memory.faults.lose_next_batch(written=True)
        with pytest.raises(EndUnconfirmedError):
            await world.coordinator.end(End(id=prepared.id, outcome=Outcome.COMMIT), deadline=world.deadline(0.05))
        await world.until(lambda: not world.coordinator.shards.claims)
    nobody.set()
    await world.until(lambda: len(world.coordinator.shards.served) == SHARDS)
    assert (await world.end(prepared.id, Outcome.COMMIT)).state is State.COMMITTED
    assert len(world.memory.records("orders")) == 1


async def test_an_end_past_its_deadline_is_not_written_behind_the_callers_back(world: World) -> None:
    """While the lane is held the caller gets `end_unconfirmed`; the transaction is still pending afterwards."""
    prepared = await world.prepare()
    with world.memory.faults.lane_held(), pytest.raises(EndUnconfirmedError):
        await world.coordinator.end(End(id=prepared.id, outcome=Outcome.COMMIT), deadline=world.deadline(0.05))
    await world.until(lambda: not world.coordinator.shards.claims)
    assert await world.state(prepared.id) is State.PREPARED
    assert (await world.end(prepared.id, Outcome.ROLLBACK)).changed


async def test_late_ends_that_cannot_be_noted_are_answered_nevertheless(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each end of a list gets its error by the deadline, even if another one fails; no timer is left."""
    ends = [End(id=(await world.prepare()).id, outcome=Outcome.COMMIT, cause=Cause.OPERATOR) for _ in range(3)]
    ending = world.coordinator._ending

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(ending.verdicts, "settle", broken)
    with world.memory.faults.lane_held():
        answers = world.begin_ends(ends, deadline=world.deadline(0.05))
        await world.until(lambda: not answers.left)
    assert [type(error) for error in answers.results] == [EndUnconfirmedError] * 3
    assert not ending._deadlines._watched


async def test_an_end_that_waits_for_another_goes_no_further_if_its_caller_goes_away(world: World) -> None:
    """It is answered at once, long before its deadline; the change that has claimed the id is not affected."""
    prepared = await world.prepare()
    wanted = [End(id=prepared.id, outcome=Outcome.COMMIT)]
    with world.memory.faults.lane_held():
        first = world.begin_ends(wanted, deadline=world.deadline())
        second = world.begin_ends(wanted, deadline=world.deadline(3600))
        await asyncio.sleep(0)
        second.abandon()
        await world.until(lambda: not second.left)
        assert first.left
    (ended,) = await first.all()
    assert isinstance(ended, EndResult)
    assert ended.changed
    assert isinstance(second.results[0], EndUnconfirmedError)
    assert len(ops(world, prepared.id)) == 1


async def test_a_caller_that_goes_away_does_not_end_the_write(world: World) -> None:
    """A cancelled request leaves an end that is written completely or not at all."""
    prepared = await world.prepare()
    with world.memory.faults.lane_held():
        task = asyncio.create_task(world.end(prepared.id, Outcome.COMMIT))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await world.until(lambda: not world.coordinator.shards.claims)
    assert (await world.end(prepared.id, Outcome.COMMIT)).state is State.COMMITTED
    assert len(world.memory.records("orders")) == 1


async def test_an_id_is_known_while_its_end_is_committed_and_not_answered(world: World) -> None:
    """The tail has the tombstone before the lane has its answer: the second end waits, and GET shows it, no 404."""
    prepared = await world.prepare(transaction_id=named_id("order-1"))
    number = world.coordinator.shards.number_of(prepared.id)
    log = world.memory.log.shards[number].half
    with world.memory.faults.answers_held():
        first = asyncio.create_task(world.end(prepared.id, Outcome.COMMIT))
        await world.until(lambda: len(world.memory.records("orders")) == 1)
        await world.until(lambda: world.coordinator.shards.get(number).state.half_tail >= log.end)
        second = asyncio.create_task(world.end(prepared.id, Outcome.COMMIT))
        opposite = asyncio.create_task(world.end(prepared.id, Outcome.ROLLBACK))
        again = await world.prepare(transaction_id=named_id("order-1"))
        shown = await world.get(prepared.id)
        assert (shown.state, shown.waits) == (State.PREPARED, "lane")
    assert (await first).changed is True
    assert (await second).changed is False
    with pytest.raises(AlreadyEndedError):
        await opposite
    assert again.created is False
    shown = await world.get(prepared.id)
    assert (shown.state, shown.waits) == (State.COMMITTED, None)
    await world.scan()
    assert [record.value for record in log.records if record.key == prepared.id][1:] == [None], "nothing to correct"


async def test_an_outcome_that_is_no_longer_held_is_expired_not_unknown(world: World) -> None:
    """After the outcome horizon an end is 410; the log stays as it is."""
    prepared = await world.prepare()
    await world.end(prepared.id, Outcome.COMMIT)
    await world.scan(after_s=30)
    assert (await world.end(prepared.id, Outcome.COMMIT)).changed is False
    await world.scan(after_s=40)
    with pytest.raises(OutcomeExpiredError):
        await world.end(prepared.id, Outcome.COMMIT)
    again = await world.restart()
    with pytest.raises(OutcomeExpiredError) as expired:
        await again.end(prepared.id, Outcome.ROLLBACK)
    assert "is not known here" in expired.value.detail
    assert f"GET /v1/transactions/{prepared.id}/history" in expired.value.detail
    # An id of the old form does not tell its age.
    with pytest.raises(UnknownTransactionError, match="GET /v1/transactions/never-prepared/history"):
        await again.end("never-prepared", Outcome.COMMIT)
    assert len(ops(world, prepared.id)) == 1
    await again.stop()


async def test_a_check_id_makes_the_cause_check(world: World) -> None:
    """An end with the id of a check that was sent is a verdict; any other check id is not."""
    first, second, third = await world.prepare(), await world.prepare(), await world.prepare(check_after_ms=50_000)
    await world.scan(after_s=6)
    await world.end(first.id, Outcome.COMMIT, check_id=f"{first.id}:1")
    await world.end(third.id, Outcome.COMMIT, check_id=f"{third.id}:1")
    await world.end(second.id, Outcome.COMMIT, check_id=f"{first.id}:1")
    assert (await world.get(first.id)).cause is Cause.CHECK
    assert (await world.get(second.id)).cause is Cause.PRODUCER
    assert (await world.get(third.id)).cause is Cause.PRODUCER


async def test_a_shard_that_is_away_is_unavailable(world: World) -> None:
    """While no shard is served, ends and prepares are refused with Retry-After, not answered 404."""
    prepared = await world.prepare()
    await world.memory.membership.stop(deadline=world.deadline())
    with pytest.raises(ShardUnavailableError):
        await world.end(prepared.id, Outcome.COMMIT)
    with pytest.raises(ShardUnavailableError):
        await world.prepare()


async def test_an_exception_while_a_refused_commit_is_recorded_leaves_the_id_free(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is recorded, so the caller is told `end_unconfirmed`; another end of the id is done."""
    prepared = await world.prepare(Message(topic="points", key=b"k", value=b"v"))
    world.memory.delete_topic("points")

    def fail(*_: object) -> None:
        raise RuntimeError("it cannot be recorded")

    with monkeypatch.context() as patch:
        patch.setattr(world.coordinator._ending.verdicts, "settle", fail)
        with pytest.raises(EndUnconfirmedError):
            await world.end(prepared.id, Outcome.COMMIT)
    assert not world.coordinator.shards.claims
    assert (await world.end(prepared.id, Outcome.ROLLBACK)).changed


async def unreadable(*_: object, **__: object) -> Half:
    await asyncio.sleep(0)
    raise KafkaUnavailableError("Kafka did not answer in time")


async def test_an_end_that_fails_after_its_caller_has_gone_leaves_no_error_unseen(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged, not reported as an error of the program."""
    unseen: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    prepared = await world.prepare()
    world.coordinator.shards.payloads.drop(prepared.id)
    monkeypatch.setattr(world.memory.half_log, "read_half", unreadable)
    ending = asyncio.create_task(world.end(prepared.id, Outcome.COMMIT))
    while prepared.id not in world.coordinator.shards.claims:  # noqa: ASYNC110 - it is claimed only for a moment
        await asyncio.sleep(0)
    ending.cancel()
    await world.until(lambda: prepared.id not in world.coordinator.shards.claims)
    del ending
    gc.collect()
    assert unseen == []


async def errors_held(kind: type[Exception]) -> int:
    """Return how many errors of a kind are still referred to, once callbacks have run."""
    await asyncio.sleep(0)
    gc.collect()
    return sum(issubclass(type(found), kind) for found in gc.get_objects())  # isinstance would wake lazy objects


@pytest.mark.parametrize("cached", [True, False])
async def test_an_end_that_a_full_lane_refuses_leaves_nothing_in_memory(*, cached: bool) -> None:
    """Its error, its answer and the payload in its frames are freed, whether or not the payload had to be read."""
    memory = Memory(shards=SHARDS, topics={"orders": 3}, lane_capacity=0)
    world = await World.start(memory)
    await world.group()
    prepared = await world.prepare()
    before = await errors_held(OverloadedError)
    for _ in range(20):
        if not cached:
            world.coordinator.shards.payloads.drop(prepared.id)
        with pytest.raises(OverloadedError):
            await world.end(prepared.id, Outcome.COMMIT)
    assert await errors_held(OverloadedError) <= before + 1
    await world.coordinator.drain()
    world.memory.kill()  # a stop would wait for its deadline to record the refused commit


async def test_an_end_whose_payload_cannot_be_read_leaves_nothing_in_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error and its answer are freed."""
    prepared = await world.prepare()
    before = await errors_held(KafkaUnavailableError)
    monkeypatch.setattr(world.memory.half_log, "read_half", unreadable)
    for _ in range(20):
        world.coordinator.shards.payloads.drop(prepared.id)
        with pytest.raises(KafkaUnavailableError):
            await world.end(prepared.id, Outcome.COMMIT)
    assert await errors_held(KafkaUnavailableError) <= before + 1


async def test_an_end_whose_shard_was_away_while_its_payload_was_read_is_judged_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another owner has parked it in the meantime: the commit also removes the parked record."""
    prepared = await world.prepare()
    world.coordinator.shards.payloads.drop(prepared.id)
    reading, go_on, read_half = asyncio.Event(), asyncio.Event(), world.memory.half_log.read_half

    async def slow(shard: int, offset: int, transaction_id: str, *, deadline: float) -> Half:
        half = await read_half(shard, offset, transaction_id, deadline=deadline)
        reading.set()
        await go_on.wait()
        return half

    monkeypatch.setattr(world.memory.half_log, "read_half", slow)
    ending = asyncio.create_task(world.end(prepared.id, Outcome.COMMIT))
    await reading.wait()
    membership, nobody = world.memory.membership, asyncio.Event()
    with monkeypatch.context() as patched:
        patched.setattr(membership, "_begin_incarnation", nobody.wait)
        world.memory.lose()
        membership._group.leave_group()
        other = await World.start(Memory(beside=world.memory, outcome_horizon_s=60))
        other.memory.caller.always(unreachable())
        for after_s in (2000, 300):
            await other.scan(after_s=after_s)
        assert await other.state(prepared.id) is State.PARKED
        await other.stop()
    nobody.set()
    await world.until(lambda: len(world.coordinator.shards.served) == SHARDS)
    go_on.set()
    assert (await ending).changed
    records = [record for shard in world.memory.log.shards for record in shard.parked.records]
    assert [record.value is None for record in records if record.key == prepared.id] == [False, True]


async def test_a_commit_verdict_of_what_was_parked_does_not_undo_a_resume(world: World) -> None:
    """The verdict waits for the resume in progress, and is then recorded for the prepared transaction."""
    prepared = await world.prepare()
    world.memory.caller.always(unreachable())
    for after_s in (2000, 300):
        await world.scan(after_s=after_s)
    assert await world.state(prepared.id) is State.PARKED
    with world.memory.faults.lane_held():
        resuming = asyncio.create_task(world.coordinator.resume(prepared.id, deadline=world.deadline()))
        await world.until(lambda: prepared.id in world.coordinator.shards.claims)
        commit = End(id=prepared.id, outcome=Outcome.COMMIT, check_id=f"{prepared.id}:1")
        with pytest.raises(EndUnconfirmedError):
            await world.coordinator.end(commit, deadline=world.deadline(0.02))
        await asyncio.sleep(0.005)
    await resuming
    await world.until(lambda: prepared.id not in world.coordinator.shards.claims)
    await world.scan()
    kinds = [op.kind for op in ops(world, prepared.id)]
    assert kinds == [OpKind.PARKED, OpKind.RESUMED, OpKind.VERDICT]
    assert await world.state(prepared.id) is State.PREPARED


async def test_a_lane_that_answers_late_or_twice_is_heard_once_for_each_write(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late answer of a lane that hung must not be taken for that of the next write."""
    submitted: list[LaneWrite] = []
    monkeypatch.setattr(world.memory.lane, "submit", submitted.extend)
    shards, answer = world.coordinator.shards, world.memory.lane._answered
    prepared = await world.prepare()
    ending = asyncio.create_task(world.end(prepared.id, Outcome.COMMIT))
    await world.until(lambda: submitted)
    first = submitted[0]
    assert shards.may_still_be_written(first)
    answer([(first, LaneLostError(id=prepared.id))])
    assert not shards.may_still_be_written(first)
    await world.until(lambda: len(submitted) == 2)
    second = submitted[1]
    assert second is not first
    for late in (Written(half=6, op=6), LaneLostError(id=prepared.id)):
        answer([(first, late)])
        assert not ending.done()
        assert shards.may_still_be_written(second)
        assert not shards.may_still_be_written(first)
    answer([(second, Written(half=7, op=7)), (second, LaneLostError(id=prepared.id))])
    assert (await ending).changed
    await asyncio.sleep(0.05)
    assert len(submitted) == 2


async def test_an_unknown_end_that_leaves_a_remark_is_counted_as_it_is_answered(world: World) -> None:
    prepared = await world.prepare()
    told = await world.end(prepared.id, Outcome.UNKNOWN, remark="looking into it")
    assert not told.changed
    await asyncio.sleep(0)
    assert world.memory.observer.count("ended", outcome="unknown", result="unchanged") == 1
    assert world.memory.observer.count("ended", result="changed") == 0


async def test_one_end_that_breaks_at_once_keeps_no_other_of_its_list_from_being_done(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = [(await world.prepare()).id for _ in range(2)]
    state_of = world.coordinator.shards.number_of

    def number_of(transaction_id: str) -> int:
        if transaction_id == bad:
            raise RuntimeError
        return state_of(transaction_id)

    monkeypatch.setattr(world.coordinator.shards, "number_of", number_of)
    ends = [End(id=name, outcome=Outcome.COMMIT) for name in (bad, good)]
    broken, ended = await world.begin_ends(ends, deadline=world.deadline()).all()
    assert isinstance(broken, RuntimeError)
    assert ended == EndResult(id=good, state=State.COMMITTED, changed=True)


async def test_an_end_that_gives_up_its_turn_does_not_hold_up_the_next(world: World) -> None:
    prepared = await world.prepare()
    with world.memory.faults.lane_held():
        first = asyncio.create_task(world.end(prepared.id, Outcome.UNKNOWN, remark="first"))
        await asyncio.sleep(0.01)
        gone = asyncio.create_task(world.end(prepared.id, Outcome.ROLLBACK))
        late = world.coordinator.end(End(id=prepared.id, outcome=Outcome.ROLLBACK), deadline=world.deadline(0.05))
        last = asyncio.create_task(world.end(prepared.id, Outcome.COMMIT))
        await asyncio.sleep(0.01)
        gone.cancel()
        with pytest.raises(EndUnconfirmedError):
            await late
    assert not (await first).changed
    assert (await last).changed
    del gone, late
    gc.collect()
    assert not world.coordinator.shards.claims
