"""The ports in memory beyond the contract that they share with Kafka: faults, restarts, other instances, time."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from halfway.coordinator import changes
from halfway.coordinator.changes import OpFields
from halfway.coordinator.coordinator import Coordinator
from halfway.coordinator.ports import CheckRequest, Cursors, Lane, LaneWrite, Membership, Observer
from halfway.coordinator.requests import End, GroupSpec, Prepare, ServiceLimits
from halfway.memory import (
    ManualClock,
    Memory,
    RecordingObserver,
    ScriptedCaller,
    no_verdict,
    topic,
    unreachable,
    verdict,
)
from halfway.memory.log import Partition
from halfway.protocol.errors import (
    KafkaUnavailableError,
    LaneLostError,
    MessageTooLargeError,
    NotAuthorisedError,
    NotWrittenError,
    OutcomeUnknownError,
    OverloadedError,
)
from halfway.protocol.policy import PolicyOverrides
from halfway.protocol.records import CheckMode, Group, Half, Message
from halfway.protocol.transactions import Cause, Outcome, State
from tests.support.contract.groups import put
from tests.support.contract.instance import Listener, half_of, new_id
from tests.support.domain.states import state_of
from tests.support.replies import appended, submitted

SHARDS = 2


def deadline(seconds: float = 60.0) -> float:
    return asyncio.get_running_loop().time() + seconds


class One:
    """An instance over a memory, with the listener of the contract tests."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.listener = Listener()

    async def start(self) -> "One":
        await self.memory.membership.start(self.listener)
        await turns()
        assert len(self.listener.states) == len(self.memory.log.shards)
        return self

    async def prepared(self, *messages: Message) -> Half:
        half = half_of(new_id(), messages)
        offset = await appended(self.memory.half_log, 0, half, deadline=deadline())
        self.listener.states[0].apply_half(offset, half.id, half)
        return half

    def commit_of(self, half: Half) -> LaneWrite:
        entry = self.listener.states[0].find(half.id)
        assert entry is not None
        told = OpFields(cause=Cause.PRODUCER, at=self.memory.clock.now_ms(), deadline=deadline(), checks=0)
        return changes.committed(0, entry, half, told)  # type: ignore[arg-type]


