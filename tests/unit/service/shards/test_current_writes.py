"""Which writes may still be written when the lane gets to them."""

import msgspec

from halfway.domain.records import FOREIGN, OpKind
from halfway.domain.shard import Pending, ShardState
from halfway.domain.transaction import State
from halfway.memory.surroundings import ManualClock
from halfway.service.requests import ServiceLimits
from halfway.service.resolve.changes import tombstone_again
from halfway.service.shards.shard_table import Claim, ShardTable
from tests.support.domain.shard_records import ID, A, B, op

HORIZON_MS = 60_000


async def test_a_stray_gets_no_tombstone_once_its_id_is_prepared_again() -> None:
    """Past the horizon a caller may use the id again; the stray's tombstone would remove the new transaction."""
    state = ShardState(0, horizon_ms=HORIZON_MS)
    state.apply_half(3, ID, A)
    ended = op(OpKind.COMMITTED, half_offset=3)
    state.apply_op(0, ended)
    state.apply_half(4, ID, None)
    state.apply_half(5, ID, FOREIGN)
    table = ShardTable(ServiceLimits(shards=1), ManualClock())
    table.acquired(0, state)
    table.claims[ID] = Claim()
    stray = tombstone_again(0, ID, "shop", State.COMMITTED, A.prepared_at, deadline=0)
    assert table.current(stray)
    later = ended.at + HORIZON_MS
    table.appended(0, [(6, ID, msgspec.structs.replace(B, prepared_at=later, since=later))], 7)
    assert isinstance(state.find(ID), Pending)
    assert not table.current(stray)
