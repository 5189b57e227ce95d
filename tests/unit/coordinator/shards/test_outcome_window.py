"""From where a recovery must read the outcomes that an owner remembers."""

from halfway.coordinator.shards.shard import OutcomeWindow
from halfway.protocol.records import FOREIGN
from halfway.protocol.shard import ShardState
from tests.support.domain.shard_records import ID, A

HORIZON_S = 60.0


def window(*, start: int, recent: int) -> tuple[OutcomeWindow, ShardState]:
    state = ShardState(0)
    state.op_start, state.op_recent = start, recent
    return OutcomeWindow(state, HORIZON_S), state


def test_it_is_where_op_ended_a_horizon_ago() -> None:
    found, state = window(start=0, recent=100)
    starts = {}
    for second in range(200):
        state.op_tail = 1_000 + second
        starts[second] = found.start(float(second))
    assert starts[0] == 100, "the acquisition knows what is within the horizon"
    assert starts[59] == 100
    for second in range(61, 200):
        assert 1_000 + second - 62 <= starts[second] <= 1_000 + second - 60


def test_it_stays_while_a_stray_is_not_corrected_and_keeps_few_samples() -> None:
    """A next owner must know the outcome of the stray, too."""
    found, state = window(start=7, recent=100)
    state.apply_half(3, ID, A)
    state.apply_half(4, ID, FOREIGN)
    for second in range(1_000):
        state.op_tail = 1_000 + second
        assert found.start(float(second)) == 7
    state.apply_half(5, ID, None)
    assert 1_000 <= found.start(1_000.0) <= 1_940


def test_it_never_goes_back() -> None:
    """Not even if the look-up by time found an offset before that of the cursor."""
    found, state = window(start=50, recent=20)
    state.op_tail = 60
    assert found.start(0.0) == 50
