"""ShardState against a model that keeps every record and computes from scratch; recovery over compacted logs."""

from collections.abc import Callable
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from halfway.protocol.shard import ShardState
from halfway.protocol.transactions import State
from tests.support.domain import naive_fold
from tests.support.domain.histories import GROUP, PARTITIONS, Step, World, expected, known_by, steps
from tests.support.domain.naive_fold import Known, Logs

moves = st.lists(st.tuples(st.sampled_from(PARTITIONS), st.integers(-6, 4)), max_size=60)
"""For each partition in turn: read so many more records, or go back and read again."""


class Reader:
    """Reads the three partitions into one fold, each at its own speed."""

    def __init__(self, logs: Logs) -> None:
        self.state = ShardState(0)
        self._logs = logs
        self._position = dict.fromkeys(PARTITIONS, 0)

    def move(self, partition: str, records: int) -> None:
        if records < 0:
            self._position[partition] = max(0, self._position[partition] + records)
            return
        for _ in range(records):
            if not self.apply(partition, self._position[partition]):
                break
            self._position[partition] += 1

    def finish(self) -> None:
        for partition in PARTITIONS:
            self.move(partition, 1000)

    def apply(self, partition: str, place: int) -> bool:
        """Apply the record at a place, independent of the reading position; return False if there is none."""
        if partition == "half" and place < len(self._logs.half):
            self.state.apply_half(*self._logs.half[place])
            self.state.half_tail = max(self.state.half_tail, self._logs.half[place][0] + 1)
        elif partition == "op" and place < len(self._logs.op):
            self.state.apply_op(*self._logs.op[place])
        elif partition == "parked" and place < len(self._logs.parked):
            self.state.apply_parked(*self._logs.parked[place])
        else:
            return False
        return True


def assert_agrees(state: ShardState, logs: Logs) -> None:
    assert known_by(state) == expected(logs)
    assert {name for name, _ in state.strays()} == naive_fold.strays(logs)
    alive = [what.state for what in expected(logs).values() if not what.state.ended]
    counts = alive.count(State.PREPARED), alive.count(State.PARKED)
    assert state.counts == (*counts, len(expected(logs)) - len(alive))
    assert state.group_counts == ({GROUP: counts} if alive else {})


@settings(max_examples=600)
@given(steps, moves)
def test_the_fold_is_the_same_however_the_partitions_are_interleaved_and_read_again(
    history: list[Step], reading: list[tuple[str, int]]
) -> None:
    world = World()
    world.run(history)
    reader = Reader(world.logs)
    for partition, records in reading:
        reader.move(partition, records)
    reader.finish()
    assert_agrees(reader.state, world.logs)
    reader.state.complete_fold()
    assert_agrees(reader.state, world.logs)


@settings(max_examples=300)
@given(history=steps, partitions=st.permutations(PARTITIONS), backwards=st.booleans())
def test_a_record_that_is_applied_again_changes_nothing(
    history: list[Step], partitions: list[str], *, backwards: bool
) -> None:
    world = World()
    world.run(history)
    reader = Reader(world.logs)
    reader.finish()
    cursors = reader.state.half_cursor, reader.state.op_cursor
    for partition in partitions:
        places = range(len(getattr(world.logs, partition)))
        for place in reversed(places) if backwards else places:
            reader.apply(partition, place)
            assert_agrees(reader.state, world.logs)
            assert (reader.state.half_cursor, reader.state.op_cursor) == cursors


@settings(max_examples=600)
@given(steps)
def test_the_owners_live_fold_of_own_writes_and_tail_agrees_at_every_step(history: list[Step]) -> None:
    """The owner applies its writes when they are confirmed; the tail reads them again, between the writes of others."""
    world = World()
    for step in history:
        world.run([step])
        assert_agrees(world.owner, world.seen())
    world.read_tail(1000)
    assert_agrees(world.owner, world.logs)


@settings(max_examples=300)
@given(steps)
def test_correcting_every_stray_leaves_none_and_changes_no_state(history: list[Step]) -> None:
    world = World()
    world.run(history)
    world.read_tail(1000)
    before = known_by(world.owner)
    for transaction_id, _ in world.owner.strays():
        world.step(Step("correct", transaction_id))
    assert world.owner.strays() == []
    assert naive_fold.strays(world.logs) == set()
    assert known_by(world.owner) == before
    assert_agrees(world.owner, world.logs)


@settings(max_examples=300)
@given(steps)
def test_an_op_and_the_tombstone_of_its_half_are_applied_together_as_they_are_alone(history: list[Step]) -> None:
    world = World()
    world.run(history)
    together, alone = Reader(world.logs), Reader(world.logs)
    tombstones: dict[str, list[int]] = {}
    for offset, name, half in world.logs.half:
        if half is None:
            tombstones.setdefault(name, []).append(offset)
        else:
            together.state.apply_half(offset, name, half)
            alone.state.apply_half(offset, name, half)
    for offset, op in world.logs.op:
        alone.state.apply_op(offset, op)
        if tombstones.get(op.id):
            tombstone = tombstones[op.id].pop(0)
            together.state.apply_end(offset, op, tombstone)
            alone.state.apply_half(tombstone, op.id, None)
        else:
            together.state.apply_op(offset, op)
        assert known_by(together.state) == known_by(alone.state)
        assert together.state.strays() == alone.state.strays()
    together.finish()
    assert_agrees(together.state, world.logs)


