"""What a shard knows of its own records, of writes that are still current, and of outcomes; turns for new ids."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfway.coordinator.access import OpenAccess
from halfway.coordinator.changes import Change, Record
from halfway.coordinator.operations import Path
from halfway.coordinator.ports import TOMBSTONE, LaneWrite
from halfway.coordinator.requests import ServiceLimits
from halfway.coordinator.shards.shard import OutcomeWindow, Shard
from halfway.coordinator.shards.shard_table import SLICE_IDS, SLICE_S, ShardRotation, ShardTable
from halfway.protocol.entries import Pending
from halfway.protocol.outcomes import EndCounts
from halfway.protocol.records import FOREIGN, Half, Message, OpKind, fingerprint
from halfway.protocol.shard import ShardState
from halfway.protocol.transactions import Cause, State
from tests.support.domain.shard_records import ID, A, B, op, tombstone_of
from tests.support.surroundings import ManualClock

HORIZON_MS = 60_000


def claim(table: ShardTable, write: LaneWrite | None = None) -> Change:
    path, mark = Path[Change](OpenAccess()), table.get(0).mark
    of_stray = {"path": path, "id": ID, "action": Record.STRAY, "cause": Cause.POLICY, "deadline": 0}
    return Change(**of_stray, shard=0, mark=mark, write=write)  # type: ignore[arg-type]


async def test_a_stray_gets_no_tombstone_once_its_id_is_prepared_again() -> None:
    """After the horizon a caller may reuse the id; the stray's tombstone would remove the new transaction."""
    state = ShardState(0, horizon_ms=HORIZON_MS)
    state.apply_half(3, ID, A)
    ended = op(OpKind.COMMITTED, half_offset=3)
    state.apply_op(0, ended)
    state.apply_half(4, ID, None)
    state.apply_half(5, ID, FOREIGN)
    table = ShardTable(ServiceLimits(shards=1), ManualClock())
    table.acquired(0, state)
    stray = tombstone_of(A, deadline=0)
    table.claims[ID] = claim(table, stray)
    assert table.may_still_be_written(stray)
    later = ended.at + HORIZON_MS
    table.appended(0, [(6, ID, msgspec.structs.replace(B, prepared_at=later, since=later))], 7)
    assert isinstance(state.find(ID), Pending)
    assert not table.may_still_be_written(stray)
    assert table.get(0).agenda.pop_up_to(0) == ID, "nobody would ask what became of the new transaction"


async def test_a_write_for_a_fold_that_another_owner_may_have_changed_is_no_longer_current() -> None:
    """Its shard was lost and acquired again while the write waited: the write is made again from the current state."""
    table = ShardTable(ServiceLimits(shards=1), ManualClock())
    table.acquired(0, _with_a())
    write = LaneWrite(
        shard=0,
        id=ID,
        group=A.group,
        state=State.COMMITTED,
        prepared_at=A.prepared_at,
        op=op(OpKind.COMMITTED),
        half=TOMBSTONE,
        deadline=0,
    )
    table.claims[ID] = claim(table)
    assert not table.may_still_be_written(write), "the claim waits for another write, or for none"
    table.claims[ID].write = write
    assert table.may_still_be_written(write)
    table.lost(0)
    assert not table.may_still_be_written(write)
    table.acquired(0, _with_a())
    assert not table.may_still_be_written(write)
    table.claims[ID].mark = table.get(0).mark
    assert table.may_still_be_written(write)


def _with_a() -> ShardState:
    state = ShardState(0)
    state.apply_half(0, ID, A)
    return state


async def test_a_tail_that_reads_again_does_not_go_back() -> None:
    table = ShardTable(ServiceLimits(shards=1), ManualClock())
    table.acquired(0, ShardState(0))
    table.appended(0, [], 8)
    table.appended(0, [], 3)
    assert table.get(0).state.half_tail == 8


def half(name: str) -> Half:
    messages = (Message(topic="t", value=b"v"),)
    return Half(
        id=name, group="g", messages=messages, prepared_at=1, since=1, fingerprint=fingerprint("g", messages, None)
    )


def test_an_own_record_is_passed_once_at_its_offset_under_its_key() -> None:
    """Even if its transaction has changed since; also a tombstone of the lane."""
    shard = Shard(0, ShardState(0))
    shard.apply_own_half(5, "a", half("a"))
    shard.apply_own_half(6, "a", None)
    assert shard.state.unresolved_count == 0
    assert [shard.has_applied(offset, b"a") for offset in (4, 5, 6, 7)] == [False, True, True, False]
    assert not shard.has_applied(5, b"a")


