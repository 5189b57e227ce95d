"""The port `Membership`: acquiring by folding the log, tailing, releasing."""

import asyncio

import msgspec
import pytest

from halfway.coordinator import changes
from halfway.coordinator.ports import Cursors
from halfway.protocol.entries import short_key_hash
from halfway.protocol.errors import NotWrittenError
from halfway.protocol.records import CheckMode, Group, Message, OpKind, PolicyOverrides
from halfway.protocol.transactions import Cause, State
from tests.support.contract.backend import PATIENCE_S, SHARDS, Backend, new_id
from tests.support.contract.groups import put, remove
from tests.support.contract.instance import Instance, half_of, running
from tests.support.domain.states import state_of
from tests.support.replies import appended, submitted
from tests.support.waiting import until_true

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_restart_finds_pending_parked_ended_and_checked(backend: Backend) -> None:
    topic = await backend.create_topic("orders")
    pending, checked, parked, resumed, committed, rolled_back = halves = [
        half_of(new_id(), (Message(topic=topic, key=b"%d" % number, value=b"v"),), at=backend.now_ms())
        for number in range(6)
    ]
    async with running(backend) as first:
        for half in halves:
            await first.prepare(0, half)
        told = first.told(cause=Cause.CHECK, checks=3, checked_at=backend.now_ms(), remark="busy", commit_verdict=True)
        await first.write(changes.noted(0, first.pending(0, checked.id), told, OpKind.VERDICT))
        await first.park(0, parked, reason="no verdict")
        await first.park(0, resumed, reason="no verdict")
        await first.resume(0, resumed)
        await first.write(first.commit_of(0, committed, remark="paid"))
        entry = first.entry(0, rolled_back.id)
        await first.write(changes.rolled_back(0, entry, rolled_back, first.told(cause=Cause.POLICY)))
        since = first.pending(0, resumed.id).since
        parked_at = first.entry(0, parked.id)

    async with running(backend) as second:
        state = second.states[0]
        found = second.pending(0, pending.id)
        assert (found.fingerprint, found.prepared_at, found.checks) == (pending.fingerprint, pending.prepared_at, 0)
        assert found.size == pending.size
        again = await second.half_log.read_half(0, found.offset, pending.id, deadline=second.deadline())
        assert again == pending
        found = second.pending(0, checked.id)
        assert (found.checks, found.checked_at, found.commit_verdict) == (3, told.checked_at, True)
        assert found.remark == "busy"
        assert second.entry(0, parked.id) == parked_at
        assert state_of(state, parked.id) is State.PARKED
        found = second.pending(0, resumed.id)
        assert (found.since, found.checks) == (since, 0)
        done = second.ended(0, committed.id)
        assert (done.state, done.cause, done.remark) == (State.COMMITTED, Cause.PRODUCER, "paid")
        assert done.fingerprint == committed.fingerprint
        assert list(done.index) == [(topic, short_key_hash(b"4"))]
        done = second.ended(0, rolled_back.id)
        assert (done.state, done.cause) == (State.ROLLED_BACK, Cause.POLICY)
        await second.write(second.commit_of(0, pending))
    assert len(await backend.records(topic)) == 2


async def test_a_restart_from_committed_cursors_finds_the_same(backend: Backend) -> None:
    pending, parked, committed = (half_of(new_id(shard=1), at=backend.now_ms()) for _ in range(3))
    async with running(backend) as first:
        for half in (committed, parked, pending):
            await first.prepare(1, half)
        await first.write(first.commit_of(1, committed))
        await first.park(1, parked, reason="no verdict")
        told = first.told(cause=Cause.CHECK, checks=2, checked_at=backend.now_ms())
        await first.write(changes.noted(1, first.pending(1, pending.id), told, OpKind.CHECKED))
        await first.wait_for_tail(1)
        state = first.states[1]
        await first.cursors.commit({1: Cursors(half=state.half_cursor, op=state.op_cursor)})
    async with running(backend) as second:
        assert second.pending(1, pending.id).checks == 2
        assert state_of(second.states[1], parked.id) is State.PARKED
        assert state_of(second.states[1], committed.id) is State.COMMITTED, "it ended within the outcome horizon"
        assert state_of(second.states[1], pending.id) is State.PREPARED


