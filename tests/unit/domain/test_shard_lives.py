"""A client may use an id again once its outcome is forgotten: the earlier life must not reach into the later one."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from halfway.domain.shard import ShardState
from tests.support.domain import naive_fold
from tests.support.domain.histories import Step, World, described, expected, steps_with_later_lives
from tests.support.domain.naive_fold import Known
from tests.unit.domain.test_shard_fold import Reader, moves

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
"""In its first life the lane wrote the half again, as a record of other content stood behind it."""


def new_world() -> World:
    return World(owner=ShardState(0, horizon_ms=HORIZON_MS), horizon_ms=HORIZON_MS)


def without(found: dict[str, Known], names: set[str]) -> dict[str, Known]:
    return {name: what for name, what in found.items() if name not in names}


def agrees(state: ShardState, world: World) -> None:
    unborn = world.unborn()
    standing = world.standing()
    assert without(described(state), unborn) == without(expected(standing), unborn)
    assert {name for name, _ in state.strays()} - unborn == naive_fold.strays(standing) - unborn


@settings(max_examples=300)
@given(steps_with_later_lives)
def test_the_owners_live_fold_agrees_at_every_step(history: list[Step]) -> None:
    world = new_world()
    for step in history:
        world.run([step])
        assert described(world.owner) == expected(world.seen())
    world.read_tail(1000)
    agrees(world.owner, world)


@settings(max_examples=500)
@given(steps_with_later_lives, moves)
@example(PARKED_IN_ITS_SECOND_LIFE, [("half", 4), ("op", 1)])
def test_a_fold_over_all_the_lives_of_an_id_knows_the_last(history: list[Step], reading: list[tuple[str, int]]) -> None:
    """An acquisition reads parked first, then half and op side by side."""
    world = new_world()
    world.run(history)
    reader = Reader(world.logs, horizon_ms=HORIZON_MS)
    reader.move("parked", 1000)
    for partition, records in reading:
        if partition != "parked":
            reader.move(partition, records)
    reader.finish()
    agrees(reader.state, world)
    reader.state.settle()
    agrees(reader.state, world)


@settings(max_examples=300)
@given(history=steps_with_later_lives, half_first=st.booleans())
def test_recovery_from_the_half_cursor_and_all_of_op_knows_the_last_life(
    history: list[Step], *, half_first: bool
) -> None:
    """It may read op much further back than half, where another pending transaction needs it."""
    world = new_world()
    world.run(history)
    recovered = ShardState(0, horizon_ms=HORIZON_MS)

    def read_half() -> None:
        for row in world.logs.half:
            if row[0] >= world.owner.half_cursor:
                recovered.apply_half(*row)

    for parked in world.logs.parked:
        recovered.apply_parked(*parked)
    if half_first:
        read_half()
    for op in world.logs.op:
        recovered.apply_op(*op)
    if not half_first:
        read_half()
    recovered.settle()
    agrees(recovered, world)
