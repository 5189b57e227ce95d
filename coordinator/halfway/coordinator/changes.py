"""The changes of a transaction and their writes: pure functions (docs/protocol.md#end-the-lane)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import msgspec

from halfway.coordinator.ports import TOMBSTONE, LaneWrite, Tombstone
from halfway.coordinator.requests import EndResult
from halfway.protocol.entries import Ended, Entry, ParkedEntry, Pending, Unresolved
from halfway.protocol.errors import (
    EndUnconfirmedError,
    HalfwayError,
    IdReplacedError,
    NotWrittenError,
    OvertakenError,
    RetryableError,
)
from halfway.protocol.records import NO_BARRIER, Half, MessageDigest, Op, OpKind, Origin, Parked
from halfway.protocol.transactions import TRANSITIONS, Action, Cause, Outcome, State, conflict

ACTIONS = {Outcome.COMMIT: Action.COMMIT, Outcome.ROLLBACK: Action.ROLLBACK, Outcome.UNKNOWN: Action.UNKNOWN}
"""The action for each outcome of a caller or of a check."""
NO_HALF = -1
"""The half offset in an op of a parked transaction, whose half is already a tombstone."""


class Change(Protocol):
    """A change of a transaction."""

    @property
    def needs_payload(self) -> bool:
        """Return whether its write holds the messages or their hashes."""

    @property
    def needs_whole_payload(self) -> bool:
        """Return whether it cannot be written without the payload."""

    def answer_without_write(self, entry: Entry, tried: Sequence[int]) -> EndResult | None:
        """Return the answer if no write is needed, None if one is; raise an error if the state forbids the change.

        `tried` has the times (ms since the epoch) of earlier writes of this change whose lane was lost. An outcome with
        one of these times and the same cause is its own (docs/protocol.md#end-the-lane).
        """

    def write(self, shard: int, entry: Entry, half: Half | None, *, at: int, now: int, deadline: float) -> LaneWrite:
        """Return the write for the current state. `at` is later than `now` if the transaction is dated ahead."""


class Act(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A change by a caller, a check or the policy. `checks` is the count to record, None for the current one.

    An act of the policy has `still_decided`, which is called at every write, under the claim: a verdict may have come
    first.
    """

    action: Action
    cause: Cause
    remark: str | None = None
    checks: int | None = None
    checked_at: int | None = None
    commit_verdict: bool = False
    prepared_at: int | None = None
    """The prepare time of the transaction to change, ms since the epoch, since an id may be reused; None for any."""
    still_decided: Callable[[Unresolved], bool] | None = None

    @property
    def needs_payload(self) -> bool:
        """Return whether it uses the payload; a rollback does, for the hashes of the audit."""
        return self.action not in (Action.CHECK, Action.UNKNOWN)

    @property
    def needs_whole_payload(self) -> bool:
        """Return whether it fails without the payload; a rollback does not."""
        return self.action is not Action.ROLLBACK

    def answer_without_write(self, entry: Entry, tried: Sequence[int]) -> EndResult | None:
        """Decide by the transitions in docs/protocol.md."""
        if self.prepared_at is not None:
            require_same_transaction(entry, self.prepared_at)
        state = entry.state
        target = TRANSITIONS.get((state, self.action))
        if target is None:
            raise conflict(entry.id, state)
        if isinstance(entry, Ended):
            own = entry.at in tried and entry.cause is self.cause
            return EndResult(id=entry.id, state=state, changed=own and state is target)
        if target is state and not self._leaves_note(entry):
            return EndResult(id=entry.id, state=target, changed=bool(tried))
        return None

    def _leaves_note(self, entry: Unresolved) -> bool:
        """Return whether it writes an op marker but does not change the state."""
        if isinstance(entry, ParkedEntry):
            return self.commit_verdict
        return self.action is Action.CHECK or (self.action is Action.UNKNOWN and bool(self.remark))

    def write(self, shard: int, entry: Entry, half: Half | None, *, at: int, now: int, deadline: float) -> LaneWrite:
        """Return the write for the current state; raise OvertakenError if the policy no longer decides it."""
        if isinstance(entry, Ended):
            raise NotWrittenError
        if self.still_decided is not None and not self.still_decided(entry):
            raise OvertakenError(id=entry.id)
        fields = OpFields(
            cause=self.cause,
            at=at,
            deadline=deadline,
            checks=entry.checks if self.checks is None else self.checks,
            checked_at=self.checked_at if self.checked_at is not None else getattr(entry, "checked_at", None),
            remark=self.remark,
            commit_verdict=self.commit_verdict,
        )
        if self.action is Action.ROLLBACK:
            return rolled_back(shard, entry, half, fields)
        if half is None:
            if isinstance(entry, ParkedEntry):
                raise NotWrittenError
            return noted(shard, entry, fields, OpKind.VERDICT if self.commit_verdict else OpKind.CHECKED)
        if self.action is Action.COMMIT:
            return committed(shard, entry, half, fields)
        if isinstance(entry, Pending) or self.action is Action.PARK:
            return parked(shard, entry, half, fields)
        return resumed(shard, entry, half, msgspec.structs.replace(fields, checks=0, checked_at=None), since=now)


class Reanchor(msgspec.Struct, frozen=True, gc=False):
    """Write the half of a prepared transaction again at the tail."""

    needs_payload: ClassVar[bool] = True
    needs_whole_payload: ClassVar[bool] = True

    def answer_without_write(self, entry: Entry, _tried: Sequence[int]) -> EndResult | None:
        """Skip a transaction that is no longer prepared."""
        return None if isinstance(entry, Pending) else EndResult(id=entry.id, state=entry.state, changed=False)

    def write(self, shard: int, entry: Entry, half: Half | None, *, at: int, now: int, deadline: float) -> LaneWrite:  # noqa: ARG002 - it has no outcome
        """Return the write of the half with the current totals."""
        if half is None or not isinstance(entry, Pending):
            raise NotWrittenError
        return written_again(shard, entry, half, deadline=deadline)


class WriteTombstone(msgspec.Struct, frozen=True, gc=False):
    """Write the tombstone of a stray half of a transaction that is parked or ended."""

    needs_payload: ClassVar[bool] = False
    needs_whole_payload: ClassVar[bool] = False

    def answer_without_write(self, entry: Entry, _tried: Sequence[int]) -> EndResult | None:
        """Skip a prepared transaction: its half is not a stray."""
        return EndResult(id=entry.id, state=entry.state, changed=False) if isinstance(entry, Pending) else None

    def write(self, shard: int, entry: Entry, half: Half | None, *, at: int, now: int, deadline: float) -> LaneWrite:  # noqa: ARG002 - it has neither
        """Return the write of the tombstone."""
        return tombstone_again(shard, entry.id, entry.group, entry.state, entry.prepared_at, deadline=deadline)


class Restore(msgspec.Struct, frozen=True, gc=False):
    """Write a transaction again that the log has lost, in the state in which this instance knows it."""

    needs_payload: ClassVar[bool] = True
    needs_whole_payload: ClassVar[bool] = True

    def answer_without_write(self, _entry: Entry, _tried: Sequence[int]) -> EndResult | None:
        """Write it in any case: a second time changes nothing."""
        return None

    def write(self, shard: int, entry: Entry, half: Half | None, *, at: int, now: int, deadline: float) -> LaneWrite:  # noqa: ARG002 - the times are those of the transaction
        """Return the write of the half, of the parked record, or of the op marker with the tombstone of the half."""
        if isinstance(entry, Ended):
            return LaneWrite(
                shard=shard,
                id=entry.id,
                group=entry.group,
                state=entry.state,
                prepared_at=entry.prepared_at,
                half=TOMBSTONE,
                op=entry.op,
                deadline=deadline,
            )
        if half is None:
            raise NotWrittenError
        if isinstance(entry, Pending):
            return written_again(shard, entry, half, deadline=deadline)
        kept = current_half(entry, half)
        record = Parked(half=kept, reason=entry.reason, parked_at=entry.parked_at, checks=entry.checks)
        return _write(shard, entry, State.PARKED, deadline, parked=record)


def require_same_transaction(entry: Entry, prepared_at: int | None) -> None:
    """Raise IdReplacedError if an entry is not the transaction that was prepared at this time; None allows any."""
    if prepared_at is not None and entry.prepared_at != prepared_at:
        raise IdReplacedError(entry.id, state=entry.state.value)


def unconfirmed(transaction_id: str) -> RetryableError:
    """Return the error of an end whose result is not known in time."""
    return EndUnconfirmedError(
        f"the end of {transaction_id!r} was not confirmed in time: send the same end again, it is never done twice",
        id=transaction_id,
    )


def note_error(entry: Entry, error: HalfwayError) -> None:
    """Store in a pending entry why a change could not be written."""
    if isinstance(entry, Pending):
        entry.last_error = f"{error.code}: {error.detail}"


# --- the writes, from the entry of a transaction and its half


class OpFields(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The fields of an op marker that the change decides: its cause, the checks sent so far, and the time."""

    cause: Cause
    at: int
    deadline: float
    checks: int
    checked_at: int | None = None
    remark: str | None = None
    commit_verdict: bool = False


def current_half(entry: Unresolved, half: Half) -> Half:
    """Return the half with the current totals, as the lane writes it."""
    since, checked_at = half.since, half.checked_at
    if isinstance(entry, Pending):
        since, checked_at = entry.since, entry.checked_at
    return msgspec.structs.replace(
        half,
        origin=Origin.LANE,
        prepared_at=entry.prepared_at,
        since=since,
        checks=entry.checks,
        checked_at=checked_at,
        commit_verdict=entry.commit_verdict,
        remark=entry.remark,
        barrier=NO_BARRIER,
    )


def committed(shard: int, entry: Unresolved, half: Half, fields: OpFields) -> LaneWrite:
    """Return the write from prepared or parked to committed: real messages, op marker, tombstone of half or parked."""
    return _ended(shard, entry, half, fields, OpKind.COMMITTED)


def rolled_back(shard: int, entry: Unresolved, half: Half | None, fields: OpFields) -> LaneWrite:
    """Return the write from prepared or parked to rolled_back: op marker, tombstone of half or parked."""
    return _ended(shard, entry, half, fields, OpKind.ROLLED_BACK)


def _ended(shard: int, entry: Unresolved, half: Half | None, fields: OpFields, kind: OpKind) -> LaneWrite:
    commits = kind is OpKind.COMMITTED
    pending = isinstance(entry, Pending)
    return LaneWrite(
        shard=shard,
        id=entry.id,
        group=entry.group,
        state=State.COMMITTED if commits else State.ROLLED_BACK,
        prepared_at=entry.prepared_at,
        messages=half.messages if commits and half is not None else (),
        half=TOMBSTONE if pending else None,
        op=_op(kind, entry, half, fields),
        parked=None if pending else TOMBSTONE,
        size=entry.size if commits else 0,
        deadline=fields.deadline,
    )


def noted(shard: int, entry: Pending, fields: OpFields, kind: OpKind) -> LaneWrite:
    """Return the write of an op marker alone: CHECKED (a check was sent, or a remark was left) or VERDICT."""
    return _write(
        shard,
        entry,
        State.PREPARED,
        fields.deadline,
        op=_op(kind, entry, None, fields),
    )


def parked(shard: int, entry: Unresolved, half: Half, fields: OpFields) -> LaneWrite:
    """Return the write to parked: parked record, half tombstone, op. A parked transaction gets a new reason."""
    reason = fields.remark or ""
    kept = current_half(entry, half)
    if fields.commit_verdict:
        kept = msgspec.structs.replace(kept, commit_verdict=True)
    record = Parked(half=kept, reason=reason, parked_at=fields.at, checks=entry.checks)
    return _write(
        shard,
        entry,
        State.PARKED,
        fields.deadline,
        half=TOMBSTONE if isinstance(entry, Pending) else None,
        op=_op(OpKind.PARKED, entry, half, fields),
        parked=record,
    )


def resumed(shard: int, entry: ParkedEntry, half: Half, fields: OpFields, *, since: int) -> LaneWrite:
    """Return the write from parked to prepared with its count at 0: half record, parked tombstone, op.

    Checks count from `since`, a time of the clock.
    """
    again = msgspec.structs.replace(
        current_half(entry, half), since=since, checks=0, checked_at=None, check_after_ms=None
    )
    return _write(
        shard,
        entry,
        State.PREPARED,
        fields.deadline,
        half=again,
        op=_op(OpKind.RESUMED, entry, half, fields),
        parked=TOMBSTONE,
    )


def written_again(shard: int, entry: Pending, half: Half, *, deadline: float) -> LaneWrite:
    """Return the write of the half again at the tail (re-anchor, or the correction of a stray)."""
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
    """Return the write of the half tombstone again, which corrects a stray of an ended or parked id."""
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
    half: Half | Tombstone | None = None,
    op: Op | None = None,
    parked: Parked | Tombstone | None = None,
) -> LaneWrite:
    """Return the write that brings an entry to a state, or keeps it there."""
    return LaneWrite(
        shard=shard,
        id=entry.id,
        group=entry.group,
        state=state,
        prepared_at=entry.prepared_at,
        half=half,
        op=op,
        parked=parked,
        size=entry.size if isinstance(half, Half) or isinstance(parked, Parked) else 0,
        deadline=deadline,
    )


def _op(kind: OpKind, entry: Unresolved, half: Half | None, fields: OpFields) -> Op:
    return Op(
        kind=kind,
        id=entry.id,
        group=entry.group,
        half_offset=entry.offset if isinstance(entry, Pending) else NO_HALF,
        cause=fields.cause,
        prepared_at=entry.prepared_at,
        at=fields.at,
        fingerprint=entry.fingerprint,
        checks=fields.checks,
        checked_at=fields.checked_at,
        commit_verdict=fields.commit_verdict or entry.commit_verdict,
        # The last op of an id must have all totals, so a writer without a remark keeps the current one.
        remark=fields.remark if kind.final else fields.remark or entry.remark,
        messages=() if half is None or not kind.final else tuple([MessageDigest.of(one) for one in half.messages]),
    )