async def test_a_stray_of_a_former_run_is_seen_after_a_restart(backend: Backend) -> None:
    half = half_of(new_id(), at=backend.now_ms())
    async with running(backend) as first:
        await first.prepare(0, half)
        await first.write(first.commit_of(0, half))
    late = await backend.foreign_prepare(0, half)
    async with running(backend) as second:
        assert state_of(second.states[0], half.id) is State.COMMITTED
        assert (half.id, late) in second.states[0].strays()


async def test_stop_waits_for_what_is_in_flight_and_releases(backend: Backend) -> None:
    half = half_of(new_id())
    async with running(backend) as first:
        await first.prepare(0, half)
        first.listener.may_finish.clear()
        stopping = asyncio.create_task(first.stop())
        await until_true(lambda: ("revoking", 0) in first.listener.events, "the shard is revoked")
        await first.write(first.commit_of(0, half))
        assert not stopping.done()
        first.listener.may_finish.set()
        await stopping
        assert {event for event in first.listener.events if event[0] == "revoked"} == {
            ("revoked", shard) for shard in range(SHARDS)
        }
        assert not [event for event in first.listener.events if event[0] == "lost"]
    async with running(backend) as second:
        assert state_of(second.states[0], half.id) is State.COMMITTED


async def test_a_stop_past_its_deadline_drops_the_shards(backend: Backend) -> None:
    async with running(backend) as first:
        first.listener.may_finish.clear()
        await first.stop(seconds=0.5)
        assert {event for event in first.listener.events if event[0] == "lost"} == {
            ("lost", shard) for shard in range(SHARDS)
        }
    async with running(backend) as second:
        assert set(second.states) == set(range(SHARDS))


async def test_groups_outlive_an_instance(backend: Backend) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    kept, deleted = (
        Group(
            name=new_id("group"),
            mode=CheckMode.PULL,
            urls=(),
            topics=("orders",),
            policy=PolicyOverrides(max_checks=3),
            created_at=1,
            updated_at=2,
        )
        for _ in range(2)
    )
    async with backend.ports() as first:
        for group in (kept, deleted):
            await put(first.groups, group, deadline=deadline)
        await remove(first.groups, deleted.name, deadline=deadline)
    async with backend.ports() as second:
        assert second.groups.get(kept.name) == kept
        assert second.groups.get(deleted.name) is None


async def test_recovery_begins_at_the_cursors(backend: Backend) -> None:
    """Records before the half cursor are not read: a pending half there is not found."""
    before, after = half_of(new_id("before")), half_of(new_id("after"))
    async with running(backend) as first:
        await appended(first.half_log, 0, before, deadline=first.deadline())
        offset = await appended(first.half_log, 0, after, deadline=first.deadline())
        await first.wait_for_tail(0)
        await first.cursors.commit({0: Cursors(half=offset, op=0)})
    async with running(backend) as second:
        assert second.states[0].find(after.id) is not None
        assert second.states[0].find(before.id) is None


async def test_the_cursors_of_a_shard_that_had_nothing_to_do_never_go_back(backend: Backend) -> None:
    half = half_of(new_id(shard=1))
    async with running(backend) as first:
        await first.prepare(1, half)
        await first.write(first.commit_of(1, half))
        cursors = await committed_cursors(first, 1)
    for _ in range(2):
        async with running(backend) as later:
            now = await committed_cursors(later, 1)
            assert now.half >= cursors.half
            assert now.op >= cursors.op
            cursors = now


async def committed_cursors(instance: Instance, shard: int) -> Cursors:
    """Commit the cursors as a scan does."""
    await instance.wait_for_tail(shard)
    state = instance.states[shard]
    cursors = Cursors(half=state.half_cursor, op=state.op_cursor)
    await instance.cursors.commit({shard: cursors})
    return cursors


async def test_a_shard_that_is_not_owned_is_not_written(backend: Backend) -> None:
    half = half_of(new_id())
    async with running(backend) as instance:
        await instance.prepare(0, half)
        write = instance.commit_of(0, half)
        with pytest.raises(NotWrittenError):
            await submitted(instance.lane, msgspec.structs.replace(write, shard=7))
        await instance.stop()
        with pytest.raises(NotWrittenError):
            await submitted(instance.lane, write)
    assert await backend.stored("op", 0, half.id) == []
