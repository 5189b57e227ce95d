"""What an instance knew of a shard that it served last, and what its new fold lacks."""

import asyncio

import msgspec
import pytest

from halfway.coordinator.changes import Record
from halfway.coordinator.ports import LogLoss
from halfway.coordinator.requests import ServiceLimits
from halfway.coordinator.shards.shard_table import ShardTable
from halfway.protocol.entries import Ended, ParkedEntry, Pending
from halfway.protocol.records import Half, OpKind
from halfway.protocol.shard import ShardState
from halfway.protocol.transactions import Outcome, State
from tests.support.domain.histories import half_of
from tests.support.domain.shard_records import op, parked_of
from tests.support.service.world import World
from tests.support.surroundings import ManualClock

HORIZON_S = 900
A, B, C, LAST = (half_of(name, name, 1_000) for name in ("a", "b", "c", "last"))


def fold(barrier: int = 100) -> ShardState:
    """Return the fold of an empty log, up to barriers at this offset."""
    state = ShardState(0, horizon_ms=HORIZON_S * 1000)
    state.half_tail = state.op_tail = barrier + 1
    state.complete_fold()
    return state


def table(*later: Half, now: int = 6_000) -> ShardTable:
    """Return a table that served a shard with a pending, a parked and committed transactions, and has lost it."""
    clock = ManualClock()
    clock.set(now)
    shards = ShardTable(ServiceLimits(shards=1, outcome_horizon_s=HORIZON_S), clock)
    former = fold(0)
    former.apply_half(1, A.id, A)
    former.apply_half(2, B.id, B)
    former.apply_end(1, op(OpKind.COMMITTED, B.id, half_offset=2), 3)
    former.apply_parked(1, C.id, parked_of(C))
    for half in later:
        former.apply_op(2, op(OpKind.COMMITTED, half.id))
    shards.acquired(0, former)
    for half in (A, C):
        shards.payloads.put(half, half.size)
    shards.lost(0)
    return shards


def acquired(shards: ShardTable, state: ShardState, *, suspect: bool = True) -> ShardState:
    shards.compare(0, state, suspect=suspect)
    shards.acquired(0, state)
    return state


async def test_what_the_log_lacks_is_restored_from_memory_and_written_again() -> None:
    shards = table()
    state = acquired(shards, fold())
    pending, ended, parked = (state.find(half.id) for half in (A, B, C))
    assert isinstance(pending, Pending)
    assert isinstance(parked, ParkedEntry)
    assert isinstance(ended, Ended)
    assert (ended.state, ended.half_offset) == (State.COMMITTED, 2)
    assert shards.get(0).unwritten == {A.id: A, B.id: None, C.id: C}
    assert (shards.losses.found, shards.losses.lost) == (1, 0)
    [warning] = shards.losses.warnings(shards.unwritten)
    assert "3 transactions are in memory only" in warning


async def test_an_outcome_wins_over_a_half_that_is_pending_again() -> None:
    """The op marker is lost, and the half's tombstone too: nobody may end it in another way."""
    shards, state = table(), fold()
    state.apply_half(2, B.id, B)
    assert isinstance(acquired(shards, state).find(B.id), Ended)


async def test_an_id_that_was_prepared_again_after_its_outcome_stays_pending() -> None:
    shards, state = table(), fold()
    later = 5_000 + HORIZON_S * 1000
    state.apply_half(2, B.id, msgspec.structs.replace(B, prepared_at=later, since=later))
    assert isinstance(acquired(shards, state).find(B.id), Pending)


def with_a_verdict() -> ShardTable:
    """Return a table that serves a shard with a pending transaction whose commit verdict is in op only, at 1."""
    shards = ShardTable(ServiceLimits(shards=1), ManualClock())
    state = fold(0)
    state.apply_half(1, A.id, A)
    state.apply_op(1, msgspec.structs.replace(op(OpKind.VERDICT, A.id, checks=2), commit_verdict=True))
    shards.acquired(0, state)
    return shards


