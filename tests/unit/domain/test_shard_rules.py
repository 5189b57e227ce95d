"""Single rules of the fold, and counter-examples that random histories once found."""

import gc
import sys
import tracemalloc
from types import FunctionType, ModuleType
from typing import TypeVar
from uuid import UUID

import msgspec
import pytest

from halfway.domain.ids import server_id
from halfway.domain.records import FOREIGN, Half, Message, MessageDigest, Op, OpKind, Origin, Parked, fingerprint
from halfway.domain.shard import Ended, Pending, ShardState, key_index
from halfway.domain.transaction import Cause, State
from tests.unit.domain.histories import half_of

ID = "order-1"
A = half_of(ID, "A", 1_000)
A_LATER = half_of(ID, "A", 2_000)
B = half_of(ID, "B", 3_000)
LANE_A = msgspec.structs.replace(A, origin=Origin.LANE)


def op(kind: OpKind, transaction_id: str = ID, *, half_offset: int = 0, at: int = 5_000, checks: int = 0) -> Op:
    return Op(
        kind=kind,
        id=transaction_id,
        group="shop",
        half_offset=half_offset,
        cause=Cause.PRODUCER,
        prepared_at=1_000,
        at=at,
        checks=checks,
        checked_at=at if checks else None,
    )


def parked_of(half: Half) -> Parked:
    return Parked(
        half=msgspec.structs.replace(half, origin=Origin.LANE), reason="no verdict", parked_at=4_000, checks=15
    )


def pending(state: ShardState, transaction_id: str = ID) -> Pending:
    entry = state.find(transaction_id)
    assert isinstance(entry, Pending)
    return entry


@pytest.fixture
def state() -> ShardState:
    return ShardState(0)


class TestForeignRecords:
    """Something that halfway did not write stands in half under an id."""

    def test_over_an_unknown_id_it_is_nothing(self, state: ShardState) -> None:
        state.settle()
        state.apply_half(3, ID, FOREIGN)
        assert (state.find(ID), state.strays()) == (None, [])

    def test_over_an_id_that_nothing_tells_of_it_is_nothing_once_all_is_read(self, state: ShardState) -> None:
        state.apply_half(3, ID, FOREIGN)
        state.settle()
        assert (state.find(ID), state.strays()) == (None, [])

    def test_what_it_stands_over_may_be_read_after_it(self, state: ShardState) -> None:
        """A recovery reads half and op side by side: half may be ahead."""
        state.apply_half(3, ID, A)
        state.apply_half(4, ID, None)
        state.apply_half(5, ID, FOREIGN)
        state.apply_op(0, op(OpKind.COMMITTED, half_offset=3))
        state.settle()
        assert (state.state_of(ID), state.strays()) == (State.COMMITTED, [(ID, 5)])

    def test_before_a_prepare_it_is_nothing(self, state: ShardState) -> None:
        state.apply_half(3, ID, FOREIGN)
        state.apply_half(5, ID, A)
        assert (pending(state).offset, state.strays()) == (5, [])

    def test_over_a_pending_one_it_is_a_stray_until_the_lane_writes_again(self, state: ShardState) -> None:
        state.apply_half(3, ID, A)
        state.apply_half(5, ID, FOREIGN)
        assert (pending(state).offset, state.strays(), state.half_cursor) == (3, [(ID, 5)], 0)
        state.apply_half(7, ID, LANE_A)
        assert (pending(state).offset, state.strays()) == (7, [])
        state.apply_half(5, ID, FOREIGN)
        assert state.strays() == [], "the lane's record stands after it"

    def test_over_one_that_has_ended_it_is_a_stray_until_its_tombstone(self, state: ShardState) -> None:
        state.apply_half(3, ID, A)
        state.apply_op(0, op(OpKind.COMMITTED, half_offset=3))
        state.apply_half(4, ID, None)
        state.apply_half(5, ID, FOREIGN)
        assert (state.state_of(ID), state.strays()) == (State.COMMITTED, [(ID, 5)])
        state.apply_half(6, ID, None)
        assert state.strays() == []

    def test_over_a_parked_one_it_is_a_stray(self, state: ShardState) -> None:
        state.apply_parked(0, ID, parked_of(A))
        state.apply_half(5, ID, FOREIGN)
        assert (state.state_of(ID), state.strays()) == (State.PARKED, [(ID, 5)])


