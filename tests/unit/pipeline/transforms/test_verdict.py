"""The rules of *verdict* on small histories, one rule a test."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.engines.engine import Engine, SparkEngine
from halfway.protocol.ids import partition_for_key
from tests.support.pipeline import scenarios
from tests.support.pipeline.scenarios import (
    EVERYTHING_STANDS,
    HORIZON,
    HOUR,
    NOW,
    SERVER_MADE,
    SLACK,
    Build,
    Facts,
    History,
    Scenario,
    judge,
    verdicts_of,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCENARIOS: dict[str, Scenario] = {}
OLD = Facts(
    provable_since=NOW - 5 * HOUR,
    op_whole_since=tuple((shard, NOW - (20 if shard == 3 else 5) * HOUR) for shard in range(5)),
)
"""Messages and ops have been deleted by age."""
YOUNG = Facts(
    provable_since=NOW,
    kept_since=NOW - 5 * HOUR,
    own_since=((0, NOW), (1, 0)),
    op_whole_since=((0, NOW), (1, 0)),
    op_kept_since=NOW - 5 * HOUR,
)
"""Nothing is left in partition 0 of the topic and of op, whose records are kept for five hours."""
CLEANED = Facts(
    op_whole_since=((0, NOW - HOUR - HORIZON + 1),), last_of_keys=((1, NOW - HOUR - 5), (2, NOW - 2 * HOUR), (3, None))
)
"""Messages have been replaced, and ops deleted by age, in the last hour."""


def scenario(expected: list[tuple[str, str]], *, facts: Facts = EVERYTHING_STANDS) -> Callable[[Build], Build]:
    return scenarios.scenario(SCENARIOS, expected, facts=facts)


@scenario(
    [
        ("a-committed", "committed_ok"),
        ("b-rolled-back", "rolled_back_ok"),
        ("c-pending", "pending"),
        ("d-parked", "parked"),
        ("f-resumed", "pending"),
    ]
)
def each_way_to_end_well_or_not_at_all_has_its_verdict(history: History) -> None:
    """One verdict for every transaction."""
    history.half("a-committed", alive=False)
    history.op("a-committed", "committed", [1, 2])
    history.message("a-committed", 1, 1)
    history.message("a-committed", 2, 2)
    history.op("b-rolled-back", "rolled_back")
    history.half("c-pending")
    history.half("d-parked", alive=False)
    history.park("d-parked")
    history.park("f-resumed")
    history.park("f-resumed", alive=False)
    history.half("f-resumed")


@scenario(
    [
        ("a-lost", "lost"),
        ("b-torn", "torn"),
        ("c-doubled", "doubled"),
        ("d-leaked-rolled-back", "leaked"),
        ("e-leaked-pending", "leaked"),
        ("f-leaked-unheard-of", "leaked"),
        ("g-contradicted", "contradicted"),
        ("h-changed", "payload_changed"),
        ("i-not-named", "leaked"),
        ("j-gone", "lost"),
    ]
)
def each_anomaly_has_its_verdict(history: History) -> None:
    """The six ways in which a transaction can go wrong have different verdicts."""
    history.op("a-lost", "committed", [1, 2])
    history.op("b-torn", "committed", [1, 2])
    history.message("b-torn", 2, 2)
    history.op("c-doubled", "committed", [1])
    history.message("c-doubled", 1, 1)
    history.message("c-doubled", 1, 1)
    history.op("d-leaked-rolled-back", "rolled_back")
    history.message("d-leaked-rolled-back", 1, 1)
    history.half("e-leaked-pending")
    history.message("e-leaked-pending", 1, 1)
    history.message("f-leaked-unheard-of", 1, None)
    history.op("g-contradicted", "committed", [1], at=NOW - HOUR)
    history.message("g-contradicted", 1, 1)
    history.op("g-contradicted", "rolled_back", at=NOW - HOUR + 50)
    history.op("h-changed", "committed", [1])
    history.message("h-changed", 7, 1)
    history.op("i-not-named", "committed", [1])
    history.message("i-not-named", 1, 1)
    history.message("i-not-named", 1, 2)
    history.half("j-gone", alive=False)


@scenario([("x", "committed_ok"), ("y", "torn")])
def a_message_that_counts_itself_to_another_number_tears_its_transaction(history: History) -> None:
    """`3/4` is not the third of three."""
    history.op("x", "committed", [1, 2])
    history.message("x", 1, 1)
    history.message("x", 2, 2)
    history.op("y", "committed", [5])
    history.message("y", 5, 1, total=3)


@scenario([("x", "contradicted")])
def an_outcome_that_is_written_twice_is_a_contradiction(history: History) -> None:
    """Nothing resolves a transaction twice, not even alike."""
    history.op("x", "rolled_back")
    history.op("x", "rolled_back", at=NOW - HOUR + 5)


@scenario([("x", "committed_ok")])
def two_equal_messages_of_one_transaction_are_not_doubled(history: History) -> None:
    """Messages are distinguished by their number, not by their content."""
    history.op("x", "committed", [1, 1])
    history.message("x", 1, 1)
    history.message("x", 1, 2)


@scenario([("a", "pending"), ("b", "pending")])
def what_is_younger_than_the_cut_is_not_judged(history: History) -> None:
    """An anomaly that may still be one of timing only is pending."""
    history.op("a", "committed", [1], at=NOW + 1)
    history.message("b", 1, 1, at=NOW + 1)


@scenario([("a", "pending"), ("b", "pending"), ("c", "lost"), ("d", "pending")])
def what_stands_in_an_unsettled_part_is_not_judged(history: History) -> None:
    """A Kafka transaction that was not finished when the ends were taken makes no anomaly."""
    history.op("a", "committed", [1])
    history.leave_unsettled("a")
    history.message("b", 1, 1)
    history.leave_unsettled("b")
    history.op("c", "committed", [1])
    history.leave_unsettled("d")


@scenario([("a-old", "expired_unknown"), ("b-new", "lost"), ("c-old-and-there", "committed_ok")], facts=OLD)
def messages_that_their_topic_has_deleted_by_age_are_not_lost(history: History) -> None:
    """A message is missing only where its topic must still have it; where it need not, nothing is proved either."""
    history.op("a-old", "committed", [1], at=NOW - 10 * HOUR)
    history.op("b-new", "committed", [1], at=NOW - HOUR)
    history.op("c-old-and-there", "committed", [1], at=NOW - 10 * HOUR)
    history.message("c-old-and-there", 1, 1, at=NOW - 10 * HOUR)


@scenario(
    [
        ("a-old", "expired_unknown"),
        ("b-old", "pending"),
        ("c-new", "leaked"),
        ("d-new", "pending"),
        ("e-older-and-gone", "expired_unknown"),
    ],
    facts=OLD,
)
def messages_whose_op_was_deleted_by_age_are_not_leaked(history: History) -> None:
    """Op markers are kept for a time, and older outcomes are unknown. A half that is there has not ended at any age."""
    history.message("a-old", 1, 1, at=NOW - 10 * HOUR)
    history.half("b-old", at=NOW - 10 * HOUR)
    history.message("c-new", 1, 1)
    history.half("d-new")
    history.half("e-older-and-gone", alive=False, at=NOW - 10 * HOUR)


@scenario([(SERVER_MADE, "leaked")], facts=OLD)
def the_shard_of_an_id_that_halfway_made_tells_since_when_its_op_must_be_there(history: History) -> None:
    """What another shard has deleted by age proves nothing about this one."""
    history.message(SERVER_MADE, 1, 1, at=NOW - 10 * HOUR)


def _named_in_shard(shard: int, name: str) -> str:
    """Return a name that makes, in the scenario of shards, an id of one of two shards."""
    prefix = "the_shard_of_an_id_that_a_client_chose_tells_whether_its_op_must_be_there:"
    names = (f"{name}-{number}" for number in range(100))
    return next(each for each in names if partition_for_key(f"{prefix}{each}".encode(), 2) == shard)


@scenario(
    [("a-young", "unproved"), ("b-old", "expired_unknown"), ("c-torn", "unproved"), ("d-there", "committed_ok")],
    facts=YOUNG,
)
def a_missing_message_that_is_too_young_to_be_deleted_is_not_called_expired(history: History) -> None:
    """Its partition can have lost records by hand or by a short retention, so it is not called lost either."""
    history.op("a-young", "committed", [1], at=NOW - HOUR)
    history.op("b-old", "committed", [1], at=NOW - 10 * HOUR)
    history.op("c-torn", "committed", [1, 2], at=NOW - HOUR)
    history.message("c-torn", 1, 1)
    history.op("d-there", "committed", [1], at=NOW - HOUR)
    history.message("d-there", 1, 1)


@scenario([("a-chosen", "lost"), ("b-chosen", "unproved"), ("c-any", "unproved")], facts=YOUNG)
def a_message_whose_partition_is_known_is_proved_lost_by_that_partition(history: History) -> None:
    """What another partition has deleted matters only if the message can have been there."""
    history.op("a-chosen", "committed", [1], partition=1)
    history.op("b-chosen", "committed", [1], partition=0)
    history.op("c-any", "committed", [1])


OF_WHOLE, OF_EMPTY = ([_named_in_shard(shard, name) for name in ("a-leaked", "b-gone", "c-old")] for shard in (1, 0))


@scenario(
    sorted(
        [
            *zip(OF_WHOLE, ("leaked", "lost", "leaked"), strict=True),
            *zip(OF_EMPTY, ("unproved", "unproved", "expired_unknown"), strict=True),
        ]
    ),
    facts=YOUNG,
)
def the_shard_of_an_id_that_a_client_chose_tells_whether_its_op_must_be_there(history: History) -> None:
    """One empty partition of op hides nothing of the other shards."""
    for leaked, gone, old in (OF_WHOLE, OF_EMPTY):
        history.message(leaked, 1, 1)
        history.half(gone, alive=False)
        history.message(old, 1, 1, at=NOW - 10 * HOUR)


@scenario([("a", "expired_unknown")], facts=CLEANED)
def a_late_tombstone_outlives_its_op(history: History) -> None:
    """A stray half gets its tombstone up to a horizon after the outcome, which may be deleted a horizon earlier."""
    history.half("a", alive=False)


@scenario([("a-replaced", "committed_ok"), ("b-lost", "lost"), ("c-by-another-clock", "committed_ok")], facts=CLEANED)
def a_message_that_a_later_one_of_its_key_replaced_is_not_lost(history: History) -> None:
    """In a compacted topic only the last record of a key must be there. Times of others prove nothing."""
    history.op("a-replaced", "committed", [1], at=NOW - HOUR)
    history.op("b-lost", "committed", [2], at=NOW - HOUR)
    history.op("c-by-another-clock", "committed", [3], at=NOW - HOUR)


@scenario([("mine", "committed_ok"), ("mine", "rolled_back_ok"), ("mine", "committed_ok")])
def an_id_that_a_client_uses_again_after_the_horizon_is_another_transaction(history: History) -> None:
    """Two uses have two verdicts and are neither doubled nor contradicted."""
    history.op("mine", "committed", [1], at=NOW - 5 * HOUR)
    history.message("mine", 1, 1, at=NOW - 5 * HOUR)
    history.op("mine", "rolled_back", at=NOW - 3 * HOUR)
    history.op("mine", "committed", [1], at=NOW - HOUR)
    history.message("mine", 1, 1, at=NOW - HOUR)


@scenario([("long", "doubled"), ("mine", "committed_ok"), ("mine", "committed_ok"), ("mine", "rolled_back_ok")])
def an_id_that_a_clock_set_back_uses_again_is_another_transaction(history: History) -> None:
    """Whoever prepares it has forgotten the use before, and says that it was less than a horizon ago."""
    first = NOW - 2 * HOUR + 100
    for began in (first, first + 10 + HORIZON - SLACK):
        history.op("mine", "committed", [1], at=began + 10)
        history.message("mine", 1, 1, at=began + 10, total=1)
    history.op("mine", "rolled_back", at=NOW - HOUR)
    # No clock is so wrong.
    history.op("long", "committed", [1], at=first + 10)
    history.message("long", 1, 1, at=first + 10)
    history.message("long", 1, 1, at=first + HORIZON - SLACK, took=1)


@scenario([("mine", "committed_ok")])
def a_late_repeat_without_a_tombstone_yet_is_no_transaction(history: History) -> None:
    """Another prepare just within the horizon is a stray for the coordinator, with any clocks."""
    ended = NOW - HOUR // 3
    history.op("mine", "committed", [1], at=ended)
    history.message("mine", 1, 1, at=ended)
    history.half("mine", at=ended + HORIZON - 1, prepared_at=ended + HORIZON - 1)


@scenario([("mine", "committed_ok"), ("mine", "pending")])
def what_a_clock_set_back_wrote_is_of_the_use_that_was_prepared_just_before(history: History) -> None:
    """A message says then that it is older than its own prepare."""
    history.op("mine", "committed", [1], at=NOW - 3 * HOUR)
    history.message("mine", 1, 1, at=NOW - 3 * HOUR)
    history.message("mine", 1, 1, at=NOW - HOUR, took=-SLACK)
    history.leave_unsettled("mine")


@scenario([("gone", "parked"), ("unsettled", "parked")])
def an_outcome_behind_what_is_judged_is_no_use_that_is_judged(history: History) -> None:
    """What was prepared long ago, and is resumed and ended while it is audited, is one transaction."""
    for name in ("gone", "unsettled"):
        history.park(name, at=NOW - SLACK // 2)
        history.use_later(name, at=NOW + 1)
    history.half("gone", alive=False, at=NOW)
    history.leave_unsettled("unsettled", at=NOW)


@scenario([("mine", "expired_unknown"), ("mine", "committed_ok")])
def a_use_whose_op_a_later_use_has_compacted_away_is_unknown(history: History) -> None:
    """In op only the last record of an id stays: messages of an earlier use prove nothing."""
    history.message("mine", 1, 1, at=NOW - 5 * HOUR)
    history.op("mine", "committed", [1], at=NOW - HOUR)
    history.message("mine", 1, 1, at=NOW - HOUR)


@scenario([("mine", "doubled")])
def a_long_wait_between_prepare_and_end_does_not_make_two_transactions(history: History) -> None:
    """A transaction that was pending for hours is one transaction, even if its message is doubled much later."""
    history.op("mine", "committed", [1], at=NOW - HOUR, took=5 * HOUR)
    history.message("mine", 1, 1, at=NOW - HOUR, took=5 * HOUR)
    history.message("mine", 1, 1, at=NOW, took=6 * HOUR)


@scenario([(SERVER_MADE, "contradicted")])
def an_id_that_halfway_made_is_one_transaction_for_ever(history: History) -> None:
    """Such an id is never used again: a second outcome contradicts the first, however late."""
    history.op(SERVER_MADE, "committed", [1], at=NOW - 50 * HOUR)
    history.message(SERVER_MADE, 1, 1, at=NOW - 50 * HOUR)
    history.op(SERVER_MADE, "rolled_back", at=NOW - HOUR)


@scenario([("mine", "committed_ok")])
def a_late_tombstone_changes_no_verdict(history: History) -> None:
    """The correction of a late duplicate prepare says nothing about the outcome."""
    history.op("mine", "committed", [1], at=NOW - 10 * HOUR)
    history.message("mine", 1, 1, at=NOW - 10 * HOUR)
    history.half("mine", alive=False, at=NOW - HOUR)


@scenario([("mine", "leaked")])
def a_leak_is_found_however_often_its_half_was_written_again(history: History) -> None:
    """What was re-anchored or resumed more than a horizon after its prepare is the same transaction."""
    history.message("mine", 1, 1, at=NOW - HOUR, took=47 * HOUR)
    history.half("mine", at=NOW - HOUR, prepared_at=NOW - 48 * HOUR)


@scenario([("a", "expired_unknown"), ("b", "leaked")])
def an_outcome_that_a_later_use_may_have_taken_away_proves_nothing(history: History) -> None:
    """What was written to op after what is judged can have made compaction remove what was judged by."""
    history.message("a", 1, 1, at=NOW - 5 * HOUR)
    history.use_later("a", at=NOW + HOUR)
    history.message("b", 1, 1, at=NOW - 5 * HOUR)


@scenario([("a", "not_judged"), ("b", "not_judged"), ("c", "not_judged")])
def what_cannot_be_read_is_not_judged(history: History) -> None:
    """An outcome in a schema that is not known, or a commit that names no message, is neither fine nor wrong."""
    history.leave_unreadable("a")
    history.message("a", 1, 1)
    history.half("b", alive=False)
    history.leave_unreadable("b")
    history.op("c", "committed")
    history.message("c", 1, 1)


@scenario([("a", "leaked"), ("b", "doubled")])
def a_date_in_the_future_hides_nothing(history: History) -> None:
    """Nothing can have been written later than it was read."""
    history.message("a", 1, 1, at=NOW + 10_000 * HOUR)
    history.op("b", "committed", [1])
    history.message("b", 1, 1)
    history.message("b", 1, 1, at=NOW + 10_000 * HOUR, took=10_001 * HOUR)


@scenario([("a", "committed_ok"), ("b", "payload_changed"), ("c", "payload_changed"), ("d", "committed_ok")])
def headers_and_a_chosen_partition_are_audited_where_op_tells_of_them(history: History) -> None:
    """An op of an earlier release does not have them."""
    for name, headers, partition in (("a", 1, 0), ("b", 2, 0), ("c", 1, 1)):
        history.op(name, "committed", [1], headers=1, partition=0)
        history.message(name, 1, 1, headers=headers, partition=partition)
    history.op("d", "committed", [1])
    history.message("d", 1, 1, headers=9, partition=9)


@scenario([("a", "half_left"), ("b", "half_left"), ("c", "committed_ok"), ("d", "rolled_back_ok")])
def a_half_that_outlives_its_outcome_is_found(history: History) -> None:
    """Once the outcome is forgotten it would be published again. A horizon is enough to correct a late one."""
    for name, outcome, at in (("a", "committed", NOW - HOUR), ("b", "rolled_back", NOW - HOUR)):
        history.op(name, outcome, [1] if outcome == "committed" else [], at=at)
        history.half(name, at=at + 1, prepared_at=at - 10)
    history.message("a", 1, 1)
    history.op("c", "committed", [1], at=NOW - 60_000)
    history.message("c", 1, 1, at=NOW - 60_000)
    history.half("c", at=NOW - 50_000, prepared_at=NOW - 60_010)
    history.op("d", "rolled_back")
    history.half("d", alive=False)


@scenario([("a", "reordered"), ("b", "committed_ok"), ("c", "committed_ok"), ("d", "doubled")])
def messages_in_another_order_than_was_prepared_are_found(history: History) -> None:
    """In one partition; two partitions have no order."""
    for name in "abcd":
        history.op(name, "committed", [1, 2, 3])
    for slot in (1, 3, 2):
        history.message("a", slot, slot)
    for slot in (1, 2, 3):
        history.message("b", slot, slot)
    for slot, partition in ((3, 0), (1, 1), (2, 1)):
        history.message("c", slot, slot, partition=partition)
    for slot in (2, 1, 2, 3):
        history.message("d", slot, slot)


@scenario(
    [
        ("a-made-up", "unprepared"),
        ("b-old", "committed_ok"),
        ("c-parked", "committed_ok"),
        ("d-gone", "committed_ok"),
        ("e-made-up", "unprepared"),
    ],
    facts=Facts(half_kept_since=NOW - 5 * HOUR),
)
def an_outcome_of_what_nobody_prepared_is_found(history: History) -> None:
    """While half still has the tombstone that is written with each outcome."""
    for name, at in (("a-made-up", NOW - HOUR), ("b-old", NOW - 10 * HOUR), ("c-parked", NOW - HOUR), ("d-gone", NOW)):
        history.op(name, "committed", [1], at=at)
        history.message(name, 1, 1, at=at)
    history.park("c-parked", alive=False)
    history.half("d-gone", alive=False)
    history.op("e-made-up", "rolled_back")


@scenario([("mine", "doubled")])
def as_many_copies_as_there_are_are_one_row(history: History) -> None:
    """However many rogue messages have one id."""
    history.op("mine", "committed", [1])
    for number in range(300):
        history.message("mine", 1, 1, took=number)


@pytest.fixture(scope="module")
def on_duckdb() -> Iterator[Engine]:
    made = DuckEngine()
    yield made
    made.close()


@pytest.fixture(scope="module")
def on_spark(spark: "SparkSession") -> Iterator[Engine]:
    made = SparkEngine(spark)
    yield made
    made.close()


@pytest.fixture(scope="module")
def of_duckdb(on_duckdb: Engine) -> dict[str, list[tuple[str, str]]]:
    return verdicts_of(on_duckdb, SCENARIOS, _with_server_made_id)


@pytest.fixture(scope="module")
def of_spark(on_spark: Engine) -> dict[str, list[tuple[str, str]]]:
    return verdicts_of(on_spark, SCENARIOS, _with_server_made_id)


def _with_server_made_id(facts: Facts) -> str:
    """Return the scenario of these facts whose id halfway made, which therefore has no prefix."""
    names = {
        "an_id_that_halfway_made_is_one_transaction_for_ever",
        "the_shard_of_an_id_that_halfway_made_tells_since_when_its_op_must_be_there",
    }
    (name,) = (name for name in names if SCENARIOS[name].facts == facts)
    return name


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_rule_holds_on_duckdb(name: str, of_duckdb: dict[str, list[tuple[str, str]]]) -> None:
    """Each scenario, named after its rule, gets exactly the verdicts that the rule gives."""
    assert of_duckdb[name] == SCENARIOS[name].expected, SCENARIOS[name].build.__doc__


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_rule_holds_on_spark(name: str, of_spark: dict[str, list[tuple[str, str]]]) -> None:
    """The same."""
    assert of_spark[name] == SCENARIOS[name].expected, SCENARIOS[name].build.__doc__


def test_an_anomaly_brings_its_evidence_and_every_finding(on_duckdb: Engine) -> None:
    """The first finding is the verdict, all are listed, and each message that is wrong is shown with its places."""
    history = History()
    history.op("x", "committed", [1, 2])
    history.message("x", 1, 1)
    history.message("x", 1, 1)
    (row,) = judge(on_duckdb, [history], EVERYTHING_STANDS)
    assert row["verdict"] == "torn"
    assert row["anomalies"] == ["torn", "doubled"]
    shown = {(each["slot"], each["problem"], each["found"], len(each["places"])) for each in row["evidence"]}
    assert shown == {(1, "doubled", 2, 2), (2, "missing", 0, 0)}
