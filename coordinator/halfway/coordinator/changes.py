"""One change of one transaction, and what it decides and writes: pure functions (docs/protocol.md#end-the-lane)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Final

import msgspec

from halfway.coordinator.operations import Operation
from halfway.coordinator.ports import TOMBSTONE, LaneWrite, Tombstone
from halfway.coordinator.requests import End, EndResult
from halfway.protocol.entries import Ended, Entry, ParkedEntry, Pending, Unresolved
from halfway.protocol.errors import EndUnconfirmedError, HalfwayError, NotWrittenError, OvertakenError, RetryableError
from halfway.protocol.policy import COMMIT_SAID
from halfway.protocol.principal import Permission
from halfway.protocol.records import NO_BARRIER, Half, Message, MessageDigest, Op, OpKind, Origin, Parked
from halfway.protocol.transactions import TRANSITIONS, Action, Cause, Outcome, State, conflict

ACTIONS = {Outcome.COMMIT: Action.COMMIT, Outcome.ROLLBACK: Action.ROLLBACK, Outcome.UNKNOWN: Action.UNKNOWN}
"""The action for each outcome of a caller or of a check."""
NO_HALF = -1
"""The half offset in an op of a parked transaction, whose half is already a tombstone."""


class Record(StrEnum):
    """What is written for a transaction without a change of its state."""

    VERDICT = "verdict"
    """A commit that was said and could not be written."""
    HALF = "half"
    """The half of a prepared transaction, again at the tail."""
    STRAY = "stray"
    """The correction of a stray half: the half again if it is prepared, a tombstone if it is parked or has ended."""
    LOST = "lost"
    """What the log has lost, in the state in which this instance knows it. A second time changes nothing."""


_COMMIT: Final = Action.COMMIT  # to read an attribute of an enum's class takes long
_ROLLBACK: Final = Action.ROLLBACK
_END: Final = Permission.END
_WITHOUT_PAYLOAD: Final = (Action.CHECK, Action.UNKNOWN)


class Change(Operation[EndResult], kw_only=True, eq=False):
    """One change of one transaction: an end, the answer to a check, a resume, what the policy decides, a repair.

    It claims the id before its write, and has the claim until the write is done: other changes of the id wait.
    """

    # What is asked for.
    id: str
    action: Action | Record
    cause: Cause
    says_commit: bool = False
    """Whether a caller, an operator or a check has said commit by it."""
    permission: Permission = _END
    request: End | None = None
    """The end of a caller."""
    remark: str | None = None
    checks: int | None = None
    """The number of checks to record; None for the current one."""
    checked_at: int | None = None
    check_id: str | None = None
    """The id of the check that a caller says it answers, until that is looked up."""
    still_wanted: Callable[[Unresolved], bool] | None = None
    """Is called at every write, under the claim: a verdict may have come before a decision of the policy."""
    waits_for_claim: bool = True
    """False if it is not necessary when another change has claimed the id."""
    is_manual: bool = False
    """Whether an operator ends it, or a caller in an operator's place."""
    is_audited: bool = False
    """Whether the audit trail records its answer."""
    # What is known of the transaction.
    group: str = ""
    shard: int = -1
    mark: object = None
    """The mark of the shard when it last read the entry for a write."""
    entry: Entry | None = None
    """The entry that it last read."""
    meant: Entry | None = None
    """The transaction, once it is known that the caller may change it and means this one."""
    looked: bool = False
    """Whether a read barrier has passed."""
    half: Half | None = None
    """The payload, if it had to be read."""
    half_of: Entry | None = None
    """The entry whose payload that is."""
    goes_without_payload: bool = False
    # How far it is.
    begin_by: float = 0.0
    """Until when its write may begin. The rest of the time is for recording a commit."""
    tick: int = 0
    """The tick of its deadline that is watched: `begin_by`, or the end of its time."""
    has_begun: bool = False
    """Whether it has claimed the id for its write. From then on it is finished, whether or not a caller waits."""
    has_finished: bool = False
    """Whether it goes no further: it has its answer, or gets it as soon as its commit is recorded."""
    write: LaneWrite | None = None
    """The write that the lane has yet to answer."""
    written_at: int = 0
    """The time of the last write, ms since the epoch."""
    tried: tuple[int, ...] = ()
    """The times (ms since the epoch) of the writes whose lane was lost: their results are not known yet.

    An outcome with one of these times and the same cause is its own (docs/protocol.md#end-the-lane).
    """
    traced: tuple[Message, ...] = ()
    """The messages of its transaction, if it is traced and a write was made."""
    is_commit_kept: bool = False
    """Whether its commit is kept among the verdicts that are not written yet."""
    queue: deque[Change] | None = None
    """The changes that wait for the claim, first come, first served."""
    _released: asyncio.Future[None] | None = None

    @property
    def needs_whole_payload(self) -> bool:
        """Whether it fails without the payload; a rollback does not: it uses the payload for the audit's hashes."""
        return self.action is not _ROLLBACK

    def needs_payload(self, entry: Unresolved) -> bool:
        """Return whether its write holds the messages or their hashes."""
        if self.says_commit:
            return True
        if self.action in _WITHOUT_PAYLOAD:
            return False
        if self.action is Record.VERDICT:
            return isinstance(entry, ParkedEntry)
        return self.action is not Record.STRAY or isinstance(entry, Pending)

    def released(self) -> asyncio.Future[None]:
        """Return a future that is done when it has the claim no more. Others may wait for it too: do not cancel it."""
        if self._released is None:
            self._released = asyncio.get_running_loop().create_future()
        return self._released

    def release(self) -> None:
        """Tell those that wait that it has the claim no more."""
        if self._released is not None and not self._released.done():
            self._released.set_result(None)


