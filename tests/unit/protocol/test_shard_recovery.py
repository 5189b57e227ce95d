"""Recovery: a fold from the committed cursors, over compacted logs, finds everything that it must find."""

from collections.abc import Callable
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from halfway.protocol.shard import ShardState
from tests.support.domain import naive_fold
from tests.support.domain.histories import Step, World, expected, known_by, steps
from tests.support.domain.naive_fold import Known, Logs

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
