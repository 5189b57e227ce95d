"""The audit and the checker of the chaos runs say the same of the same topics.

The checker also knows what callers asked and were told; the audit knows the topics alone. So each rule of the checker
is either one that the topics can show, with the verdict that it must give, or one that they cannot.
"""

from collections import defaultdict
from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING

from checker.judge import judge
from checker.records import AnyRecord, Half, Op, Parked, Real
from checker.rules import RULES, Finding
from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.engines.engine import Engine, SparkEngine
from halfway.pipeline.transforms.verdict import ANOMALIES
from tests.support.checker.forgeries import FORGERIES, good
from tests.support.pipeline.scenarios import Facts, History
from tests.support.pipeline.scenarios import judge as judge_topics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AT = 1_700_000_000_000
LATER = AT + 3_600_000
"""Whatever halfway would correct has been corrected by then."""
GONE = "acknowledged_prepare_went_without_an_outcome"
SHOWN = {
    "committed_and_not_there": "lost",
    GONE: "lost",
    "committed_in_part": "torn",
    "number_of_messages_differs": "torn",
    "message_stands_again": "doubled",
    "message_without_commit_marker": "leaked",
    "payload_differs": "payload_changed",
    "resolved_twice": "contradicted",
    "messages_out_of_order": "reordered",
    "ended_and_still_in_the_log": "half_left",
    # For the audit the marker is what was prepared, so the message differs.
    "marker_of_another_content": "payload_changed",
}
NOT_SHOWN = {
    "acknowledged_prepare_is_not_there": "a prepare that left no trace was told only to its caller",
    "acknowledged_prepare_is_unknown": "an answer",
    "half_nobody_prepared": "who asked is not in the topics",
    "message_nobody_committed": "who asked is not in the topics",
    "message_nobody_prepared": "who asked is not in the topics; the message has no marker either, which is shown",
    "message_of_no_transaction": "other producers may write to a real topic",
    "outcome_nobody_gave": "who gave a verdict is not in the topics",
    "outcome_taken_back": "an answer",
    "told_an_outcome_that_is_not_marked": "an answer",
    "two_contents_acknowledged": "an answer",
    "two_outcomes": "an answer, unless both are marked: then resolved_twice is found too",
    "policy_before_any_check": "a marker's checks are not among what the audit judges, nor what its group was asked",
    "policy_against_a_commit": "an answer, or a marker that compaction takes away",
    "no_outcome": "pending or parked, no anomaly",
}

NO_HEADERS = "other headers stand in the topic"
"""These frames have no headers; test_verdict has the rule."""

BY_ANSWERS_ALONE = {
    "other content than the acknowledged one is delivered",
    "other content than the acknowledged one is rolled back",
}
"""Marker and messages agree there: only the answer to the prepare had another content."""


def shown(findings: Iterable[Finding], topics: list[AnyRecord]) -> dict[str, set[str]]:
    """Return the anomalies of each id that the topics alone can show."""
    committed = {record.id for record in topics if isinstance(record, Op) and record.outcome == "committed"}
    anomalies: defaultdict[str, set[str]] = defaultdict(set)
    for finding in findings:
        verdict = SHOWN.get(finding.rule)
        assert verdict or finding.rule in NOT_SHOWN, f"is {finding.rule} something that the topics show?"
        # The topics do not show what is lost or torn of a commit that only an answer mentions.
        if verdict and (finding.id in committed or finding.rule == GONE or verdict not in ("lost", "torn")):
            anomalies[finding.id].add(verdict)
    return dict(anomalies)


class Forged(History):
    """Records of several forged histories as the audit gets them; ids begin with the number of the history."""

    def add(self, number: int, topics: list[AnyRecord]) -> None:
        contents = {record.id: record.contents for record in topics if isinstance(record, Half) and record.contents}
        for record in topics:
            name = f"{number}:{record.id}"
            match record:
                case Op() if record.outcome is not None:
                    named = record.messages or [(one.topic, one.key, one.value) for one in contents.get(record.id, ())]
                    digests: list[dict[str, object]] = [
                        {"topic": topic, "key_hash": _hash(key), "value_hash": _hash(value), "size": 1}
                        for topic, key, value in named
                    ]
                    ended_at = AT + record.offset  # each decided at its own time
                    place = (AT, ended_at, AT, record.shard, record.offset)
                    self.ops.append((name, "g", record.kind, record.cause, *place, digests))
                case Half():
                    self.halves.append((name, record.contents is not None, AT, "g", record.offset, AT))
                case Parked():
                    self.parked.append((name, not record.tombstone, AT, "g", record.offset, AT))
                case Real() if record.id:
                    what = record.content
                    key_hash = _hash(what.key).hex()
                    hashes = (key_hash, key_hash[:16] + _hash(what.value).hex()[:16], "")
                    where = (what.topic, record.shard, record.offset)
                    self.messages.append((name, AT, AT, *hashes, *where, record.number, record.total))
                case _:
                    pass


def _hash(hexadecimal: str | None) -> bytes:
    """Return a hash of 16 bytes, whatever the forger wrote."""
    text = hexadecimal or ""
    return bytes.fromhex(text) if len(text) == 32 else sha256(text.encode()).digest()[:16]


def test_forged_histories_get_from_duckdb_what_the_checker_finds() -> None:
    """As from Spark."""
    engine = DuckEngine()
    assert_agreement(engine)
    engine.close()


def test_forged_histories_get_from_spark_what_the_checker_finds(spark: "SparkSession") -> None:
    """As from DuckDB."""
    assert_agreement(SparkEngine(spark))


def assert_agreement(engine: Engine) -> None:
    """For every way to forge, and for a good run: the same ids, with the verdicts that match the checker's rules."""
    forged = Forged()
    expected: dict[str, set[str]] = {}
    forgeries = {name: forge for name, (forge, _) in FORGERIES.items() if name not in {NO_HEADERS, *BY_ANSWERS_ALONE}}
    for number, (_, forge) in enumerate([("good", None), *forgeries.items()]):
        history, topics = good()
        if forge is not None:
            forge(history, topics)
        forged.add(number, topics)
        found = shown(judge(history, topics).findings, topics)
        expected |= {f"{number}:{name}": anomalies for name, anomalies in found.items()}
    assert set().union(*expected.values()) == set(SHOWN.values())
    assert set(ANOMALIES) - set(SHOWN.values()) == {"unprepared"}, "for the checker a half that nobody prepared"
    rows = judge_topics(engine, [forged], Facts(topics=("orders", "points"), cut=LATER))
    assert {row["id"]: set(row["anomalies"]) for row in rows if row["verdict"] in ANOMALIES} == expected


def test_every_rule_of_the_checker_is_placed() -> None:
    """A rule that is added to the checker must be shown by the audit too, or be one that topics cannot show."""
    known = {rule for _, findings in FORGERIES.values() for _, rule, _ in findings}
    assert known <= SHOWN.keys() | NOT_SHOWN.keys()
    assert SHOWN.keys() <= known
    assert {NO_HEADERS, *BY_ANSWERS_ALONE} <= FORGERIES.keys()
    assert len(RULES) == 10, "a rule was added: forge it, and place it here"
