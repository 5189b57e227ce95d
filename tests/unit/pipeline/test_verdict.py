"""The rules of *verdict* on small histories, one rule a test."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from halfway.pipeline.transforms.verdict import Limits, verdicts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HOUR = 3_600_000
NOW = 1_000 * HOUR
HORIZON = 900_000
SERVER_MADE = "3-01890a5d-ac96-774b-bcce-b302099a8057"

OPS = (
    "id string, `group` string, outcome string, cause string, prepared_at bigint, ended_at bigint, at bigint, "
    "partition int, offset bigint, "
    "digests array<struct<topic: string, slot: int, total: int, content: bigint, key_hash: string>>"
)
HALVES = "id string, alive boolean, at bigint, `group` string, offset bigint"
PARKED = HALVES + ", prepared_at bigint"
MESSAGES = (
    "id string, prepared_at bigint, at bigint, key_hash string, content bigint, topic string, partition int, "
    "offset bigint, slot int, total int"
)


@dataclass
class History:
    """Records of the topics, as the transforms get them; times are ms."""

    ops: list[tuple[Any, ...]] = field(default_factory=list)
    halves: list[tuple[Any, ...]] = field(default_factory=list)
    parked: list[tuple[Any, ...]] = field(default_factory=list)
    messages: list[tuple[Any, ...]] = field(default_factory=list)
    unsettled: list[tuple[str, int]] = field(default_factory=list)
    offset: int = 0

    def op(
        self, name: str, outcome: str, contents: Sequence[int] = (), *, at: int = NOW - HOUR, took: int = 10
    ) -> None:
        """An outcome; its messages, each known by its content, are for the topics `orders`."""
        digests = [("orders", slot, len(contents), content, f"k{content}") for slot, content in enumerate(contents, 1)]
        self.ops.append((name, "g", outcome, "producer", at - took, at, at, 0, self._next(), digests or None))

    def message(self, name: str, content: int, slot: int | None, *, at: int = NOW - HOUR, took: int = 10) -> None:
        self.messages.append((name, at - took, at, f"k{content}", content, "orders", 0, self._next(), slot))

    def counted_messages(self) -> list[tuple[Any, ...]]:
        """Each message counts as many as its op names."""
        totals = {op[0]: len(op[-1] or ()) for op in self.ops}
        return [(*each, each[-1] and totals.get(each[0], each[-1])) for each in self.messages]

    def half(self, name: str, *, alive: bool = True, at: int = NOW - HOUR) -> None:
        self.halves.append((name, alive, at, "g", self._next()))

    def park(self, name: str, *, alive: bool = True, at: int = NOW - HOUR, prepared_at: int = NOW - 2 * HOUR) -> None:
        self.parked.append((name, alive, at, "g", self._next(), prepared_at if alive else None))

    def _next(self) -> int:
        self.offset += 1
        return self.offset


class Judge:
    def __init__(self, spark: "SparkSession") -> None:
        self._spark = spark

    def rows(
        self,
        history: History,
        *,
        limits: Limits | None = None,
        provable_since: int = 0,
        last_of_keys: Sequence[tuple[str, int]] | None = None,
    ) -> list[Any]:
        frame = self._spark.createDataFrame
        keys: DataFrame | None = None
        if last_of_keys is not None:
            rows = [("orders", key, at) for key, at in last_of_keys]
            keys = frame(rows, "topic string, key_hash string, last_at bigint")
        topics = frame(
            [("orders", provable_since, keys is not None)], "topic string, provable_since bigint, compacted boolean"
        )
        judged = verdicts(
            ops=frame(history.ops, OPS),
            halves=frame(history.halves, HALVES),
            parked=frame(history.parked, PARKED),
            messages=frame(history.counted_messages(), MESSAGES),
            unsettled=frame(history.unsettled, "id string, at bigint"),
            topics=topics,
            latest_of_keys=keys,
            limits=limits or Limits(cut=NOW),
        )
        return judged.orderBy("id", "life").collect()

    def __call__(self, history: History, **facts: Any) -> list[tuple[str, str]]:
        return [(row["id"], row["verdict"]) for row in self.rows(history, **facts)]


@pytest.fixture(scope="module")
def judge(spark: "SparkSession") -> Judge:
    return Judge(spark)


def test_each_way_to_end_well_or_not_at_all_has_its_verdict(judge: Judge) -> None:
    """One verdict for every transaction, whatever is known of it."""
    history = History()
    history.half("a-committed", alive=False)
    history.op("a-committed", "committed", [1, 2])
    history.message("a-committed", 1, 1)
    history.message("a-committed", 2, 2)
    history.op("b-rolled-back", "rolled_back")
    history.half("c-pending")
    history.half("d-parked", alive=False)
    history.park("d-parked")
    history.half("e-gone", alive=False)
    history.park("f-resumed")
    history.park("f-resumed", alive=False)
    history.half("f-resumed")
    assert judge(history) == [
        ("a-committed", "committed_ok"),
        ("b-rolled-back", "rolled_back_ok"),
        ("c-pending", "pending"),
        ("d-parked", "parked"),
        ("e-gone", "expired_unknown"),
        ("f-resumed", "pending"),
    ]


def test_each_anomaly_has_its_verdict(judge: Judge) -> None:
    """The six ways in which a transaction can go wrong are told apart."""
    history = History()
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
    assert judge(history) == [
        ("a-lost", "lost"),
        ("b-torn", "torn"),
        ("c-doubled", "doubled"),
        ("d-leaked-rolled-back", "leaked"),
        ("e-leaked-pending", "leaked"),
        ("f-leaked-unheard-of", "leaked"),
        ("g-contradicted", "contradicted"),
        ("h-changed", "payload_changed"),
        ("i-not-named", "leaked"),
    ]


def test_an_anomaly_brings_its_evidence_and_every_finding(judge: Judge) -> None:
    """The first finding is the verdict, all are listed, and each message that is wrong is shown with its places."""
    history = History()
    history.op("x", "committed", [1, 2])
    history.message("x", 1, 1)
    history.message("x", 1, 1)
    (row,) = judge.rows(history)
    assert row["verdict"] == "torn"
    assert row["anomalies"] == ["torn", "doubled"]
    shown = {(each["slot"], each["problem"], each["found"], len(each["places"])) for each in row["evidence"]}
    assert shown == {(1, "doubled", 2, 2), (2, "missing", 0, 0)}


def test_a_message_that_counts_itself_to_another_number_tears_its_transaction(judge: Judge) -> None:
    """`3/4` is not the third of three."""
    history = History()
    history.op("x", "committed", [1, 2])
    history.message("x", 1, 1)
    history.message("x", 2, 2)
    history.ops.append(("y", "g", "committed", "producer", 1, 2, 2, 0, 99, [("orders", 1, 3, 5, "k5")]))
    history.messages.append(("y", 1, 2, "k5", 5, "orders", 0, 99, 1))
    assert judge(history) == [("x", "committed_ok"), ("y", "torn")]


def test_an_outcome_that_is_written_twice_is_a_contradiction(judge: Judge) -> None:
    """Nothing resolves a transaction twice, not even alike."""
    history = History()
    history.op("x", "rolled_back")
    history.op("x", "rolled_back", at=NOW - HOUR + 5)
    assert judge(history) == [("x", "contradicted")]


def test_two_equal_messages_of_one_transaction_are_not_doubled(judge: Judge) -> None:
    """Messages are told apart by their number, not by their content."""
    history = History()
    history.op("x", "committed", [1, 1])
    history.message("x", 1, 1)
    history.message("x", 1, 2)
    assert judge(history) == [("x", "committed_ok")]


def test_what_is_younger_than_the_cut_is_not_judged(judge: Judge) -> None:
    """An anomaly that may still be one of timing only is pending."""
    history = History()
    history.op("a", "committed", [1], at=NOW + 1)
    history.message("b", 1, 1, at=NOW + 1)
    assert judge(history) == [("a", "pending"), ("b", "pending")]


def test_what_stands_in_an_unsettled_part_is_not_judged(judge: Judge) -> None:
    """A Kafka transaction that was not finished when the ends were taken makes no anomaly."""
    history = History()
    history.op("a", "committed", [1])
    history.unsettled.append(("a", NOW - HOUR))
    history.message("b", 1, 1)
    history.unsettled.append(("b", NOW - HOUR))
    history.op("c", "committed", [1])
    history.unsettled.append(("d", NOW - HOUR))
    assert judge(history) == [("a", "pending"), ("b", "pending"), ("c", "lost"), ("d", "pending")]


def test_messages_that_their_topic_has_deleted_by_age_are_not_lost(judge: Judge) -> None:
    """A message is missing only where its topic must still have it."""
    history = History()
    history.op("a-old", "committed", [1], at=NOW - 10 * HOUR)
    history.op("b-new", "committed", [1], at=NOW - HOUR)
    since = NOW - 5 * HOUR
    assert judge(history, provable_since=since) == [("a-old", "committed_ok"), ("b-new", "lost")]


def test_messages_whose_op_was_deleted_by_age_are_not_leaked(judge: Judge) -> None:
    """Op markers are kept for a time; what is older is unknown, pending halves too."""
    history = History()
    history.message("a-old", 1, 1, at=NOW - 10 * HOUR)
    history.half("b-old", at=NOW - 10 * HOUR)
    history.message("c-new", 1, 1)
    history.half("d-new")
    limits = Limits(cut=NOW, op_whole_since=NOW - 5 * HOUR)
    assert judge(history, limits=limits) == [
        ("a-old", "expired_unknown"),
        ("b-old", "expired_unknown"),
        ("c-new", "leaked"),
        ("d-new", "pending"),
    ]


def test_a_message_that_a_later_one_of_its_key_replaced_is_not_lost(judge: Judge) -> None:
    """In a compacted topic only the last record of a key must stand."""
    history = History()
    history.op("a-replaced", "committed", [1], at=NOW - HOUR)
    history.op("b-lost", "committed", [2], at=NOW - HOUR)
    last = [("k1", NOW - HOUR + 5), ("k2", NOW - 2 * HOUR)]
    assert judge(history, last_of_keys=last) == [("a-replaced", "committed_ok"), ("b-lost", "lost")]


def test_an_id_that_a_client_uses_again_after_the_horizon_is_another_transaction(judge: Judge) -> None:
    """Two uses have two verdicts and are neither doubled nor contradicted."""
    history = History()
    history.op("mine", "committed", [1], at=NOW - 5 * HOUR)
    history.message("mine", 1, 1, at=NOW - 5 * HOUR)
    history.op("mine", "rolled_back", at=NOW - 3 * HOUR)
    history.op("mine", "committed", [1], at=NOW - HOUR)
    history.message("mine", 1, 1, at=NOW - HOUR)
    assert judge(history) == [("mine", "committed_ok"), ("mine", "rolled_back_ok"), ("mine", "committed_ok")]


def test_a_use_whose_op_a_later_use_has_compacted_away_is_unknown(judge: Judge) -> None:
    """In op only the last record of an id stays: messages of an earlier use prove nothing."""
    history = History()
    history.message("mine", 1, 1, at=NOW - 5 * HOUR)
    history.op("mine", "committed", [1], at=NOW - HOUR)
    history.message("mine", 1, 1, at=NOW - HOUR)
    assert judge(history) == [("mine", "expired_unknown"), ("mine", "committed_ok")]


def test_a_long_wait_between_prepare_and_end_does_not_make_two_transactions(judge: Judge) -> None:
    """A transaction that was pending for hours is one, also when somebody doubles its message much later."""
    history = History()
    history.op("mine", "committed", [1], at=NOW - HOUR, took=5 * HOUR)
    history.message("mine", 1, 1, at=NOW - HOUR, took=5 * HOUR)
    history.message("mine", 1, 1, at=NOW, took=6 * HOUR)
    assert judge(history) == [("mine", "doubled")]


def test_an_id_that_halfway_made_is_one_transaction_for_ever(judge: Judge) -> None:
    """Such an id is never used again: a second outcome contradicts the first, however late."""
    history = History()
    history.op(SERVER_MADE, "committed", [1], at=NOW - 50 * HOUR)
    history.message(SERVER_MADE, 1, 1, at=NOW - 50 * HOUR)
    history.op(SERVER_MADE, "rolled_back", at=NOW - HOUR)
    assert judge(history) == [(SERVER_MADE, "contradicted")]


def test_a_late_tombstone_changes_no_verdict(judge: Judge) -> None:
    """The correction of a late duplicate prepare says nothing about the outcome."""
    history = History()
    history.op("mine", "committed", [1], at=NOW - 10 * HOUR)
    history.message("mine", 1, 1, at=NOW - 10 * HOUR)
    history.half("mine", alive=False, at=NOW - HOUR)
    assert judge(history) == [("mine", "committed_ok")]