class TestPrepares:
    def test_an_unknown_id_is_nothing(self, state: ShardState) -> None:
        assert state.find(ID) is None
        assert state.state_of(ID) is None
        assert state.oldest() is None

    def test_a_repeat_moves_the_offset_and_keeps_the_first_time(self, state: ShardState) -> None:
        """The later copy is the one that compaction keeps; the age counts from the first."""
        state.apply_half(3, ID, A)
        state.apply_half(7, ID, A_LATER)
        assert (pending(state).offset, pending(state).since, pending(state).prepared_at) == (7, 1_000, 1_000)
        assert state.strays() == []

    def test_a_repeat_that_is_read_before_the_first_keeps_the_first_time_too(self, state: ShardState) -> None:
        state.apply_half(7, ID, A_LATER)
        state.apply_half(3, ID, A)
        assert (pending(state).offset, pending(state).since) == (7, 1_000)

    def test_the_first_content_wins_and_the_other_is_a_stray_until_the_lane_writes_again(
        self, state: ShardState
    ) -> None:
        state.apply_half(0, ID, A)
        state.apply_half(1, ID, B)
        assert pending(state).fingerprint == A.fingerprint
        assert state.strays() == [(ID, 1)]
        state.apply_half(2, ID, LANE_A)
        assert pending(state).fingerprint == A.fingerprint
        assert state.strays() == []

    def test_recovery_begins_at_the_first_content_where_other_content_stands_between_repeats(
        self, state: ShardState
    ) -> None:
        """A at 0, B at 1, A at 2: a recovery that began at B would take B for the first content."""
        for offset, half in enumerate((A, B, A_LATER)):
            state.apply_half(offset, ID, half)
        state.advance_tail(3)
        assert state.half_cursor == 0
        assert state.strays() == [(ID, 2)]

    def test_a_repeat_of_what_the_lane_wrote_again_is_a_stray(self, state: ShardState) -> None:
        """The last record of the id must carry the count of checks, and a first prepare carries none."""
        state.apply_half(4, ID, msgspec.structs.replace(LANE_A, checks=3))
        state.apply_half(5, ID, A)
        assert (pending(state).offset, pending(state).checks) == (4, 3)
        assert state.strays() == [(ID, 5)]

    def test_a_prepare_that_was_applied_before_what_the_lane_wrote_ahead_of_it_is_a_stray(
        self, state: ShardState
    ) -> None:
        state.apply_half(7, ID, B)
        state.apply_half(5, ID, LANE_A)
        assert (pending(state).offset, pending(state).fingerprint) == (5, A.fingerprint)
        assert state.strays() == [(ID, 7)]