HORIZON_MS = 1000


Row = TypeVar("Row")


def compact(rows: list[Row], before: int, key: Callable[[Row], str], offset: Callable[[Row], int]) -> list[Row]:
    """Of the records below an offset, keep the last one of each key, as the broker's cleaner does."""
    last = {key(row): offset(row) for row in rows if offset(row) < before}
    return [row for row in rows if offset(row) >= before or last[key(row)] == offset(row)]


def compacted(logs: Logs, half: int, op: int, parked: int, *, tombstones: bool) -> Logs:
    """Compact each partition below an offset of its own; also remove its tombstones if they are old enough.

    The cleaner stays behind (`min.compaction.lag.ms`), so it never reaches a stray that is not corrected yet.
    """
    uncorrected = naive_fold.strays(logs)
    half = min([half, *(offset for offset, key, _ in logs.half if key in uncorrected)])
    halves = compact(logs.half, half, key=lambda row: row[1], offset=lambda row: row[0])
    parkeds = compact(logs.parked, parked, key=lambda row: row[1], offset=lambda row: row[0])
    if not tombstones:
        halves = [row for row in halves if row[0] >= half or row[2] is not None]
        parkeds = [row for row in parkeds if row[0] >= parked or row[2] is not None]
    return Logs(
        half=halves, op=compact(logs.op, op, key=lambda row: row[1].id, offset=lambda row: row[0]), parked=parkeds
    )


def recover(logs: Logs, half_cursor: int, op_cursor: int, *, now: int) -> ShardState:
    """Fold as an acquisition does: half and op from their cursors, op at least from the horizon, and all of parked."""
    state = ShardState(0)
    remembered = next((offset for offset, op in logs.op if op.at >= now - HORIZON_MS), op_cursor)
    for offset, parked_id, parked in logs.parked:
        state.apply_parked(offset, parked_id, parked)
    for offset, op in logs.op:
        if offset >= min(op_cursor, remembered):
            state.apply_op(offset, op)
    for offset, half_id, half in logs.half:
        if offset >= half_cursor:
            state.apply_half(offset, half_id, half)
    state.half_tail = logs.half[-1][0] + 1 if logs.half else half_cursor
    state.complete_fold()
    return state


def forgotten(truth: dict[str, Known], now: int) -> set[str]:
    """Return the ids whose outcome is older than the horizon: a late prepare of such an id is a new transaction."""
    return {name for name, what in truth.items() if what.at is not None and what.at < now - HORIZON_MS}


def without(found: dict[str, Known], names: set[str]) -> dict[str, Known]:
    return {name: what for name, what in found.items() if name not in names}


points = st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))


@settings(max_examples=600)
@given(before=steps, after=steps, points=points, tombstones=st.booleans())
def test_recovery_from_the_cursors_knows_what_is_pending_parked_and_lately_ended(
    before: list[Step], after: list[Step], points: tuple[int, int, int], *, tombstones: bool
) -> None:
    world = World()
    world.run(before)
    half_cursor, op_cursor = world.owner.half_cursor, world.owner.op_cursor
    world.run(after)
    recovered = recover(compacted(world.logs, *points, tombstones=tombstones), half_cursor, op_cursor, now=world.now)
    truth = expected(world.logs)
    old = forgotten(truth, world.now)
    revived = old & naive_fold.strays(world.logs)
    found = known_by(recovered)
    assert {name for name in found if name in old and not found[name].state.ended} <= revived
    assert without(found, old) == without(truth, old)
    assert {name for name, _ in recovered.strays()} - old == naive_fold.strays(world.logs) - old


@settings(max_examples=300)
@given(steps, steps)
def test_a_recovered_owner_goes_on_like_one_that_never_stopped(before: list[Step], after: list[Step]) -> None:
    world = World()
    world.run(before)
    world.owner = recover(world.logs, world.owner.half_cursor, world.owner.op_cursor, now=world.now)
    world.tail = len(world.logs.half)
    old = forgotten(expected(world.logs), world.now)
    world.run(after)
    world.read_tail(1000)
    assert without(known_by(world.owner), old) == without(expected(world.logs), old)
    assert {name for name, _ in world.owner.strays()} - old == naive_fold.strays(world.logs) - old


@settings(max_examples=300)
@given(steps)
def test_what_recovery_needs_lies_at_or_after_the_cursors(history: list[Step]) -> None:
    world = World()
    world.run(history)
    world.read_tail(1000)
    for pending in world.owner.pending():
        assert world.owner.half_cursor <= pending.offset
        held = {offset: half for offset, _, half in world.logs.half}[pending.offset]
        assert held is not None
        assert held.fingerprint == pending.fingerprint, "the payload is read back from this offset"
    for _, offset in world.owner.strays():
        assert world.owner.half_cursor <= offset
