"""A client may reuse an id when its outcome is forgotten: the earlier life must not affect the later one."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halfway.protocol.records import OpKind
from halfway.protocol.shard import ShardState
from halfway.protocol.transactions import State
from tests.support.domain import naive_fold
from tests.support.domain.histories import Step, World, expected, half_of, known_by, steps_with_later_lives
from tests.support.domain.naive_fold import Known, Logs
from tests.support.domain.shard_records import ID, op
from tests.support.domain.states import state_of
from tests.unit.protocol.test_shard_fold import Reader, moves

HORIZON_MS = 5_000


PARKED_IN_ITS_SECOND_LIFE = [
    Step("ambiguous prepare", "a"),
    Step("ambiguous prepare", "a"),
    Step("ambiguous prepare", "a", content="B"),
    Step("forget", "a"),
    Step("commit", "a"),
    Step("forget", "a"),
    Step("prepare", "a"),
    Step("park", "a"),
]
"""In its first life the lane wrote the half again, because a record with other content followed it."""

REPEATED_AFTER_THE_HORIZON = [
    Step("prepare", "a"),
    Step("check", "a"),
    Step("verdict", "a"),
    Step("forget", "a"),
    Step("foreign prepare", "a"),
]
"""A recovery that saw only the repeat would attribute the check and the commit verdict to an earlier life."""


def new_world() -> World:
    return World(owner=ShardState(0, horizon_ms=HORIZON_MS), horizon_ms=HORIZON_MS)


def without(found: dict[str, Known], names: set[str]) -> dict[str, Known]:
    return {name: what for name, what in found.items() if name not in names}


def assert_agrees(state: ShardState, world: World) -> None:
    forgotten = world.forgotten()
    current = world.current()
    assert without(known_by(state), forgotten) == without(expected(current), forgotten)
    assert {name for name, _ in state.strays()} - forgotten == naive_fold.strays(current) - forgotten


@settings(max_examples=300)
@given(steps_with_later_lives)
def test_the_owners_live_fold_agrees_at_every_step(history: list[Step]) -> None:
    world = new_world()
    for step in history:
        world.run([step])
        assert known_by(world.owner) == expected(world.seen())
    world.read_tail(1000)
    assert_agrees(world.owner, world)


@settings(max_examples=500)
@given(steps_with_later_lives, moves)
@example(PARKED_IN_ITS_SECOND_LIFE, [("half", 4), ("op", 1)])
def test_a_fold_over_all_the_lives_of_an_id_knows_the_last(history: list[Step], reading: list[tuple[str, int]]) -> None:
    """An acquisition reads parked first, then half and op concurrently."""
    world = new_world()
    world.run(history)
    reader = Reader(world.logs, horizon_ms=HORIZON_MS)
    reader.move("parked", 1000)
    for partition, records in reading:
        if partition != "parked":
            reader.move(partition, records)
    reader.finish()
    assert_agrees(reader.state, world)
    reader.state.complete_fold()
    assert_agrees(reader.state, world)


@settings(max_examples=300)
@given(history=steps_with_later_lives, half_first=st.booleans())
@example(history=REPEATED_AFTER_THE_HORIZON, half_first=True)
@example(history=REPEATED_AFTER_THE_HORIZON, half_first=False)
def test_recovery_from_the_half_cursor_and_all_of_op_knows_the_last_life(
    history: list[Step], *, half_first: bool
) -> None:
    """It may read op from much further back than half, if another pending transaction needs it."""
    world = new_world()
    world.run(history)
    assert_agrees(recovered(world.logs, world.owner.half_cursor, half_first=half_first), world)


def recovered(logs: Logs, half_cursor: int, *, half_first: bool) -> ShardState:
    state = ShardState(0, horizon_ms=HORIZON_MS)

    def read_half() -> None:
        for row in logs.half:
            if row[0] >= half_cursor:
                state.apply_half(*row)

    for parked in logs.parked:
        state.apply_parked(*parked)
    if half_first:
        read_half()
    for record in logs.op:
        state.apply_op(*record)
    if not half_first:
        read_half()
    state.complete_fold()
    return state


@pytest.mark.parametrize("half_first", [True, False])
def test_a_repeat_that_was_prepared_before_this_life_does_not_end_it(*, half_first: bool) -> None:
    """A paused instance may write it only now: a recovery that saw only this record would find it committed."""
    logs = Logs(
        half=[(0, ID, half_of(ID, "A", 10_000)), (1, ID, half_of(ID, "A", 9_999))],
        op=[(0, op(OpKind.COMMITTED, at=10_000 - HORIZON_MS))],
    )
    owner = recovered(logs, 0, half_first=half_first)
    owner.half_tail = 2
    assert owner.strays() == [(ID, 1)]
    assert state_of(recovered(logs, owner.half_cursor, half_first=half_first), ID) is State.PREPARED