def decide(change: Change, entry: Entry) -> EndResult | None:
    """Return the answer if no write is needed, None if one is; raise an error if the state forbids the change."""
    action, state, tried = change.action, entry.state, change.tried
    if isinstance(action, Record):
        is_needed = _is_needed(action, entry)
        return None if is_needed else EndResult(id=entry.id, state=state, changed=False)
    target = TRANSITIONS.get((state, action))
    if target is None:
        raise conflict(entry.id, state)
    if isinstance(entry, Ended):
        own = entry.at in tried and entry.cause is change.cause
        return EndResult(id=entry.id, state=state, changed=own and state is target)
    if target is state and not _leaves_note(change, entry):
        return EndResult(id=entry.id, state=target, changed=bool(tried))
    return None


def _is_needed(action: Record, entry: Entry) -> bool:
    if action is Record.VERDICT:
        return not isinstance(entry, Ended) and not entry.commit_verdict
    return action is not Record.HALF or isinstance(entry, Pending)


def _leaves_note(change: Change, entry: Unresolved) -> bool:
    """Return whether it writes an op marker but does not change the state."""
    if isinstance(entry, ParkedEntry):
        return False
    return change.action is Action.CHECK or (change.action is Action.UNKNOWN and bool(change.remark))


def write_of(change: Change, entry: Entry, half: Half | None, *, at: int, now: int) -> LaneWrite:
    """Return the write for the current state. `at` is later than `now` if the transaction is dated ahead.

    Raises:
        OvertakenError: the policy no longer decides it.
        NotWrittenError: it has to be decided again.
    """
    shard, action, deadline = change.shard, change.action, change.begin_by
    if isinstance(action, Record):
        return _recorded(action, change, entry, half, at)
    if isinstance(entry, Ended):
        raise NotWrittenError
    if change.still_wanted is not None and not change.still_wanted(entry):
        raise OvertakenError(id=entry.id)
    fields = OpFields(
        cause=change.cause,
        at=at,
        deadline=deadline,
        checks=entry.checks if change.checks is None else change.checks,
        checked_at=change.checked_at if change.checked_at is not None else getattr(entry, "checked_at", None),
        remark=change.remark,
    )
    if action is _ROLLBACK:
        return rolled_back(shard, entry, half, fields)
    if half is None:
        if isinstance(entry, ParkedEntry):
            raise NotWrittenError
        return noted(shard, entry, fields, OpKind.CHECKED)
    if action is _COMMIT:
        return committed(shard, entry, half, fields)
    if isinstance(entry, Pending) or action is Action.PARK:
        return parked(shard, entry, half, fields)
    return resumed(shard, entry, half, msgspec.structs.replace(fields, checks=0, checked_at=None), since=now)


def _recorded(action: Record, change: Change, entry: Entry, half: Half | None, at: int) -> LaneWrite:
    shard, deadline = change.shard, change.begin_by
    if action is Record.VERDICT:
        return _verdict(change, entry, half, at)
    if action is Record.STRAY and not isinstance(entry, Pending):
        return _write(shard, entry, entry.state, deadline, half=TOMBSTONE)
    if isinstance(entry, Ended):
        return _write(shard, entry, entry.state, deadline, half=TOMBSTONE, op=entry.op)
    if half is None:
        raise NotWrittenError
    if isinstance(entry, Pending):
        return _write(shard, entry, State.PREPARED, deadline, half=current_half(entry, half))
    kept = current_half(entry, half)
    record = Parked(half=kept, reason=entry.reason, parked_at=entry.parked_at, checks=entry.checks)
    return _write(shard, entry, State.PARKED, deadline, parked=record)


def _verdict(change: Change, entry: Entry, half: Half | None, at: int) -> LaneWrite:
    """Return the write of a commit verdict: an op VERDICT if the transaction is prepared, else a parked record."""
    if isinstance(entry, Ended):
        raise NotWrittenError
    fields = OpFields(
        cause=change.cause,
        at=at,
        deadline=change.begin_by,
        checks=max(entry.checks, change.checks or 0),
        checked_at=getattr(entry, "checked_at", None),
        remark=f"{entry.reason}; {COMMIT_SAID}" if isinstance(entry, ParkedEntry) else None,
        commit_verdict=True,
    )
    if isinstance(entry, Pending):
        return noted(change.shard, entry, fields, OpKind.VERDICT)
    if half is None:
        raise NotWrittenError
    return parked(change.shard, entry, half, fields)


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
    return _write(shard, entry, State.PREPARED, fields.deadline, op=_op(kind, entry, None, fields))


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


def _write(
    shard: int,
    entry: Entry,
    state: State,
    deadline: float,
    *,
    half: Half | Tombstone | None = None,
    op: Op | None = None,
    parked: Parked | Tombstone | None = None,
) -> LaneWrite:
    has_payload = isinstance(half, Half) or isinstance(parked, Parked)
    return LaneWrite(
        shard=shard,
        id=entry.id,
        group=entry.group,
        state=state,
        prepared_at=entry.prepared_at,
        half=half,
        op=op,
        parked=parked,
        size=entry.size if has_payload and not isinstance(entry, Ended) else 0,
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