@pytest.mark.parametrize("suspect", [True, False])
async def test_a_lost_commit_verdict_is_remembered(*, suspect: bool) -> None:
    """It was in op only, and may have been deleted just before. Without it the policy could roll back."""
    shards = with_a_verdict()
    shards.lost(0)
    state = fold()
    state.apply_half(1, A.id, A)
    entry = acquired(shards, state, suspect=suspect).find(A.id)
    assert isinstance(entry, Pending)
    assert (entry.commit_verdict, entry.checks) == (True, 2)
    assert shards.get(0).unwritten == {A.id: None}


async def test_what_is_not_in_memory_any_more_is_counted_as_lost() -> None:
    shards = table()
    shards.payloads.drop(A.id)
    assert acquired(shards, fold()).find(A.id) is None
    assert shards.losses.lost == 1
    assert A.id not in shards.get(0).unwritten


async def test_an_outcome_that_may_be_forgotten_is_not_missed() -> None:
    shards = table(now=5_001 + HORIZON_S * 1000)
    assert acquired(shards, fold()).find(B.id) is None


def without_b() -> ShardState:
    """Return the fold of a log that goes on: it has what `table` knows, but for the outcome of B."""
    state = fold(100)
    state.apply_half(1, A.id, A)
    state.apply_parked(1, C.id, parked_of(C))
    state.apply_op(2, op(OpKind.COMMITTED, LAST.id))
    return state


async def test_the_outcomes_of_a_log_that_has_the_last_one_are_not_compared() -> None:
    """After the failure of a lane, for example: it would take long with many outcomes."""
    shards = table(LAST)
    state = without_b()
    assert not shards.compare(0, state, suspect=False)
    shards.acquired(0, state)
    assert state.find(B.id) is None


@pytest.mark.parametrize("lost", ["the last outcome", "a half", "the end"])
async def test_a_log_that_has_lost_its_end_is_folded_from_its_beginning(lost: str) -> None:
    """Also if it is longer than before by now: a tombstone of a half before the cursors may have been lost as well."""
    shards = table() if lost == "the last outcome" else table(LAST)
    state = without_b()
    if lost == "a half":
        state.apply_half(50, A.id, None)
    if lost == "the end":
        state.half_tail = 3
    assert shards.compare(0, state, suspect=False)


async def test_a_half_that_was_deleted_just_before_the_shard_was_lost_is_written_again() -> None:
    """Nobody had noticed it yet, and the log goes on where it was."""
    shards = table(LAST)
    state = without_b()
    state.apply_half(50, A.id, None)
    assert isinstance(acquired(shards, state, suspect=False).find(A.id), Pending)
    assert shards.get(0).unwritten == {A.id: A}


async def test_a_shard_that_is_lost_before_all_is_written_again_forgets_nothing() -> None:
    """The lane may fail while it writes, for any reason: the log still lacks the rest."""
    shards = table()
    acquired(shards, fold())
    shards.lost(0)
    state = acquired(shards, fold(200), suspect=False)
    assert [type(state.find(half.id)) for half in (A, B, C)] == [Pending, Ended, ParkedEntry]
    assert shards.get(0).unwritten == {A.id: A, B.id: None, C.id: C}


async def test_what_is_ended_before_it_is_written_again_is_not_written_a_second_time(world: World) -> None:
    """The scan had begun to write it when the end, which was in the lane already, was done."""
    prepared = await world.prepare()
    await world.end(prepared.id, Outcome.COMMIT)
    change = world.coordinator._ending.write_again(prepared.id, Record.LOST, deadline=world.deadline())
    assert not (await change).changed


async def test_a_shard_is_given_up_when_what_was_lost_is_written_again() -> None:
    """Its next owner could not know it. Until then the scan goes on, which writes it."""
    shards, scans = table(), {0}
    shards.on_leaving = scans.discard
    acquired(shards, fold())
    released = asyncio.create_task(shards.revoked(0))
    await asyncio.sleep(0)
    assert shards.serves(0)
    assert scans
    shards.get(0).unwritten.clear()
    await released
    assert shards.find(0) is None
    assert not scans


