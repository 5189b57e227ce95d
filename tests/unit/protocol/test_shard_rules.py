"""Single rules of the fold and of forgetting, and counter-examples that random histories have found."""

from itertools import permutations

import msgspec
import pytest

from halfway.protocol.entries import Ended, Pending, short_key_hash
from halfway.protocol.ids import IdMaker
from halfway.protocol.records import FOREIGN, MessageDigest, OpKind
from halfway.protocol.shard import ShardState
from halfway.protocol.transactions import State
from tests.support.domain.histories import half_of
from tests.support.domain.shard_records import A_LATER, ID, LANE_A, A, B, op, parked_of
from tests.support.domain.states import state_of


def pending(state: ShardState, transaction_id: str = ID) -> Pending:
    entry = state.find(transaction_id)
    assert isinstance(entry, Pending)
    return entry


class TestForeignRecords:
    """A record in half under an id that halfway did not write."""

    def test_over_an_unknown_id_it_is_nothing(self, state: ShardState) -> None:
        state.complete_fold()
        state.apply_half(3, ID, FOREIGN)
        assert (state.find(ID), state.strays()) == (None, [])

    def test_over_an_id_that_nothing_tells_of_it_is_nothing_once_all_is_read(self, state: ShardState) -> None:
        state.apply_half(3, ID, FOREIGN)
        state.complete_fold()
        assert (state.find(ID), state.strays()) == (None, [])

    def test_what_it_stands_over_may_be_read_after_it(self, state: ShardState) -> None:
        """A recovery reads half and op concurrently: half may be ahead."""
        state.apply_half(3, ID, A)
        state.apply_half(4, ID, None)
        state.apply_half(5, ID, FOREIGN)
        state.apply_op(0, op(OpKind.COMMITTED, half_offset=3))
        state.complete_fold()
        assert (state_of(state, ID), state.strays()) == (State.COMMITTED, [(ID, 5)])

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
        assert (state_of(state, ID), state.strays()) == (State.COMMITTED, [(ID, 5)])
        state.apply_half(6, ID, None)
        assert state.strays() == []

    def test_over_a_parked_one_it_is_a_stray(self, state: ShardState) -> None:
        state.apply_parked(0, ID, parked_of(A))
        state.apply_half(5, ID, FOREIGN)
        assert (state_of(state, ID), state.strays()) == (State.PARKED, [(ID, 5)])


class TestLostTombstones:
    """Kafka has lost the end of half: a tombstone, but not the outcome that was written together with it."""

    @pytest.mark.parametrize("half_first", [True, False])
    def test_a_half_that_was_left_is_a_stray_until_its_tombstone(self, state: ShardState, *, half_first: bool) -> None:
        """Otherwise it would be pending again once the outcome has been deleted by age."""
        if half_first:
            state.apply_half(3, ID, A)
        state.apply_op(0, op(OpKind.COMMITTED, half_offset=3))
        if not half_first:
            state.apply_half(3, ID, A)
        assert state.strays() == [], "the tombstone may come"
        state.half_tail = 9
        state.complete_fold()
        assert (state_of(state, ID), state.strays(), state.half_cursor) == (State.COMMITTED, [(ID, 3)], 3)
        state.apply_half(10, ID, None)
        assert (state.strays(), state.half_cursor) == ([], 9)

    def test_one_whose_tombstone_was_read_is_none(self, state: ShardState) -> None:
        state.apply_half(3, ID, A)
        state.apply_op(0, op(OpKind.COMMITTED, half_offset=3))
        state.apply_half(4, ID, None)
        state.complete_fold()
        assert state.strays() == []


class TestPrepares:
    def test_a_repeat_moves_the_offset_and_keeps_the_first_time(self, state: ShardState) -> None:
        """Compaction keeps the later copy; the age counts from the first."""
        state.apply_half(3, ID, A)
        state.apply_half(7, ID, A_LATER)
        assert (pending(state).offset, pending(state).since, pending(state).prepared_at) == (7, 1_000, 1_000)
        assert state.strays() == []

    def test_a_repeat_that_is_read_before_the_first_keeps_the_first_time_too(self, state: ShardState) -> None:
        state.apply_half(7, ID, A_LATER)
        state.apply_half(3, ID, A)
        assert (pending(state).offset, pending(state).since) == (7, 1_000)

    def test_recovery_begins_at_the_first_content_where_other_content_stands_between_repeats(
        self, state: ShardState
    ) -> None:
        """A at 0, B at 1, A at 2: a recovery that starts at B would take B for the first content."""
        for offset, half in enumerate((A, B, A_LATER)):
            state.apply_half(offset, ID, half)
        state.half_tail = 3
        assert state.half_cursor == 0
        assert state.strays() == [(ID, 2)]

    def test_a_prepare_that_was_applied_before_what_the_lane_wrote_ahead_of_it_is_a_stray(
        self, state: ShardState
    ) -> None:
        state.apply_half(7, ID, B)
        state.apply_half(5, ID, LANE_A)
        assert (pending(state).offset, pending(state).fingerprint) == (5, A.fingerprint)
        assert state.strays() == [(ID, 7)]


