"""The memory of a shard for ended transactions and unknown ids, and when it forgets them."""

from halfway.protocol.ids import IdMaker
from halfway.protocol.records import OpKind
from halfway.protocol.shard import ShardState
from tests.support.domain.histories import half_of
from tests.support.domain.shard_records import ID, A, op, parked_of
from tests.support.domain.states import state_of


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