class TestOutcomes:
    @pytest.mark.parametrize(
        "kind, outcome", [(OpKind.COMMITTED, State.COMMITTED), (OpKind.ROLLED_BACK, State.ROLLED_BACK)]
    )
    def test_a_final_op_ends(self, state: ShardState, kind: OpKind, outcome: State) -> None:
        state.apply_half(0, ID, A)
        state.apply_op(0, op(kind))
        assert state.state_of(ID) is outcome
        assert list(state.pending()) == []

    def test_the_first_outcome_stands(self, state: ShardState) -> None:
        state.apply_op(0, op(OpKind.COMMITTED))
        state.apply_op(1, op(OpKind.ROLLED_BACK))
        assert state.state_of(ID) is State.COMMITTED

    def test_a_late_prepare_does_not_bring_it_back_and_is_buried(self, state: ShardState) -> None:
        state.apply_half(0, ID, A)
        state.apply_op(0, op(OpKind.ROLLED_BACK))
        state.apply_half(1, ID, None)
        state.apply_half(2, ID, A)
        assert state.state_of(ID) is State.ROLLED_BACK
        assert state.strays() == [(ID, 2)]
        state.apply_half(3, ID, None)
        assert state.strays() == []

    def test_a_prepare_that_the_tombstone_already_covers_is_no_stray(self, state: ShardState) -> None:
        """A paused owner's prepare at 1, which this owner's tail reads only after its own tombstone at 2."""
        state.apply_half(0, ID, A)
        state.apply_op(0, op(OpKind.COMMITTED))
        state.apply_half(2, ID, None)
        state.apply_half(1, ID, A)
        assert state.state_of(ID) is State.COMMITTED
        assert state.strays() == []

    def test_a_note_after_an_outcome_changes_nothing(self, state: ShardState) -> None:
        state.apply_op(0, op(OpKind.COMMITTED))
        state.apply_op(1, op(OpKind.CHECKED, checks=9))
        entry = state.find(ID)
        assert isinstance(entry, Ended)
        assert entry.checks == 0

    def test_lists_find_an_outcome_by_the_same_key_as_the_half(self, state: ShardState) -> None:
        state.apply_half(0, ID, A)
        index = list(pending(state).index)
        final = msgspec.structs.replace(
            op(OpKind.COMMITTED), messages=tuple(MessageDigest.of(message) for message in A.messages)
        )
        state.apply_op(0, final)
        entry = state.find(ID)
        assert isinstance(entry, Ended)
        assert list(entry.index) == index == [("orders", key_index(ID.encode()))]


class TestParking:
    def test_park_and_resume(self, state: ShardState) -> None:
        state.apply_half(0, ID, A)
        state.apply_op(0, op(OpKind.CHECKED, checks=15))
        state.apply_half(1, ID, None)
        state.apply_op(1, op(OpKind.PARKED, checks=15))
        state.apply_parked(0, ID, parked_of(A))
        assert state.state_of(ID) is State.PARKED
        again = msgspec.structs.replace(LANE_A, since=9_000)
        state.apply_half(2, ID, again)
        state.apply_op(2, op(OpKind.RESUMED, at=9_000))
        state.apply_parked(1, ID, None)
        assert state.state_of(ID) is State.PREPARED
        assert (pending(state).checks, pending(state).attempts, pending(state).since) == (0, 0, 9_000)

    def test_a_late_prepare_of_a_parked_id_is_a_stray(self, state: ShardState) -> None:
        state.apply_parked(0, ID, parked_of(A))
        state.apply_half(2, ID, A)
        assert state.state_of(ID) is State.PARKED
        assert state.strays() == [(ID, 2)]
        state.apply_half(3, ID, None)
        assert state.strays() == []

    def test_it_makes_no_difference_that_the_late_prepare_is_read_before_the_parked_record(
        self, state: ShardState
    ) -> None:
        state.apply_half(2, ID, A)
        state.apply_parked(0, ID, parked_of(A))
        assert state.state_of(ID) is State.PARKED
        assert state.strays() == [(ID, 2)]
        assert state.counts == (0, 1, 0)

    def test_the_end_of_a_parked_one(self, state: ShardState) -> None:
        state.apply_parked(0, ID, parked_of(A))
        state.apply_op(0, op(OpKind.COMMITTED, half_offset=-1))
        state.apply_parked(1, ID, None)
        assert state.state_of(ID) is State.COMMITTED
        assert state.counts == (0, 0, 1)
        assert state.group_counts == {}

    def test_what_stood_before_a_park_or_a_resume_may_be_read_again(self, state: ShardState) -> None:
        """Each record of the way to the second park, once more: parked it stays, and nothing else."""
        halves = [(0, A), (1, None), (2, LANE_A), (3, None)]
        parks = [(0, parked_of(A)), (1, None), (2, parked_of(A))]
        for offset, half in halves:
            state.apply_half(offset, ID, half)
        for offset, parked in parks:
            state.apply_parked(offset, ID, parked)
        for offset, half in halves:
            state.apply_half(offset, ID, half)
            assert (state.counts, state.strays()) == ((0, 1, 0), [])
        for offset, parked in parks:
            state.apply_parked(offset, ID, parked)
            assert (state.counts, state.strays()) == ((0, 1, 0), [])

    def test_an_old_park_that_is_read_again_after_the_resume_does_not_park(self, state: ShardState) -> None:
        state.apply_parked(0, ID, parked_of(A))
        state.apply_half(1, ID, None)
        state.apply_half(2, ID, LANE_A)
        state.apply_parked(1, ID, None)
        state.apply_parked(0, ID, parked_of(A))
        state.apply_half(1, ID, None)
        assert state.state_of(ID) is State.PREPARED


