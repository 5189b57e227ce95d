"""The ports in memory beyond the contract that they share with Kafka: faults, restarts, other instances, time."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from halfway.coordinator import changes
from halfway.coordinator.changes import OpFields
from halfway.coordinator.coordinator import Coordinator
from halfway.coordinator.ports import Cursors, LaneWrite
from halfway.coordinator.requests import End, GroupSpec, Prepare, ServiceLimits
from halfway.memory import Memory, topic
from halfway.protocol.errors import LaneLostError, NotWrittenError
from halfway.protocol.records import CheckMode, Half, Message
from halfway.protocol.transactions import Cause, Outcome, State
from tests.support.contract.backend import new_id
from tests.support.contract.instance import Listener, half_of
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
