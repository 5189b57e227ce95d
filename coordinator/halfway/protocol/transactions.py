"""Transactions: their states and outcomes, and the one table of legal transitions.

See docs/protocol.md#state-is-a-fold-over-the-log.
"""

from __future__ import annotations

from enum import StrEnum

from halfway.protocol.errors import AlreadyEndedError, NotPendingError


class State(StrEnum):
    """The state of a transaction."""

    PREPARED = "prepared"
    PARKED = "parked"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"

    def __init__(self, state: str) -> None:
        """Set `ended`: whether it is one of the two final outcomes."""
        self.ended = state in {"committed", "rolled_back"}


class Outcome(StrEnum):
    """The result of a local transaction, as the producer service reports it."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"


class Cause(StrEnum):
    """The originator of a change, as recorded in its op marker."""

    PRODUCER = "producer"
    CHECK = "check"
    OPERATOR = "operator"
    POLICY = "policy"


class Action(StrEnum):
    """An action on a transaction."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"
    CHECK = "check"
    PARK = "park"
    RESUME = "resume"


TRANSITIONS: dict[tuple[State, Action], State] = {
    (State.PREPARED, Action.COMMIT): State.COMMITTED,
    (State.PREPARED, Action.ROLLBACK): State.ROLLED_BACK,
    (State.PREPARED, Action.UNKNOWN): State.PREPARED,
    (State.PREPARED, Action.CHECK): State.PREPARED,
    (State.PREPARED, Action.PARK): State.PARKED,
    (State.PREPARED, Action.RESUME): State.PREPARED,
    (State.PARKED, Action.COMMIT): State.COMMITTED,
    (State.PARKED, Action.ROLLBACK): State.ROLLED_BACK,
    (State.PARKED, Action.UNKNOWN): State.PARKED,
    (State.PARKED, Action.PARK): State.PARKED,
    (State.PARKED, Action.RESUME): State.PREPARED,
    (State.COMMITTED, Action.COMMIT): State.COMMITTED,
    (State.ROLLED_BACK, Action.ROLLBACK): State.ROLLED_BACK,
}
"""Every legal (state, action) and the resulting state. A pair that is not here is a conflict (409)."""


def conflict(transaction_id: str, state: State) -> AlreadyEndedError | NotPendingError:
    """Return the error for an action that a state does not allow.

    An outcome is never changed. A parked transaction must be resumed or ended first.
    """
    if state.ended:
        return AlreadyEndedError(transaction_id, state=state.value)
    return NotPendingError(transaction_id, state=state.value)