class TestCounts:
    def test_a_note_read_before_its_half_is_not_lost(self, state: ShardState) -> None:
        state.apply_op(0, op(OpKind.CHECKED, checks=4, at=7_000))
        state.apply_half(0, ID, A)
        assert (pending(state).checks, pending(state).checked_at, pending(state).op_offset) == (4, 7_000, 0)

    def test_a_verdict_to_commit_is_never_unsaid(self, state: ShardState) -> None:
        state.apply_half(0, ID, A)
        state.apply_op(0, msgspec.structs.replace(op(OpKind.VERDICT), commit_verdict=True))
        state.apply_op(1, op(OpKind.CHECKED, checks=1))
        assert pending(state).commit_verdict

    def test_attempts_that_sent_nothing_survive_a_re_anchor(self, state: ShardState) -> None:
        state.apply_half(0, ID, A)
        pending(state).attempts = 5
        pending(state).last_error = "connection refused"
        state.apply_half(9, ID, LANE_A)
        assert (pending(state).attempts, pending(state).last_error, pending(state).offset) == (
            5,
            "connection refused",
            9,
        )


class TestCursors:
    def test_with_nothing_pending_they_stand_at_the_tails(self, state: ShardState) -> None:
        state.apply_half(0, ID, A)
        state.apply_op(0, op(OpKind.COMMITTED))
        state.apply_half(1, ID, None)
        state.advance_tail(2)
        assert (state.half_cursor, state.op_cursor) == (2, 1)

    def test_the_half_cursor_does_not_pass_the_tail_for_own_writes(self, state: ShardState) -> None:
        """A paused former owner's prepare may stand between what the tail has read and an own write."""
        state.advance_tail(5)
        state.apply_half(9, ID, A)
        assert state.half_cursor == 5
        state.advance_tail(10)
        assert state.half_cursor == 9

    def test_a_stray_holds_the_half_cursor(self, state: ShardState) -> None:
        state.apply_op(0, op(OpKind.COMMITTED))
        state.apply_half(4, ID, A)
        state.advance_tail(8)
        assert state.half_cursor == 4

    def test_checks_hold_the_op_cursor_until_a_re_anchor_carries_them(self, state: ShardState) -> None:
        state.apply_half(0, ID, A)
        state.apply_op(3, op(OpKind.CHECKED, checks=2))
        state.apply_op(6, op(OpKind.COMMITTED, "other"))
        assert state.op_cursor == 3
        state.apply_half(1, ID, msgspec.structs.replace(LANE_A, checks=2, checked_at=5_000))
        assert state.op_cursor == 7

    def test_an_op_that_repeats_what_an_op_before_it_said_still_holds_the_op_cursor(self, state: ShardState) -> None:
        """A verdict to commit, recorded twice after a re-anchor: recovery must find one of the two."""
        said = msgspec.structs.replace(op(OpKind.VERDICT), commit_verdict=True)
        state.apply_half(0, ID, LANE_A)
        state.apply_op(3, said)
        state.apply_op(4, said)
        state.apply_op(9, op(OpKind.COMMITTED, "other"))
        assert state.op_cursor == 4
        state.apply_half(5, ID, msgspec.structs.replace(LANE_A, commit_verdict=True))
        assert state.op_cursor == 10

    def test_reading_backwards_moves_no_tail_back(self, state: ShardState) -> None:
        state.advance_tail(8)
        state.advance_tail(3)
        state.apply_op(6, op(OpKind.COMMITTED))
        state.apply_op(2, op(OpKind.COMMITTED, "other"))
        assert (state.half_tail, state.op_tail) == (8, 7)


