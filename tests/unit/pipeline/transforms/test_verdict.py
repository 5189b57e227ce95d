"""The rules of *verdict* on small histories, one rule a test."""

from collections.abc import Callable, Sequence
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
    """Records of the topics, as the transforms get them; times are ms. Ids of clients get the prefix."""

    prefix: str = ""
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
        self.ops.append(
            (self._own(name), "g", outcome, "producer", at - took, at, at, 0, self._next(), digests or None)
        )

    def message(
        self,
        name: str,
        content: int,
        slot: int | None,
        *,
        at: int = NOW - HOUR,
        took: int = 10,
        total: int | None = None,
    ) -> None:
        self.messages.append(
            (self._own(name), at - took, at, f"k{content}", content, "orders", 0, self._next(), slot, total)
        )

    def counted_messages(self) -> list[tuple[Any, ...]]:
        """Each message counts as many as its op names."""
        totals = {op[0]: len(op[-1] or ()) for op in self.ops}
        return [(*row, slot, total or (slot and totals.get(row[0], slot))) for *row, slot, total in self.messages]

    def half(self, name: str, *, alive: bool = True, at: int = NOW - HOUR) -> None:
        self.halves.append((self._own(name), alive, at, "g", self._next()))

    def park(self, name: str, *, alive: bool = True, at: int = NOW - HOUR, prepared_at: int = NOW - 2 * HOUR) -> None:
        self.parked.append((self._own(name), alive, at, "g", self._next(), prepared_at if alive else None))

    def leave_unsettled(self, name: str) -> None:
        self.unsettled.append((self._own(name), NOW - HOUR))

    def _own(self, name: str) -> str:
        return name if name == SERVER_MADE else self.prefix + name

    def _next(self) -> int:
        self.offset += 1
        return self.offset


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known beside the records; scenarios with the same facts are judged together."""

    op_whole_since: tuple[tuple[int, int], ...] = ()
    """By shard."""
    provable_since: int = 0
    last_of_keys: tuple[tuple[str, int | None], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A small history and the verdicts that it must get, in the order of ids and their uses."""

    build: Callable[[History], None]
    expected: list[tuple[str, str]]
    facts: Facts


SCENARIOS: dict[str, Scenario] = {}
OLD = Facts(provable_since=NOW - 5 * HOUR, op_whole_since=((2, 0), (3, NOW - 20 * HOUR), (4, NOW - 5 * HOUR)))
"""Messages and ops have been deleted by age."""
CLEANED = Facts(
    op_whole_since=((0, NOW - HOUR - HORIZON + 1),),
    last_of_keys=(("k1", NOW - HOUR - 5), ("k2", NOW - 2 * HOUR), ("k3", None)),
)
"""Messages have been replaced, and ops deleted by age, in the last hour."""


def scenario(
    expected: list[tuple[str, str]], *, facts: Facts = Facts()
) -> Callable[[Callable[[History], None]], Callable[[History], None]]:
    def take(build: Callable[[History], None]) -> Callable[[History], None]:
        SCENARIOS[build.__name__] = Scenario(build=build, expected=expected, facts=facts)
        return build

    return take


def judge(spark: "SparkSession", histories: Sequence[History], facts: Facts) -> list[Any]:
    frame = spark.createDataFrame
    keys: DataFrame | None = None
    if facts.last_of_keys is not None:
        rows = [("orders", key, at) for key, at in facts.last_of_keys]
        keys = frame(rows, "topic string, key_hash string, last_at bigint")
    topics = [("orders", facts.provable_since, keys is not None)]
    judged = verdicts(
        ops=frame([row for each in histories for row in each.ops], OPS),
        halves=frame([row for each in histories for row in each.halves], HALVES),
        parked=frame([row for each in histories for row in each.parked], PARKED),
        messages=frame([row for each in histories for row in each.counted_messages()], MESSAGES),
        unsettled=frame([row for each in histories for row in each.unsettled], "id string, at bigint"),
        topics=frame(topics, "topic string, provable_since bigint, compacted boolean"),
        latest_of_keys=keys,
        limits=Limits(cut=NOW, op_whole_since=dict(facts.op_whole_since)),
    )
    return judged.orderBy("id", "life").collect()


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
    """One verdict for every transaction, whatever is known of it."""
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
    """The six ways in which a transaction can go wrong are told apart."""
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
    """Messages are told apart by their number, not by their content."""
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


