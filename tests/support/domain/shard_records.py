"""Records of one or a few transactions, which tests of the fold apply one by one."""

import msgspec

from halfway.coordinator.ports import TOMBSTONE, LaneWrite
from halfway.protocol.records import Half, Op, OpKind, Origin, Parked
from halfway.protocol.transactions import Cause, State
from tests.support.domain.histories import half_of

ID = "order-1"
A = half_of(ID, "A", 1_000)
A_LATER = half_of(ID, "A", 2_000)
B = half_of(ID, "B", 3_000)
LANE_A = msgspec.structs.replace(A, origin=Origin.LANE)


def op(kind: OpKind, transaction_id: str = ID, *, half_offset: int = 0, at: int = 5_000, checks: int = 0) -> Op:
    return Op(
        kind=kind,
        id=transaction_id,
        group="shop",
        half_offset=half_offset,
        cause=Cause.PRODUCER,
        prepared_at=1_000,
        at=at,
        checks=checks,
        checked_at=at if checks else None,
    )


def parked_of(half: Half) -> Parked:
    return Parked(
        half=msgspec.structs.replace(half, origin=Origin.LANE), reason="no verdict", parked_at=4_000, checks=15
    )


def tombstone_of(half: Half, *, deadline: float) -> LaneWrite:
    """Return the write that corrects a stray half of a committed id."""
    return LaneWrite(
        shard=0,
        id=half.id,
        group=half.group,
        state=State.COMMITTED,
        prepared_at=half.prepared_at,
        half=TOMBSTONE,
        deadline=deadline,
    )