class TestForgetting:
    def ended(self, state: ShardState, transaction_id: str, offset: int, *, at: int) -> None:
        state.apply_op(offset, op(OpKind.COMMITTED, transaction_id, half_offset=offset, at=at))
        state.apply_half(100 + offset, transaction_id, None)

    def test_only_what_ended_before_the_time_goes(self, state: ShardState) -> None:
        for number in range(4):
            self.ended(state, f"t{number}", number, at=1_000 * number)
        state.advance_tail(200)
        assert state.forget(2_000) == 2
        assert [entry.id for entry in state.ended()] == ["t2", "t3"]
        assert state.state_of("t0") is None

    def test_not_before_the_tail_has_passed_the_tombstone(self, state: ShardState) -> None:
        """A prepare that still stands between would be taken for a new transaction."""
        self.ended(state, ID, 0, at=0)
        state.advance_tail(100)
        assert state.forget(10_000) == 0
        state.advance_tail(101)
        assert state.forget(10_000) == 1

    def test_not_while_a_stray_of_it_is_uncorrected(self, state: ShardState) -> None:
        self.ended(state, ID, 0, at=0)
        state.apply_half(150, ID, A)
        state.advance_tail(200)
        assert state.forget(10_000) == 0
        state.apply_half(160, ID, None)
        assert state.forget(10_000) == 1

    def test_where_too_many_are_remembered_the_oldest_go_whatever_their_age(self, state: ShardState) -> None:
        for number in range(5):
            self.ended(state, f"t{number}", number, at=1_000 * number)
        state.advance_tail(200)
        assert state.forget(0, at_most=3) == 2
        assert [entry.id for entry in state.ended()] == ["t2", "t3", "t4"]

    def test_no_more_than_asked_for_go_at_once(self, state: ShardState) -> None:
        for number in range(5):
            self.ended(state, f"t{number}", number, at=1_000 * number)
        state.advance_tail(200)
        assert [state.forget(10_000, limit=2) for _ in range(4)] == [2, 2, 1, 0]

    def test_an_outcome_whose_tombstone_lies_before_the_cursor_is_forgotten_in_its_time(
        self, state: ShardState
    ) -> None:
        """Recovery reads op further back than half: such a tombstone is never read."""
        state.apply_op(0, op(OpKind.COMMITTED))
        state.advance_tail(500)
        assert state.forget(10_000) == 0
        state.settle()
        assert state.forget(4_000) == 0
        assert state.forget(10_000) == 1

    def test_the_end_of_a_transaction_that_was_parked_before_the_restart_is_forgotten_in_its_time(
        self, state: ShardState
    ) -> None:
        state.apply_parked(0, ID, parked_of(A))
        state.advance_tail(500)
        state.settle()
        state.apply_op(0, op(OpKind.COMMITTED, half_offset=-1))
        state.apply_parked(1, ID, None)
        assert state.forget(10_000) == 1

    def test_nothing_of_a_forgotten_transaction_is_kept(self, state: ShardState) -> None:
        for number in range(300):
            transaction_id = f"t{number}"
            state.apply_half(10 * number, transaction_id, half_of(transaction_id, "A", 0))
            state.apply_op(4 * number, op(OpKind.CHECKED, transaction_id, checks=1))
            state.apply_half(10 * number + 1, transaction_id, None)
            state.apply_op(4 * number + 1, op(OpKind.PARKED, transaction_id, checks=1))
            state.apply_parked(2 * number, transaction_id, parked_of(half_of(transaction_id, "A", 0)))
            state.apply_op(4 * number + 2, op(OpKind.COMMITTED, transaction_id, half_offset=-1))
            state.apply_parked(2 * number + 1, transaction_id, None)
        state.advance_tail(3_000)
        assert state.forget(10_000) == 300
        left = {name: len(table) for name, table in vars(state).items() if hasattr(table, "__len__")}
        assert not any(left.values()), left