@scenario(
    [("a-old", "expired_unknown"), ("b-new", "lost"), ("c-old-and-there", "committed_ok")],
    facts=OLD,
)
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
        ("e-old-and-gone", "expired_unknown"),
    ],
    facts=OLD,
)
def messages_whose_op_was_deleted_by_age_are_not_leaked(history: History) -> None:
    """Op markers are kept for a time, and what is older is unknown; a half that stands has not ended, however old."""
    history.message("a-old", 1, 1, at=NOW - 10 * HOUR)
    history.half("b-old", at=NOW - 10 * HOUR)
    history.message("c-new", 1, 1)
    history.half("d-new")
    history.half("e-old-and-gone", alive=False, at=NOW - 10 * HOUR)


@scenario([(SERVER_MADE, "leaked")], facts=OLD)
def the_shard_of_an_id_that_halfway_made_tells_since_when_its_op_must_be_there(history: History) -> None:
    """What another shard has deleted by age proves nothing about this one."""
    history.message(SERVER_MADE, 1, 1, at=NOW - 10 * HOUR)


@scenario([("a", "expired_unknown")], facts=CLEANED)
def a_late_tombstone_outlives_its_op(history: History) -> None:
    """A stray half is buried up to a horizon after the outcome, which may be deleted a horizon earlier."""
    history.half("a", alive=False)


@scenario(
    [("a-replaced", "committed_ok"), ("b-lost", "lost"), ("c-by-another-clock", "committed_ok")],
    facts=CLEANED,
)
def a_message_that_a_later_one_of_its_key_replaced_is_not_lost(history: History) -> None:
    """In a compacted topic only the last record of a key must stand; clocks differ, and others' times tell nothing."""
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


@scenario([("mine", "expired_unknown"), ("mine", "committed_ok")])
def a_use_whose_op_a_later_use_has_compacted_away_is_unknown(history: History) -> None:
    """In op only the last record of an id stays: messages of an earlier use prove nothing."""
    history.message("mine", 1, 1, at=NOW - 5 * HOUR)
    history.op("mine", "committed", [1], at=NOW - HOUR)
    history.message("mine", 1, 1, at=NOW - HOUR)


@scenario([("mine", "doubled")])
def a_long_wait_between_prepare_and_end_does_not_make_two_transactions(history: History) -> None:
    """A transaction that was pending for hours is one, also when somebody doubles its message much later."""
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


@pytest.fixture(scope="module")
def verdict_of(spark: "SparkSession") -> dict[str, list[tuple[str, str]]]:
    """Judge every scenario, those with the same facts in one go."""
    histories = {name: History(prefix=f"{name}:") for name in SCENARIOS}
    for name, history in histories.items():
        SCENARIOS[name].build(history)
    found: dict[str, list[tuple[str, str]]] = {name: [] for name in SCENARIOS}
    for facts in {each.facts for each in SCENARIOS.values()}:
        together = [history for name, history in histories.items() if SCENARIOS[name].facts == facts]
        for row in judge(spark, together, facts):
            name, _, transaction = row["id"].rpartition(":")
            found[name or _with_server_made_id(facts)].append((transaction, row["verdict"]))
    return found


def _with_server_made_id(facts: Facts) -> str:
    """Give the scenario of these facts whose id halfway made, which therefore has no prefix."""
    names = {
        "an_id_that_halfway_made_is_one_transaction_for_ever",
        "the_shard_of_an_id_that_halfway_made_tells_since_when_its_op_must_be_there",
    }
    (name,) = (name for name in names if SCENARIOS[name].facts == facts)
    return name


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_rule_holds(name: str, verdict_of: dict[str, list[tuple[str, str]]]) -> None:
    """Each scenario, named after its rule, gets exactly the verdicts that the rule gives."""
    assert verdict_of[name] == SCENARIOS[name].expected, SCENARIOS[name].build.__doc__


def test_an_anomaly_brings_its_evidence_and_every_finding(spark: "SparkSession") -> None:
    """The first finding is the verdict, all are listed, and each message that is wrong is shown with its places."""
    history = History()
    history.op("x", "committed", [1, 2])
    history.message("x", 1, 1)
    history.message("x", 1, 1)
    (row,) = judge(spark, [history], Facts())
    assert row["verdict"] == "torn"
    assert row["anomalies"] == ["torn", "doubled"]
    shown = {(each["slot"], each["problem"], each["found"], len(each["places"])) for each in row["evidence"]}
    assert shown == {(1, "doubled", 2, 2), (2, "missing", 0, 0)}
