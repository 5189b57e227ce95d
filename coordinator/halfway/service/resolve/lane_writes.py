"""What each resolution writes: pure functions from what is known of a transaction to a `LaneWrite`.

See docs/protocol.md#state-is-a-fold-over-the-log.

Each takes the entry, its half with the totals of now, the time (ms since the epoch) and the deadline of the write.
"""

from __future__ import annotations

import msgspec

from halfway.domain.records import Half, Message, MessageDigest, Op, OpKind, Origin, Parked
from halfway.domain.shard import ParkedEntry, Pending, Unresolved
from halfway.domain.transaction import Cause, State
from halfway.service.ports import TOMBSTONE, LaneWrite, Tombstone

NO_HALF = -1
"""The half offset in an op of a parked transaction, whose half is a tombstone already."""


class OpFields(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the writer of an op wants to have said: why, the checks sent so far, and the time."""

    cause: Cause
    at: int
    deadline: float
    checks: int
    checked_at: int | None = None
    remark: str | None = None
    commit_verdict: bool = False


def current_half(entry: Unresolved, half: Half) -> Half:
    """Return the half with the totals that stand now, as the lane writes it."""
    since, checked_at = half.since, half.checked_at
    if isinstance(entry, Pending):
        since, checked_at = entry.since, entry.checked_at
    return msgspec.structs.replace(
        half,
        origin=Origin.LANE,
        since=since,
        checks=entry.checks,
        checked_at=checked_at,
        commit_verdict=entry.commit_verdict,
        remark=entry.remark,
    )


def committed(shard: int, entry: Unresolved, half: Half, told: OpFields) -> LaneWrite:
    """From prepared or parked to committed: real messages, op marker, and the tombstone of half or parked."""
    return _ended(shard, entry, half, told, OpKind.COMMITTED)


def rolled_back(shard: int, entry: Unresolved, half: Half | None, told: OpFields) -> LaneWrite:
    """From prepared or parked to rolled_back: op marker, and the tombstone of half or parked."""
    return _ended(shard, entry, half, told, OpKind.ROLLED_BACK)


def _ended(shard: int, entry: Unresolved, half: Half | None, told: OpFields, kind: OpKind) -> LaneWrite:
    commits = kind is OpKind.COMMITTED
    pending = isinstance(entry, Pending)
    return _write(
        shard,
        entry,
        State.COMMITTED if commits else State.ROLLED_BACK,
        told.deadline,
        messages=half.messages if commits and half is not None else (),
        half=TOMBSTONE if pending else None,
        op=_op(kind, entry, half, told),
        parked=None if pending else TOMBSTONE,
    )


def noted(shard: int, entry: Pending, told: OpFields, kind: OpKind) -> LaneWrite:
    """Prepared stays prepared: an op marker alone, CHECKED (a check was sent, or a remark was left) or VERDICT."""
    return _write(
        shard,
        entry,
        State.PREPARED,
        told.deadline,
        op=_op(kind, entry, None, told),
    )


def parked(shard: int, entry: Unresolved, half: Half, told: OpFields) -> LaneWrite:
    """From prepared to parked: parked record, half tombstone, op. What is parked is parked again for a new reason."""
    reason = told.remark or ""
    kept = current_half(entry, half)
    if told.commit_verdict:
        kept = msgspec.structs.replace(kept, commit_verdict=True)
    record = Parked(half=kept, reason=reason, parked_at=told.at, checks=entry.checks)
    return _write(
        shard,
        entry,
        State.PARKED,
        told.deadline,
        half=TOMBSTONE if isinstance(entry, Pending) else None,
        op=_op(OpKind.PARKED, entry, half, told),
        parked=record,
    )


def resumed(shard: int, entry: ParkedEntry, half: Half, told: OpFields) -> LaneWrite:
    """From parked to prepared with its count at 0: half record, parked tombstone, op."""
    again = msgspec.structs.replace(
        current_half(entry, half), since=told.at, checks=0, checked_at=None, check_after_ms=None
    )
    return _write(
        shard,
        entry,
        State.PREPARED,
        told.deadline,
        half=again,
        op=_op(OpKind.RESUMED, entry, half, told),
        parked=TOMBSTONE,
    )


def written_again(shard: int, entry: Pending, half: Half, *, deadline: float) -> LaneWrite:
    """Prepared stays prepared: the half once more at the tail (re-anchor, or the correction of a stray)."""
    return _write(
        shard,
        entry,
        State.PREPARED,
        deadline,
        half=current_half(entry, half),
    )


def tombstone_again(
    shard: int, transaction_id: str, group: str, state: State, prepared_at: int, *, deadline: float
) -> LaneWrite:
    """The correction of a stray of an id that is ended or parked: its half tombstone again."""
    return LaneWrite(
        shard=shard,
        id=transaction_id,
        group=group,
        state=state,
        prepared_at=prepared_at,
        half=TOMBSTONE,
        deadline=deadline,
    )


def _write(
    shard: int,
    entry: Unresolved,
    state: State,
    deadline: float,
    *,
    messages: tuple[Message, ...] = (),
    half: Half | Tombstone | None = None,
    op: Op | None = None,
    parked: Parked | Tombstone | None = None,
) -> LaneWrite:
    """Return what takes an entry to a state, or leaves it there."""
    return LaneWrite(
        shard=shard,
        id=entry.id,
        group=entry.group,
        state=state,
        prepared_at=entry.prepared_at,
        messages=messages,
        half=half,
        op=op,
        parked=parked,
        deadline=deadline,
    )


def _op(kind: OpKind, entry: Unresolved, half: Half | None, told: OpFields) -> Op:
    return Op(
        kind=kind,
        id=entry.id,
        group=entry.group,
        half_offset=entry.offset if isinstance(entry, Pending) else NO_HALF,
        cause=told.cause,
        prepared_at=entry.prepared_at,
        at=told.at,
        fingerprint=entry.fingerprint,
        checks=told.checks,
        checked_at=told.checked_at,
        commit_verdict=told.commit_verdict or entry.commit_verdict,
        # The last op of an id must hold all totals, so a writer without a remark keeps the one that stands.
        remark=told.remark if kind.final else told.remark or entry.remark,
        messages=() if half is None or not kind.final else tuple([MessageDigest.of(one) for one in half.messages]),
    )
