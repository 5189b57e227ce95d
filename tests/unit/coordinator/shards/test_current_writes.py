"""The writes that are still current when the lane gets to them."""

import msgspec

from halfway.coordinator.access import OpenAccess
from halfway.coordinator.changes import Change, Record
from halfway.coordinator.operations import Path
from halfway.coordinator.ports import TOMBSTONE, LaneWrite
from halfway.coordinator.requests import ServiceLimits
from halfway.coordinator.shards.shard_table import ShardTable
from halfway.protocol.entries import Pending
from halfway.protocol.records import FOREIGN, OpKind
from halfway.protocol.shard import ShardState
from halfway.protocol.transactions import Cause, State
from tests.support.domain.shard_records import ID, A, B, op, tombstone_of
from tests.support.surroundings import ManualClock

HORIZON_MS = 60_000


def claim(table: ShardTable, write: LaneWrite | None = None) -> Change:
    path, mark = Path[Change](OpenAccess()), table.get(0).mark
    of_stray = {"path": path, "id": ID, "action": Record.STRAY, "cause": Cause.POLICY, "deadline": 0}
    return Change(**of_stray, shard=0, mark=mark, write=write)  # type: ignore[arg-type]


async def test_a_stray_gets_no_tombstone_once_its_id_is_prepared_again() -> None:
    """After the horizon a caller may reuse the id; the stray's tombstone would remove the new transaction."""
    state = ShardState(0, horizon_ms=HORIZON_MS)
    state.apply_half(3, ID, A)
    ended = op(OpKind.COMMITTED, half_offset=3)
    state.apply_op(0, ended)
    state.apply_half(4, ID, None)
    state.apply_half(5, ID, FOREIGN)
    table = ShardTable(ServiceLimits(shards=1), ManualClock())
    table.acquired(0, state)
    stray = tombstone_of(A, deadline=0)
    table.claims[ID] = claim(table, stray)
    assert table.may_still_be_written(stray)
    later = ended.at + HORIZON_MS
    table.appended(0, [(6, ID, msgspec.structs.replace(B, prepared_at=later, since=later))], 7)
    assert isinstance(state.find(ID), Pending)
    assert not table.may_still_be_written(stray)
    assert table.get(0).agenda.pop_up_to(0) == ID, "nobody would ask what became of the new transaction"


async def test_a_write_for_a_fold_that_another_owner_may_have_changed_is_no_longer_current() -> None:
    """Its shard was lost and acquired again while the write waited: the write is made again from the current state."""
    table = ShardTable(ServiceLimits(shards=1), ManualClock())
    table.acquired(0, _with_a())
    write = LaneWrite(
        shard=0,
        id=ID,
        group=A.group,
        state=State.COMMITTED,
        prepared_at=A.prepared_at,
        op=op(OpKind.COMMITTED),
        half=TOMBSTONE,
        deadline=0,
    )
    table.claims[ID] = claim(table)
    assert not table.may_still_be_written(write), "the claim waits for another write, or for none"
    table.claims[ID].write = write
    assert table.may_still_be_written(write)
    table.lost(0)
    assert not table.may_still_be_written(write)
    table.acquired(0, _with_a())
    assert not table.may_still_be_written(write)
    table.claims[ID].mark = table.get(0).mark
    assert table.may_still_be_written(write)


def _with_a() -> ShardState:
    state = ShardState(0)
    state.apply_half(0, ID, A)
    return state


async def test_a_tail_that_reads_again_does_not_go_back() -> None:
    table = ShardTable(ServiceLimits(shards=1), ManualClock())
    table.acquired(0, ShardState(0))
    table.appended(0, [], 8)
    table.appended(0, [], 3)
    assert table.get(0).state.half_tail == 8
