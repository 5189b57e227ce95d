"""The table of states and calls in docs/protocol.md#state-is-a-fold-over-the-log."""

import pytest

from halfway.protocol.errors import AlreadyEndedError, NotPendingError
from halfway.protocol.transactions import TRANSITIONS, Action, State, conflict

PREPARED, PARKED, COMMITTED, ROLLED_BACK = State.PREPARED, State.PARKED, State.COMMITTED, State.ROLLED_BACK

TABLE: list[tuple[Action, dict[State, State | None]]] = [
    (Action.COMMIT, {PREPARED: COMMITTED, PARKED: COMMITTED, COMMITTED: COMMITTED, ROLLED_BACK: None}),
    (Action.ROLLBACK, {PREPARED: ROLLED_BACK, PARKED: ROLLED_BACK, COMMITTED: None, ROLLED_BACK: ROLLED_BACK}),
    (Action.UNKNOWN, {PREPARED: PREPARED, PARKED: PARKED, COMMITTED: None, ROLLED_BACK: None}),
    (Action.CHECK, {PREPARED: PREPARED, PARKED: None, COMMITTED: None, ROLLED_BACK: None}),
    (Action.RESUME, {PREPARED: PREPARED, PARKED: PREPARED, COMMITTED: None, ROLLED_BACK: None}),
    (Action.PARK, {PREPARED: PARKED, PARKED: PARKED, COMMITTED: None, ROLLED_BACK: None}),
]
CELLS = [(state, action, target) for action, row in TABLE for state, target in row.items()]
CONFLICTS = [(state, action) for state, action, target in CELLS if target is None]


def transition(transaction_id: str, state: State, action: Action) -> State:
    """Return the state that results from an action, or raise the error of an action that is not allowed."""
    target = TRANSITIONS.get((state, action))
    if target is None:
        raise conflict(transaction_id, state)
    return target


@pytest.mark.parametrize(
    "state, action, target", [(state, action, target) for state, action, target in CELLS if target is not None]
)
def test_a_legal_call_leads_to_its_state(state: State, action: Action, target: State) -> None:
    assert transition("t", state, action) is target


@pytest.mark.parametrize("state, action", [cell for cell in CONFLICTS if cell[0].ended])
def test_an_outcome_is_never_changed(state: State, action: Action) -> None:
    with pytest.raises(AlreadyEndedError, match=f"'t' is already {state.value}") as caught:
        transition("t", state, action)
    assert caught.value.fields == {"id": "t", "state": state.value}
    assert caught.value.code == "already_ended"


@pytest.mark.parametrize("state, action", [cell for cell in CONFLICTS if not cell[0].ended])
def test_what_is_parked_must_be_resumed_first(state: State, action: Action) -> None:
    with pytest.raises(NotPendingError, match="resume it or end it first") as caught:
        transition("t", state, action)
    assert caught.value.code == "not_pending"


def test_the_table_is_whole() -> None:
    assert {(state, action) for state, action, _ in CELLS} == {(state, action) for state in State for action in Action}
    assert len(TRANSITIONS) == len(CELLS) - len(CONFLICTS)
