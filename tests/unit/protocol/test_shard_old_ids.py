"""Logs of releases before: an id of an old form may have been used again a horizon after its outcome."""

from itertools import permutations

import msgspec
import pytest

from halfway.protocol.records import OpKind
from halfway.protocol.shard import ShardState
from halfway.protocol.transactions import State
from tests.support.domain.histories import half_of
from tests.support.domain.shard_records import op, parked_of
from tests.support.domain.states import state_of

HORIZON_MS = 5_000
OLD = "order-1"
NEW = "0199a000-0000-7000-8000-000000000001"
COMMITTED_AT = 2_000


def fold(name: str, *, half: list[tuple[int, int | None]], ends: list[tuple[OpKind, int, int]]) -> list[ShardState]:
    """Fold half records (offset, time of the prepare) and ends (kind, prepare, end), half first and op first."""
    states = []
    for order in permutations(("half", "op")):
        state = ShardState(0, horizon_ms=HORIZON_MS)
        for partition in order:
            for offset, at in half if partition == "half" else ():
                state.apply_half(offset, name, None if at is None else half_of(name, "A", at))
            for offset, (kind, prepared_at, at) in enumerate(ends if partition == "op" else ()):
                state.apply_op(offset, msgspec.structs.replace(op(kind, name, at=at), prepared_at=prepared_at))
        state.half_tail = 10
        state.complete_fold()
        states.append(state)
    return states


def test_a_later_use_in_an_old_log_is_pending_and_not_ended_by_the_earlier_outcome() -> None:
    later = COMMITTED_AT + HORIZON_MS
    for state in fold(OLD, half=[(0, 1_000), (1, None), (2, later)], ends=[(OpKind.COMMITTED, 1_000, COMMITTED_AT)]):
        assert state_of(state, OLD) is State.PREPARED
        assert state.strays() == []


@pytest.mark.parametrize("name, later", [(OLD, COMMITTED_AT + HORIZON_MS - 1), (NEW, COMMITTED_AT + HORIZON_MS)])
def test_a_late_half_within_the_horizon_or_of_an_id_that_lives_once_is_a_stray(name: str, later: int) -> None:
    for state in fold(name, half=[(0, 1_000), (1, None), (2, later)], ends=[(OpKind.COMMITTED, 1_000, COMMITTED_AT)]):
        assert state_of(state, name) is State.COMMITTED
        assert state.strays() == [(name, 2)]


def test_the_outcome_of_the_later_use_is_the_one_that_is_known() -> None:
    later = COMMITTED_AT + HORIZON_MS
    ends = [(OpKind.COMMITTED, 1_000, COMMITTED_AT), (OpKind.ROLLED_BACK, later, later + 10)]
    for state in fold(OLD, half=[(0, 1_000), (1, None), (2, later), (3, None)], ends=ends):
        assert state_of(state, OLD) is State.ROLLED_BACK


def test_a_later_use_that_is_parked_is_not_ended_by_the_earlier_outcome() -> None:
    """An acquisition reads parked first."""
    state = ShardState(0, horizon_ms=HORIZON_MS)
    state.apply_parked(0, OLD, parked_of(half_of(OLD, "A", COMMITTED_AT + HORIZON_MS)))
    state.apply_op(0, op(OpKind.COMMITTED, OLD, at=COMMITTED_AT))
    assert state_of(state, OLD) is State.PARKED


def test_a_repeat_a_horizon_later_does_not_hide_the_checks_of_a_pending_transaction() -> None:
    """A recovery that saw only the repeat would take them for those of an earlier use."""
    state = ShardState(0, horizon_ms=HORIZON_MS)
    state.apply_half(0, OLD, half_of(OLD, "A", 1_000))
    state.apply_half(1, OLD, half_of(OLD, "A", 1_000 + HORIZON_MS))
    assert state.strays() == [(OLD, 1)]
