"""What can be done to a transaction, and what that writes (docs/protocol.md#end-the-lane)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import msgspec

from halfway.domain.errors import (
    EndUnconfirmedError,
    HalfwayError,
    IdReplacedError,
    NotWrittenError,
    OvertakenError,
    RetryableError,
)
from halfway.domain.records import Half, OpKind
from halfway.domain.shard import Ended, Entry, ParkedEntry, Pending, Unresolved
from halfway.domain.transaction import Action, Cause, Outcome, transition
from halfway.service.ports import LaneWrite
from halfway.service.requests import EndResult
from halfway.service.resolve import lane_writes

ACTIONS = {Outcome.COMMIT: Action.COMMIT, Outcome.ROLLBACK: Action.ROLLBACK, Outcome.UNKNOWN: Action.UNKNOWN}
"""What each outcome, of a caller or of a check, does."""


class Change(Protocol):
    """Something to do to a transaction."""

    @property
    def needs_payload(self) -> bool:
        """Whether what it writes holds the messages or their hashes."""

    @property
    def needs_whole_payload(self) -> bool:
        """Whether it cannot be written if the payload cannot be read."""

    def answer_without_write(self, entry: Entry, tried: Sequence[int]) -> EndResult | None:
        """Return the answer if nothing is to be written, None if something is; raise if the state forbids it.

        `tried` are the times (ms since the epoch) of writes of this very change whose lane was lost: an outcome that
        carries one of them, and its cause, is its own (docs/protocol.md#end-the-lane).
        """

    def write(self, shard: int, entry: Entry, half: Half | None, *, at: int, deadline: float) -> LaneWrite:
        """Return what to write, from the state that stands."""


class Act(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a caller, a check or policy does; `checks` is the count to record, None for the one that stands.

    What policy does brings `still`, which is asked at every write, under the claim: a verdict may have come first.
    """

    action: Action
    cause: Cause
    remark: str | None = None
    checks: int | None = None
    checked_at: int | None = None
    commit_verdict: bool = False
    prepared_at: int | None = None
    """Of the transaction that is meant, ms since the epoch: an id may belong to another one by now; None for any."""
    still: Callable[[Unresolved], bool] | None = None

    @property
    def needs_payload(self) -> bool:
        """A rollback takes it for the audit's hashes."""
        return self.action not in (Action.CHECK, Action.UNKNOWN)

    @property
    def needs_whole_payload(self) -> bool:
        """One that cannot be read any more must not keep a rollback from ending."""
        return self.action is not Action.ROLLBACK

    def answer_without_write(self, entry: Entry, tried: Sequence[int]) -> EndResult | None:
        """Judge by the transitions of docs/protocol.md."""
        demand_same(entry, self.prepared_at)
        state = entry.state
        target = transition(entry.id, state, self.action)
        if isinstance(entry, Ended):
            own = entry.at in tried and entry.cause is self.cause
            return EndResult(id=entry.id, state=state, changed=own and state is target)
        if target is state and not self._leaves_note(entry):
            return EndResult(id=entry.id, state=target, changed=bool(tried))
        return None

    def _leaves_note(self, entry: Unresolved) -> bool:
        """Whether it writes an op marker although it leaves the state as it is."""
        if isinstance(entry, ParkedEntry):
            return self.commit_verdict
        return self.action is Action.CHECK or (self.action is Action.UNKNOWN and bool(self.remark))

    def write(self, shard: int, entry: Entry, half: Half | None, *, at: int, deadline: float) -> LaneWrite:
        """Choose by the state that stands; OvertakenError if policy no longer decides it."""
        if isinstance(entry, Ended):
            raise NotWrittenError
        if self.still is not None and not self.still(entry):
            raise OvertakenError(id=entry.id)
        told = lane_writes.OpFields(
            cause=self.cause,
            at=at,
            deadline=deadline,
            checks=entry.checks if self.checks is None else self.checks,
            checked_at=self.checked_at if self.checked_at is not None else getattr(entry, "checked_at", None),
            remark=self.remark,
            commit_verdict=self.commit_verdict,
        )
        if self.action is Action.ROLLBACK:
            return lane_writes.rolled_back(shard, entry, half, told)
        if half is None:
            if isinstance(entry, ParkedEntry):
                raise NotWrittenError
            return lane_writes.noted(shard, entry, told, OpKind.VERDICT if self.commit_verdict else OpKind.CHECKED)
        if self.action is Action.COMMIT:
            return lane_writes.committed(shard, entry, half, told)
        if isinstance(entry, Pending) or self.action is Action.PARK:
            return lane_writes.parked(shard, entry, half, told)
        return lane_writes.resumed(shard, entry, half, msgspec.structs.replace(told, checks=0, checked_at=None))


class Reanchor(msgspec.Struct, frozen=True, gc=False):
    """Write the half of a prepared transaction again at the tail."""

    needs_payload: ClassVar[bool] = True
    needs_whole_payload: ClassVar[bool] = True

    def answer_without_write(self, entry: Entry, _tried: Sequence[int]) -> EndResult | None:
        """Leave what is prepared no longer."""
        return None if isinstance(entry, Pending) else EndResult(id=entry.id, state=entry.state, changed=False)

    def write(self, shard: int, entry: Entry, half: Half | None, *, at: int, deadline: float) -> LaneWrite:  # noqa: ARG002 - it has no outcome
        """Return the half with the totals that stand."""
        if half is None or not isinstance(entry, Pending):
            raise NotWrittenError
        return lane_writes.written_again(shard, entry, half, deadline=deadline)


class WriteTombstone(msgspec.Struct, frozen=True, gc=False):
    """Write the tombstone of a stray half of a transaction that is parked or ended."""

    needs_payload: ClassVar[bool] = False
    needs_whole_payload: ClassVar[bool] = False

    def answer_without_write(self, entry: Entry, _tried: Sequence[int]) -> EndResult | None:
        """Leave what is prepared: its half is no stray."""
        return EndResult(id=entry.id, state=entry.state, changed=False) if isinstance(entry, Pending) else None

    def write(self, shard: int, entry: Entry, half: Half | None, *, at: int, deadline: float) -> LaneWrite:  # noqa: ARG002 - it has neither
        """Return the tombstone."""
        return lane_writes.tombstone_again(
            shard, entry.id, entry.group, entry.state, entry.prepared_at, deadline=deadline
        )


def demand_same(entry: Entry, prepared_at: int | None) -> None:
    """Raise IdReplacedError if an entry is not of the transaction that was prepared then; None stands for any."""
    if prepared_at is not None and entry.prepared_at != prepared_at:
        raise IdReplacedError(entry.id, state=entry.state.value)


def unconfirmed(transaction_id: str) -> RetryableError:
    """Return the error of an end whose fate is not known in time."""
    return EndUnconfirmedError(
        f"the end of {transaction_id!r} was not confirmed in time: send the same end again, it is never done twice",
        id=transaction_id,
    )


def note_error(entry: Entry, error: HalfwayError) -> None:
    """Show with a pending transaction why it could not be written."""
    if isinstance(entry, Pending):
        entry.last_error = f"{error.code}: {error.detail}"