class TestPreparesOfTwoOwners:
    """A prepare of a former owner may arrive late, just before the one that the owner acknowledges."""

    @pytest.mark.parametrize("places", [(10, 11), (11, 10)], ids=["late one first", "late one last"])
    @pytest.mark.parametrize("acknowledged_first", [True, False])
    def test_the_later_owners_content_counts_in_whatever_order(
        self, state: ShardState, places: tuple[int, int], *, acknowledged_first: bool
    ) -> None:
        """The owner applies its acknowledgement, then what the tail reads; a fold takes the order of the log."""
        late, own = places
        records = [(late, msgspec.structs.replace(A, barrier=3)), (own, msgspec.structs.replace(B, barrier=7))]
        for offset, half in reversed(records) if acknowledged_first else records:
            state.apply_half(offset, ID, half)
        assert (pending(state).fingerprint, pending(state).offset) == (B.fingerprint, own)
        assert state.strays() == ([(ID, late)] if late > own else [])

    def test_any_owner_counts_more_than_a_record_that_names_none(self, state: ShardState) -> None:
        state.apply_half(10, ID, A)
        state.apply_half(11, ID, msgspec.structs.replace(B, barrier=0))
        assert pending(state).fingerprint == B.fingerprint

    def test_a_later_copy_of_a_former_owner_is_a_stray(self, state: ShardState) -> None:
        """A recovery that starts at it would not know that the later owner has acknowledged this content."""
        state.apply_half(10, ID, msgspec.structs.replace(A, barrier=7))
        state.apply_half(11, ID, msgspec.structs.replace(A_LATER, barrier=3))
        assert (pending(state).offset, state.strays()) == (10, [(ID, 11)])


class TestOutcomes:
    def test_the_first_outcome_stands(self, state: ShardState) -> None:
        state.apply_op(0, op(OpKind.COMMITTED))
        state.apply_op(1, op(OpKind.ROLLED_BACK))
        assert state_of(state, ID) is State.COMMITTED

    def test_a_prepare_that_the_tombstone_already_covers_is_no_stray(self, state: ShardState) -> None:
        """The prepare of a paused owner at 1, which this owner's tail reads only after its own tombstone at 2."""
        state.apply_half(0, ID, A)
        state.apply_op(0, op(OpKind.COMMITTED))
        state.apply_half(2, ID, None)
        state.apply_half(1, ID, A)
        assert state_of(state, ID) is State.COMMITTED
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
        assert list(entry.index) == index == [("orders", short_key_hash(ID.encode()))]


class TestParking:
    def test_what_stood_before_a_park_or_a_resume_may_be_read_again(self, state: ShardState) -> None:
        """Apply each record up to the second park again: it stays parked, and nothing else changes."""
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
        assert state_of(state, ID) is State.PREPARED


class TestCounts:
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
        state.half_tail = 2
        assert (state.half_cursor, state.op_cursor) == (2, 1)

    def test_an_op_that_repeats_what_an_op_before_it_said_still_holds_the_op_cursor(self, state: ShardState) -> None:
        """A commit verdict is recorded twice after a re-anchor: a recovery must find one of the two."""
        said = msgspec.structs.replace(op(OpKind.VERDICT), commit_verdict=True)
        state.apply_half(0, ID, LANE_A)
        state.apply_op(3, said)
        state.apply_op(4, said)
        state.apply_op(9, op(OpKind.COMMITTED, "other"))
        assert state.op_cursor == 4
        state.apply_half(5, ID, msgspec.structs.replace(LANE_A, commit_verdict=True))
        assert state.op_cursor == 10

    def test_reading_backwards_moves_no_tail_back(self, state: ShardState) -> None:
        state.apply_op(6, op(OpKind.COMMITTED))
        state.apply_op(2, op(OpKind.COMMITTED, "other"))
        assert state.op_tail == 7


@pytest.mark.parametrize("parked", [False, True])
def test_an_outcome_counts_also_if_it_stands_before_an_earlier_marker(*, parked: bool) -> None:
    """Op was deleted and created again between the two, and the owner has not noticed it yet."""
    state = ShardState(0)
    state.apply_half(1, ID, A)
    state.apply_op(545, op(OpKind.CHECKED, checks=1))
    if parked:
        state.apply_end(546, op(OpKind.PARKED), 2)
        state.apply_parked(1, ID, parked_of(A))
        state.apply_op(22, op(OpKind.COMMITTED))
        state.apply_parked(2, ID, None)
    else:
        state.apply_end(22, op(OpKind.COMMITTED), 2)
    ended = state.find(ID)
    assert isinstance(ended, Ended)
    assert ended.state is State.COMMITTED