class TestSettling:
    def test_tables_of_unknown_ids_are_emptied(self, state: ShardState) -> None:
        state.apply_half(0, ID, A)
        for number in range(50):
            state.apply_half(number + 1, f"t{number}", None)
            state.apply_op(number, op(OpKind.CHECKED, f"t{number}"))
            state.apply_parked(number, f"t{number}", None)
        state.settle()
        kept = [table for name, table in vars(state).items() if isinstance(table, dict) and name != "group_counts"]
        assert {key for table in kept for key in table} == {ID}


T = TypeVar("T")


def decoded(record: T, kind: type[T]) -> T:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=kind)


FIRST_UUID = 0x0199A0000000_7000_8000_000000000000


def typical_half(number: int) -> Half:
    messages = tuple(
        Message(topic=topic, key=f"order-{number}".encode(), value=b"x" * 300, headers=(("trace", b"t" * 32),))
        for topic in ("coupon", "shipping", "points")
    )
    made = server_id(3, UUID(int=FIRST_UUID + number))
    return Half(
        id=made,
        group="orders",
        messages=messages,
        prepared_at=1_760_000_000_000 + number,
        since=1_760_000_000_000 + number,
        fingerprint=fingerprint("orders", messages, None),
    )


def ended_of(half: Half) -> Op:
    return msgspec.structs.replace(
        op(OpKind.COMMITTED, half.id, at=half.prepared_at + 250),
        group=half.group,
        prepared_at=half.prepared_at,
        messages=tuple(MessageDigest.of(message) for message in half.messages),
    )


def test_a_pending_transaction_costs_at_most_1_kib_beside_its_payload(state: ShardState) -> None:
    """Three messages, a check in the op, over 10,000 transactions."""
    count, half = 10_000, None
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(count):
            # Nothing is shared between records: each came off the wire by itself.
            half = decoded(typical_half(number), Half)
            state.apply_half(number, half.id, half)
            state.apply_op(number, decoded(op(OpKind.CHECKED, half.id, checks=1, at=1_760_000_009_999), Op))
        half = None
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert state.counts == (count, 0, 0)
    assert (after - before) / count <= 1024


def bytes_of(root: object) -> int:
    """Add up everything that is reachable from an object, but for code."""
    seen: dict[int, object] = {}
    found = [root]
    while found:
        one = found.pop()
        if id(one) not in seen and not isinstance(one, type | ModuleType | FunctionType):
            seen[id(one)] = one
            found += gc.get_referents(one)
    return sum(sys.getsizeof(one) for one in seen.values())


@pytest.mark.parametrize("name", [None, "order-{:012}"], ids=["an id of the server", "an id of the client"])
def test_an_outcome_costs_at_most_150_bytes(name: str | None) -> None:
    """Three messages with one key, over 100,000 transactions; forgotten, they cost next to nothing."""
    count, state, half = 100_000, ShardState(3), typical_half(0)
    end = ended_of(half)
    for number in range(count):
        made = server_id(3, UUID(int=FIRST_UUID + number)) if name is None else name.format(number)
        content = number.to_bytes(16, "big")
        state.apply_op(number, msgspec.structs.replace(end, id=made, half_offset=2 * number, fingerprint=content))
        state.apply_half(2 * number + 1, made, None)
    assert state.counts == (0, 0, count)
    assert bytes_of(state) / count <= 150
    state.advance_tail(2 * count)
    assert state.forget(2_000_000_000_000) == count
    assert bytes_of(state) / count <= 30