async def test_a_log_that_ends_before_what_was_known_is_compared() -> None:
    shards = table()
    assert acquired(shards, fold(2), suspect=False).find(A.id) is not None


async def test_what_another_owner_may_have_changed_is_forgotten() -> None:
    shards = table()
    shards.forget(0)
    assert acquired(shards, fold()).find(A.id) is None


async def test_records_that_were_deleted_from_the_start_are_written_again_while_the_shard_is_served() -> None:
    shards = table()
    acquired(shards, fold())
    shards.get(0).unwritten.clear()
    state = shards.get(0).state
    state.apply_half(200, "late", half_of("late", "late", 1_000))
    shards.log_lost(0, LogLoss(topic="half", detail="cut", half_start=150))
    assert shards.get(0).unwritten == {A.id: A}


async def test_a_verdict_that_was_deleted_from_the_start_of_op_is_written_again() -> None:
    """Its half is in the log, so the payload need not be in memory. Outcomes that are not lost are not written."""
    shards = with_a_verdict()
    state = shards.get(0).state
    state.apply_half(2, B.id, B)
    state.apply_end(2, op(OpKind.COMMITTED, B.id, half_offset=2), 3)
    known = shards.known_log(0)
    assert known is not None
    assert known.op_needed == 1
    shards.log_lost(0, LogLoss(topic="op", detail="cut before it", op_start=1))
    assert shards.get(0).unwritten == {}
    shards.log_lost(0, LogLoss(topic="op", detail="cut", op_start=2))
    assert shards.get(0).unwritten == {A.id: None}
    shards.log_lost(0, LogLoss(topic="op", detail="cut", op_start=3, is_op_cut=True))
    assert shards.get(0).unwritten == {A.id: None, B.id: None}


async def test_a_parked_record_that_was_deleted_is_written_again_or_counted_as_lost_once() -> None:
    shards = ShardTable(ServiceLimits(shards=1), ManualClock())
    state = fold(0)
    for offset, half in enumerate((A, B, C), 1):
        state.apply_parked(offset, half.id, parked_of(half))
    shards.acquired(0, state)
    shards.payloads.put(B, B.size)
    known = shards.known_log(0)
    assert known is not None
    assert known.parked_needed == 1
    for start in (3, 3):
        shards.log_lost(0, LogLoss(topic="parked", detail="cut", parked_start=start))
    assert shards.get(0).unwritten == {B.id: B}
    assert shards.losses.lost == 1
    state.apply_parked(4, A.id, None)
    assert state.oldest_parked_offset == 2


async def test_a_half_that_is_lost_with_its_verdict_is_lost_once() -> None:
    """Nothing can write it again, so nothing waits to be written."""
    shards = with_a_verdict()
    for start in (2, 3):
        shards.log_lost(0, LogLoss(topic="half", detail="cut", half_start=start))
    shards.log_lost(0, LogLoss(topic="op", detail="cut", op_start=2))
    assert shards.get(0).unwritten == {}
    assert shards.losses.lost == 1


async def test_payloads_that_the_fold_has_read_are_in_memory() -> None:
    """So what an owner took over can be written again too."""
    shards = ShardTable(ServiceLimits(shards=1), ManualClock())
    state = fold()
    state.apply_half(1, A.id, A)
    state.payloads = {A.id: A, B.id: B}
    shards.acquired(0, state)
    assert shards.payloads.get(A.id) == A
    assert shards.payloads.get(B.id) is None, "it is not pending any more"
    assert not state.payloads


async def test_payloads_of_a_fold_push_no_other_out_of_memory() -> None:
    shards = ShardTable(ServiceLimits(shards=1, payload_cache_bytes=1_000), ManualClock())
    shards.payloads.put(B, 400)
    state = fold()
    state.apply_half(1, A.id, msgspec.structs.replace(A))
    state.payloads = {A.id: A}
    shards.acquired(0, state)
    assert shards.payloads.get(B.id) == B
    assert shards.payloads.get(A.id) is None