def test_a_commit_that_was_said_counts_also_if_it_stands_before_an_earlier_marker() -> None:
    """Op was deleted and created again between the two: policy must not go against the commit meanwhile."""
    state = ShardState(0)
    state.apply_half(1, ID, A)
    state.apply_op(545, op(OpKind.CHECKED, checks=1))
    state.apply_op(22, msgspec.structs.replace(op(OpKind.VERDICT, checks=1), commit_verdict=True))
    assert (pending(state).commit_verdict, pending(state).checks) == (True, 1)


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


class TestForgetting:
    def ended(self, state: ShardState, transaction_id: str, offset: int, *, at: int) -> None:
        state.apply_op(offset, op(OpKind.COMMITTED, transaction_id, half_offset=offset, at=at))
        state.apply_half(100 + offset, transaction_id, None)

    def test_only_what_ended_before_the_time_goes(self, state: ShardState) -> None:
        for number in range(4):
            self.ended(state, f"t{number}", number, at=1_000 * number)
        state.half_tail = 200
        assert state.forget(2_000) == 2
        assert [entry.id for entry in state.ended()] == ["t2", "t3"]
        assert state_of(state, "t0") is None

    def test_not_before_the_tail_has_passed_the_tombstone(self, state: ShardState) -> None:
        """A prepare in between would be taken for a new transaction."""
        self.ended(state, ID, 0, at=0)
        state.half_tail = 100
        assert state.forget(10_000) == 0
        state.half_tail = 101
        assert state.forget(10_000) == 1

    def test_not_while_a_stray_of_it_is_uncorrected(self, state: ShardState) -> None:
        self.ended(state, ID, 0, at=0)
        state.apply_half(150, ID, A)
        state.half_tail = 200
        assert state.forget(10_000) == 0
        state.apply_half(160, ID, None)
        assert state.forget(10_000) == 1

    def test_where_too_many_are_remembered_the_oldest_go_whatever_their_age(self, state: ShardState) -> None:
        for number in range(5):
            self.ended(state, f"t{number}", number, at=1_000 * number)
        state.half_tail = 200
        assert state.forget(0, at_most=3) == 2
        assert [entry.id for entry in state.ended()] == ["t2", "t3", "t4"]

    def test_an_end_by_a_clock_that_was_set_back_is_remembered_until_its_id_is_old(self, state: ShardState) -> None:
        """Forgotten by the time of the end alone, the young id would be prepared, and decided, a second time."""
        own = IdMaker(1).make(3_600_000, 0)
        self.ended(state, own, 0, at=1_000)
        state.half_tail = 200
        assert state.forget(3_600_000) == 0
        assert state.forget(3_600_001) == 1
        assert state.complete_from == 3_600_001

    def test_a_surplus_of_young_ids_goes_and_bounds_which_ids_are_new(self, state: ShardState) -> None:
        """Only as far as clocks may differ: one that was hours ahead must not refuse new ids for hours."""
        for number, born in enumerate((1_500, 3_600_000)):
            self.ended(state, IdMaker(1).make(born, 0), number, at=1_000)
        state.half_tail = 200
        assert state.forget(0, at_most=1) == 1
        assert state.complete_from == 1_501
        assert state.forget(0, at_most=0) == 1
        assert state.complete_from == 121_001

    def test_no_more_than_asked_for_go_at_once(self, state: ShardState) -> None:
        for number in range(5):
            self.ended(state, f"t{number}", number, at=1_000 * number)
        state.half_tail = 200
        assert [state.forget(10_000, limit=2) for _ in range(4)] == [2, 2, 1, 0]

    def test_an_outcome_whose_tombstone_lies_before_the_cursor_is_forgotten_in_its_time(
        self, state: ShardState
    ) -> None:
        """A recovery reads op from an earlier time than half, so it never reads such a tombstone."""
        state.apply_op(0, op(OpKind.COMMITTED))
        state.half_tail = 500
        assert state.forget(10_000) == 0
        state.complete_fold()
        assert state.forget(4_000) == 0
        assert state.forget(10_000) == 1

    def test_the_end_of_a_transaction_that_was_parked_before_the_restart_is_forgotten_in_its_time(
        self, state: ShardState
    ) -> None:
        state.apply_parked(0, ID, parked_of(A))
        state.half_tail = 500
        state.complete_fold()
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
        state.half_tail = 3_000
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
        state.complete_fold()
        kept = [table for name, table in vars(state).items() if isinstance(table, dict) and name != "group_counts"]
        assert {key for table in kept for key in table} == {ID}