def test_a_record_of_another_id_at_such_an_offset_is_read() -> None:
    """A truncated log assigns an offset twice."""
    shard = Shard(0, ShardState(0))
    shard.apply_own_half(5, "a", half("a"))
    assert not shard.has_applied(5, b"b")
    shard.apply_own_half(6, "a", half("a"))
    assert not shard.has_applied(6, None)


def test_what_the_tail_never_passes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records behind the tail are not kept; if the tail is far behind, it reads the rest."""
    monkeypatch.setattr("halfway.coordinator.shards.shard._MAX_OWN", 3)
    shard = Shard(0, ShardState(0))
    for offset in range(4):
        shard.apply_own_half(offset, "a", half("a"))
    assert not shard.has_applied(3, b"a")
    assert shard.has_applied(2, b"a")
    shard.advance(5)
    shard.apply_own_half(4, "a", half("a"))
    assert not shard.has_applied(4, b"a")


def test_what_the_tail_read_before_it_was_applied_is_not_kept() -> None:
    shard = Shard(0, ShardState(0))
    assert not shard.has_applied(5, b"a")
    shard.apply_own_half(5, "a", half("a"))
    shard.forget_own(5)
    assert not shard.has_applied(5, b"a")


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


@given(offsets=st.permutations(range(1, 9)))
def test_every_end_is_counted_once_whenever_an_owner_dies(offsets: list[int]) -> None:
    """Also if Kafka transactions are answered in another order than that of their markers, within a horizon."""
    markers = [op(OpKind.COMMITTED, f"{ID}{number}") for number in range(9)]
    state = ShardState(0)
    state.apply_op(0, markers[0])
    found, now, stored = OutcomeWindow(state, HORIZON_S), 0.0, [EndCounts()]
    for offset in [*offsets, *[None] * 20]:
        for _ in range(7):
            now += 1
            assert found.start(now) <= found.ends.position, "the next owner reads all that it has to add"
            stored.append(found.ends.at(found.ends.position))
        if offset is not None:
            state.apply_op(offset, markers[offset])
    assert stored[-1].position == len(markers)
    for ends in stored:
        following = ShardState(0)
        following.ends = ends
        for offset, marker in enumerate(markers):
            following.apply_op(offset, marker)
        assert (following.ends.committed, following.ends.since) == ({"producer": len(markers)}, markers[0].at)


class Time:
    """The clock, advanced by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("halfway.coordinator.shards.shard_table.monotonic", lambda: self.now)


@pytest.fixture
async def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


async def test_ids_of_one_moment_share_a_shard(time: Time) -> None:
    rotation = ShardRotation()
    chosen = set()
    for _ in range(100):
        time.now += SLICE_S / 200
        chosen.add(rotation.choose(range(8)))
    assert len(chosen) <= 2


async def test_a_turn_is_bounded_in_ids(time: Time) -> None:
    """At any number of ids at one moment, no shard gets all of them."""
    rotation = ShardRotation()
    made = Counter(rotation.choose(range(4)) for _ in range(8 * SLICE_IDS))
    assert set(made.values()) == {2 * SLICE_IDS}
    assert time.now == 1000.0


@pytest.mark.parametrize("rate", [50, 1_000, 20_000])
@pytest.mark.parametrize("shards", [4, 8])
async def test_over_seconds_every_shard_has_its_share(time: Time, rate: int, shards: int) -> None:
    rotation = ShardRotation()
    made: Counter[int] = Counter()
    for _ in range(4 * rate):
        time.now += 1 / rate
        made[rotation.choose(range(shards))] += 1
    even = 4 * rate / shards
    assert max(made.values()) <= 1.25 * even
    assert min(made[shard] for shard in range(shards)) >= 0.75 * even


async def test_bursts_are_spread_too(time: Time) -> None:
    """A load in step with the turns, such as a job every few hundred milliseconds, still moves to the next shard."""
    rotation = ShardRotation()
    made: Counter[int] = Counter()
    for _ in range(40):
        time.now += 4 * SLICE_S
        for _ in range(100):
            made[rotation.choose(range(4))] += 1
    assert set(made.values()) == {1000}