async def turns(count: int = 10) -> None:
    """Let the loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture
def memory() -> Memory:
    return Memory(shards=SHARDS, topics={"orders": 3, "small": topic(1, max_message_bytes=70_000)})


@pytest.fixture
async def one(memory: Memory) -> AsyncIterator[One]:
    yield await One(memory).start()
    memory.membership.kill()


@pytest.mark.parametrize("stored", [True, False])
async def test_an_ambiguous_append_may_or_may_not_be_stored(one: One, *, stored: bool) -> None:
    half = half_of(new_id())
    one.memory.faults.next_append_ambiguous(stored=stored)
    with pytest.raises(OutcomeUnknownError):
        await appended(one.memory.half_log, 0, half, deadline=deadline())
    await turns()
    assert (one.listener.states[0].find(half.id) is not None) == stored
    await appended(one.memory.half_log, 0, half, deadline=deadline())


@pytest.mark.parametrize("written", [True, False])
async def test_a_lost_batch_ends_the_incarnation_and_the_fold_tells(one: One, *, written: bool) -> None:
    halves = [await one.prepared(Message(topic="orders", value=b"v")) for _ in range(3)]
    one.memory.faults.lose_next_batch(written=written)
    results = await asyncio.gather(
        *(submitted(one.memory.lane, one.commit_of(half)) for half in halves), return_exceptions=True
    )
    assert all(isinstance(result, LaneLostError) for result in results)
    await turns()
    assert one.listener.events[-2 * SHARDS :] == [
        *(("lost", shard) for shard in range(SHARDS)),
        *(("acquired", shard) for shard in range(SHARDS)),
    ]
    expected = State.COMMITTED if written else State.PREPARED
    assert {state_of(one.listener.states[0], half.id) for half in halves} == {expected}
    assert len(one.memory.records("orders")) == (3 if written else 0)
    assert one.memory.observer.count("lane_failed") == 1


async def test_an_incarnation_that_is_lost_twice_at_once_is_followed_by_another(one: One) -> None:
    one.memory.membership.lose()
    one.memory.membership.lose()
    await turns()
    assert one.listener.events[-2 * SHARDS :] == [
        *(("lost", shard) for shard in range(SHARDS)),
        *(("acquired", shard) for shard in range(SHARDS)),
    ]


async def test_results_come_at_a_later_turn(one: One) -> None:
    half = await one.prepared()
    future = submitted(one.memory.lane, one.commit_of(half))
    assert not future.done()
    assert one.memory.log.shards[0].op.at(0) is None or not future.done()
    written = await future
    record = one.memory.log.shards[0].op.at(written.op or -1)
    assert record is not None
    assert record.key == half.id


async def test_what_waits_while_the_lane_is_held_goes_as_one_batch(one: One) -> None:
    halves = [await one.prepared() for _ in range(5)]
    with one.memory.faults.lane_held():
        futures = [submitted(one.memory.lane, one.commit_of(half)) for half in halves]
        await turns(50)
        assert not any(future.done() for future in futures)
    await asyncio.gather(*futures)
    assert one.memory.observer.count("lane_committed", ends=5) == 1


async def test_a_full_lane_refuses_at_once() -> None:
    one = await One(Memory(shards=1, lane_capacity=2)).start()
    halves = [await one.prepared() for _ in range(3)]
    futures = [submitted(one.memory.lane, one.commit_of(half)) for half in halves[:2]]
    with pytest.raises(OverloadedError):
        await submitted(one.memory.lane, one.commit_of(halves[2]))
    await asyncio.gather(*futures)


async def test_a_write_that_a_topic_forbids_holds_up_nobody_else(one: One) -> None:
    denied = await one.prepared(Message(topic="orders", value=b"v"))
    large = await one.prepared(Message(topic="small", value=b"x" * 80_000))
    good = await one.prepared(Message(topic="small", value=b"v"))
    one.memory.faults.denied_topics.add("orders")
    results = await asyncio.gather(
        *(submitted(one.memory.lane, one.commit_of(half)) for half in (denied, large, good)), return_exceptions=True
    )
    assert [type(result) for result in results[:2]] == [NotAuthorisedError, MessageTooLargeError]
    assert not isinstance(results[2], BaseException)
    with pytest.raises(NotAuthorisedError):
        await one.memory.topics.describe(["orders"], deadline=deadline())


async def test_kill_leaves_waiting_ends_unwritten_and_tells_nobody(one: One) -> None:
    half = await one.prepared(Message(topic="orders", value=b"v"))
    future = submitted(one.memory.lane, one.commit_of(half))
    before = list(one.listener.events)
    after = await One(one.memory.restarted()).start()
    with pytest.raises(NotWrittenError):
        await future
    assert one.listener.events == before
    assert state_of(after.listener.states[0], half.id) is State.PREPARED
    assert after.memory.records("orders") == ()
    assert after.memory.clock is one.memory.clock


async def test_a_second_instance_fences_the_first(one: One) -> None:
    half = await one.prepared(Message(topic="orders", value=b"v"))
    second = await One(Memory(log=one.memory.log, clock=one.memory.clock)).start()
    await turns()
    assert {event for event in one.listener.events if event[0] == "lost"} == {
        ("lost", shard) for shard in range(SHARDS)
    }
    with pytest.raises(NotWrittenError):
        await submitted(one.memory.lane, second.commit_of(half))
    await submitted(second.memory.lane, second.commit_of(half))
    assert len(second.memory.records("orders")) == 1


async def test_a_fenced_lane_writes_nothing(one: One) -> None:
    """It begins a batch before its tail has told it that another instance owns the shard."""
    half = await one.prepared(Message(topic="orders", value=b"v"))
    future = submitted(one.memory.lane, one.commit_of(half))
    one.memory.log.shards[0].owner = one.memory.log.new_incarnation()
    with pytest.raises(LaneLostError):
        await future
    assert one.memory.records("orders") == ()
    assert one.memory.observer.count("lane_failed", reason="fenced") == 1


async def test_a_foreign_prepare_comes_by_the_tail(one: One) -> None:
    half = half_of(new_id())
    offset = one.memory.foreign_prepare(1, half)
    assert one.listener.states[1].find(half.id) is None
    await turns()
    entry = one.listener.states[1].find(half.id)
    assert entry is not None
    assert one.listener.states[1].half_tail > offset


async def test_recovery_survives_compaction(one: One) -> None:
    pending = await one.prepared()
    ended = await one.prepared()
    await submitted(one.memory.lane, one.commit_of(ended))
    shard = one.memory.log.shards[0]
    for partition in (shard.half, shard.op, shard.parked):
        partition.compact(partition.end)
    after = await One(one.memory.restarted()).start()
    assert state_of(after.listener.states[0], pending.id) is State.PREPARED
    assert state_of(after.listener.states[0], ended.id) is State.COMMITTED


async def test_outcomes_older_than_the_horizon_are_not_read_again(one: One) -> None:
    half = await one.prepared()
    await submitted(one.memory.lane, one.commit_of(half))
    log = one.memory.log.shards[0]
    await one.memory.cursors.commit({0: Cursors(half=log.half.end, op=log.op.end)})
    one.memory.clock.advance(899)
    after = await One(one.memory.restarted()).start()
    assert state_of(after.listener.states[0], half.id) is State.COMMITTED
    after.memory.clock.advance(2)
    later = await One(after.memory.restarted()).start()
    assert later.listener.states[0].find(half.id) is None
    assert later.listener.states[0].op_cursor >= log.op.end - 1, "the cursor does not go back"


async def test_an_unavailable_kafka_answers_nothing(one: One) -> None:
    half = await one.prepared()
    one.memory.faults.unavailable = True
    with pytest.raises(KafkaUnavailableError):
        await one.memory.half_log.read_half(0, 0, half.id, deadline=deadline())
    with pytest.raises(KafkaUnavailableError):
        await one.memory.topics.describe(["orders"], deadline=deadline())
    group = Group(
        name="g", mode=CheckMode.PULL, urls=(), topics=(), policy=PolicyOverrides(), created_at=0, updated_at=0
    )
    with pytest.raises(KafkaUnavailableError):
        await put(one.memory.groups, group, deadline=deadline())
    await one.memory.cursors.commit({0: Cursors(half=1, op=1)})
    assert one.memory.cursors.load(0) == Cursors(half=0, op=0)
    one.memory.faults.unavailable = False
    await put(one.memory.groups, group, deadline=deadline())
    assert one.memory.groups.all() == [group]


def test_a_partition_has_gaps_and_finds_by_offset() -> None:
    partition: Partition[Half] = Partition()
    first = partition.append("a", None, ())
    partition.mark()
    second = partition.append("b", None, ())
    assert (first, second, partition.end) == (0, 2, 3)
    assert partition.at(1) is None
    assert [record.key for record in partition.since(1)] == ["b"]


def test_the_clock_stands_still_until_it_is_moved() -> None:
    clock = ManualClock(1_000)
    clock.advance(1.5)
    assert clock.now_ms() == 2_500
    clock.advance(-1)
    assert clock.now_ms() == 1_500
    clock.set(7)
    assert clock.now_ms() == 7


async def test_the_caller_replies_as_scripted() -> None:
    caller = ScriptedCaller()
    group = Group(
        name="g", mode=CheckMode.PUSH, urls=(), topics=(), policy=PolicyOverrides(), created_at=0, updated_at=0
    )
    request = CheckRequest(check_id="c", id="t", group="g", prepared_at=0, attempt=1, messages=())
    assert (await caller.call(group, ["http://a"], request)).outcome is Outcome.UNKNOWN
    for reply in (verdict(Outcome.COMMIT), no_verdict(), unreachable()):
        caller.always(reply)
        assert await caller.call(group, ["http://a", "http://b"], request) == reply

    async def later(_: CheckRequest) -> object:
        await asyncio.sleep(0)
        return verdict(Outcome.ROLLBACK, remark="no money")

    caller.answer = later  # type: ignore[assignment]
    assert (await caller.call(group, [], request)).remark == "no money"
    assert len(caller.requests) == 5
    assert caller.urls[1] == ("http://a", "http://b")


def test_the_observer_keeps_every_call() -> None:
    observer = RecordingObserver()
    observer.prepared({"g": 1}, "prepared", 0.1)
    observer.ended({"g": 1}, "commit", "producer", "changed", 0.1)
    observer.resolved_after({"g": 1}, "commit", 1.0)
    observer.checked("g", "commit", sent=True, seconds=0.1)
    observer.lane_committed(3, 100, 0.1)
    observer.skipped_record("t", "undecodable")
    observer.horizon_shortened(1, 5)
    assert observer.count("ended", outcome="commit", result="changed") == 1
    assert observer.count("ended", outcome="rollback") == 0
    assert len({call.event for call in observer.calls}) == 7


def test_the_ports_have_their_shapes(memory: Memory) -> None:
    """It is mypy that judges here."""
    lane: Lane = memory.lane
    membership: Membership = memory.membership
    observer: Observer = memory.observer
    assert (lane, observer) == (memory.ports["lane"], memory.ports["observer"])
    assert membership is memory.membership


async def test_a_user_runs_a_transaction_as_the_readme_shows() -> None:
    """A whole coordinator over a memory: prepare, commit, and the same commit after a restart."""
    memory = Memory(shards=2, topics={"orders": 3, "points": 1})
    limits = ServiceLimits(shards=2)
    coordinator = Coordinator(limits=limits, **memory.ports)
    await memory.membership.start(coordinator.shards)
    await turns()
    spec = GroupSpec(name="shop", mode=CheckMode.PULL, urls=(), topics=("orders", "points"))
    await coordinator.put_group(spec, deadline=deadline())
    messages = (Message(topic="orders", key=b"o-1", value=b"paid"), Message(topic="points", value=b"+5"))
    prepared = await coordinator.prepare(Prepare(group="shop", messages=messages), deadline=deadline())
    assert memory.records("orders") == ()
    ended = await coordinator.end(End(id=prepared.id, outcome=Outcome.COMMIT), deadline=deadline())
    assert ended.changed
    memory = memory.restarted()
    coordinator = Coordinator(limits=limits, **memory.ports)
    await memory.membership.start(coordinator.shards)
    await turns()
    again = await coordinator.end(End(id=prepared.id, outcome=Outcome.COMMIT), deadline=deadline())
    assert (again.state, again.changed) == (State.COMMITTED, False)
    [order] = memory.records("orders")
    assert (order.key, order.value, dict(order.headers)["halfway-message"]) == (b"o-1", b"paid", b"1/2")
    assert len(memory.records("points")) == 1
