"""What is done to a transaction, and what each of these writes, by the state that stands.

See docs/protocol.md#state-is-a-fold-over-the-log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from halfway.domain.errors import (
    EndUnconfirmedError,
    HalfwayError,
    NotWrittenError,
    OvertakenError,
    RetryableError,
)
from halfway.domain.records import Half, OpKind
from halfway.domain.shard import Ended, Entry, ParkedEntry, Pending, Unresolved
from halfway.domain.transaction import Action, Cause, Outcome, State, transition
from halfway.service.ports import LaneWrite
from halfway.service.requests import EndResult
from halfway.service.resolve import lane_writes

if TYPE_CHECKING:
    from halfway.service.shards.shard_table import Shard

ACTIONS = {Outcome.COMMIT: Action.COMMIT, Outcome.ROLLBACK: Action.ROLLBACK, Outcome.UNKNOWN: Action.UNKNOWN}
"""What each outcome, of a caller or of a check, does."""
Build = Callable[["Shard", Unresolved, Half | None, int], LaneWrite]
"""Makes a write from the shard, the entry, its payload and the time."""


class Act(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One thing to do to a transaction; `checks` is the count to record, None for the one that stands.

    What policy does brings `still`, which is asked at every write, under the claim: a verdict may have come first.
    """

    action: Action
    cause: Cause
    remark: str | None = None
    checks: int | None = None
    checked_at: int | None = None
    commit_verdict: bool = False
    still: Callable[[Unresolved], bool] | None = None


def leaves_note(act: Act, entry: Entry) -> bool:
    """Whether an action that leaves the state as it is writes an op marker all the same."""
    if isinstance(entry, ParkedEntry):
        return act.commit_verdict
    if not isinstance(entry, Pending):
        return False
    return act.action is Action.CHECK or (act.action is Action.UNKNOWN and bool(act.remark))


def write_of(shard: int, entry: Unresolved, half: Half | None, act: Act, *, at: int, deadline: float) -> LaneWrite:
    """Choose what an action writes from the state that stands; OvertakenError where policy no longer decides it."""
    if act.still is not None and not act.still(entry):
        raise OvertakenError(id=entry.id)
    told = lane_writes.Told(
        cause=act.cause,
        at=at,
        deadline=deadline,
        checks=entry.checks if act.checks is None else act.checks,
        checked_at=act.checked_at if act.checked_at is not None else getattr(entry, "checked_at", None),
        remark=act.remark,
        commit_verdict=act.commit_verdict,
    )
    if act.action is Action.ROLLBACK:
        return lane_writes.rolled_back(shard, entry, half, told)
    if half is None:
        if isinstance(entry, ParkedEntry):
            raise NotWrittenError
        return lane_writes.noted(shard, entry, told, OpKind.VERDICT if act.commit_verdict else OpKind.CHECKED)
    if act.action is Action.COMMIT:
        return lane_writes.committed(shard, entry, half, told)
    if isinstance(entry, Pending) or act.action is Action.PARK:
        return lane_writes.parked(shard, entry, half, told)
    return lane_writes.resumed(shard, entry, half, msgspec.structs.replace(told, checks=0, checked_at=None))


def own(transaction_id: str, entry: Ended | None, target: State, act: Act | None, tried: Sequence[int]) -> EndResult:
    """Judge what the fold says after a lane was lost."""
    if entry is None:
        raise unconfirmed(transaction_id)
    if act is not None:
        transition(transaction_id, entry.state, act.action)
        own = entry.at in tried and entry.cause is act.cause
        return EndResult(id=transaction_id, state=entry.state, changed=own and entry.state is target)
    return EndResult(id=transaction_id, state=entry.state, changed=False)


def unconfirmed(transaction_id: str) -> RetryableError:
    return EndUnconfirmedError(
        f"the end of {transaction_id!r} was not confirmed in time: send the same end again, it is never done twice",
        id=transaction_id,
    )


def note_error(entry: Entry, error: HalfwayError) -> None:
    """Show with a pending transaction why it could not be written."""
    if isinstance(entry, Pending):
        entry.last_error = f"{error.code}: {error.detail}"


def needs_payload(act: Act) -> bool:
    """Whether what an act writes holds the messages or their hashes."""
    return act.action not in (Action.CHECK, Action.UNKNOWN)


def builder(act: Act, deadline: float) -> Build:
    """Return what makes the write of an act."""

    def build(shard: Shard, entry: Unresolved, half: Half | None, at: int) -> LaneWrite:
        return write_of(shard.number, entry, half, act, at=at, deadline=deadline)

    return build
