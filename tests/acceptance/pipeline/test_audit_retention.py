"""The audit after Kafka's clean-up: records that compaction and retention removed are no anomaly."""

import logging
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # they are there
    AclOperation,
    AdminClient,
    NewTopic,
    ResourceType,
)

from halfway.kafka.records import codec
from halfway.pipeline import tables as runs
from halfway.pipeline.access import KafkaAccess, load
from halfway.pipeline.engines.engine import SparkEngine
from halfway.pipeline.jobs import audit
from halfway.pipeline.jobs.audit import AuditOptions, Summary
from halfway.pipeline.sources.pinned import KafkaSource
from halfway.pipeline.sources.spark import SparkReader
from halfway.pipeline.tables import Folder
from halfway.protocol.records import Barrier, Message, OpKind
from tests.support.brokers.guarded import USERS, GuardedKafka, credentials
from tests.support.coordinator.topics import Cluster, Record
from tests.support.pipeline import log_writer
from tests.support.pipeline.archives import rows_in, verdicts_in
from tests.support.pipeline.log_writer import KafkaLog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOUR = 3_600_000
DAY = 24 * HOUR
PREFIX = "_cleaned."
CLEANED_WITHIN_S = 300.0
ANSWERED_WITHIN_S = 120
ROLLED_AFTER = 15_000
CLEANING = {"segment.ms": "10000", "min.cleanable.dirty.ratio": "0.01", "delete.retention.ms": "0"}
TOPICS = {
    PREFIX + "half": {"cleanup.policy": "compact", **CLEANING},
    PREFIX + "op": {"cleanup.policy": "compact,delete", "retention.ms": str(7 * DAY), **CLEANING},
    PREFIX + "parked": {"cleanup.policy": "compact", **CLEANING},
    PREFIX + "groups": {"cleanup.policy": "compact"},
    PREFIX + "owners": {"cleanup.policy": "compact"},
    "kept": {},
    "trimmed": {"retention.ms": str(8 * DAY), "segment.ms": "10000"},
    "compacted": {"cleanup.policy": "compact", **CLEANING, "delete.retention.ms": str(4 * DAY)},
}
OLD_IDS, NEW_IDS = 60, 60


class CleaningKafka(GuardedKafka):
    """A broker that cleans up at once, and asks for a password on its other listener."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__(
            data_dir,
            {
                "log.cleaner.backoff.ms": "200",
                "log.retention.check.interval.ms": "500",
                "log.initial.task.delay.ms": "500",
                "log.segment.delete.delay.ms": "100",
            },
        )


class Writer(log_writer.Writer):
    """Writes the records of the lane, with old timestamps."""

    def __init__(self, bootstrap_servers: str) -> None:
        # Without Kafka transactions: their markers would have today's time.
        self.producer = Producer({"bootstrap.servers": bootstrap_servers, "enable.idempotence": True})
        super().__init__(KafkaLog(self.producer, lambda *_: 0, dated=True), prefix=PREFIX)
        self.expected: dict[str, str] = {}
        self.planted: dict[str, str] = {}
        self.kept: list[str] = []
        """The id of the message at each offset of the topic that is neither trimmed nor compacted."""

    def transactions(self, count: int, at: int, *, name: str | None = None, verdict: str | None = None) -> list[str]:
        """Prepare and end `count`, one per minute; every fourth stays pending, every fourth is rolled back."""
        ids = []
        for number in range(count):
            when = at + number * 60_000
            own = f"{name}-{number}" if name is not None else f"0-{uuid7(when)}"
            ids.append(own)
            # The same key every time: the compacted topic keeps only the last message.
            messages = tuple(
                Message(topic=topic, key=b"k", value=f"{own}".encode()) for topic in ("kept", "trimmed", "compacted")
            )
            self.half(own, messages, when)
            if number % 4 == 3:
                self.expected[own] = "pending"
            elif number % 4 == 0:
                self.roll_back(own, when, when)
                self.expected[own] = verdict or "rolled_back_ok"
            else:
                self.kept.append(own)
                self.commit(own, messages, when, when)
                self.expected[own] = verdict or "committed_ok"
        assert self.producer.flush(ANSWERED_WITHIN_S) == 0
        return ids

    def plant(self, at: int) -> None:
        """Write, for each real topic, a commit without its message, a message without a commit, and a half."""
        for topic in ("kept", "trimmed", "compacted"):
            message = Message(topic=topic, key=b"k", value=b"never written")
            self.op(f"lost-{topic}", OpKind.COMMITTED, (message,), at, at)
            self.planted[f"lost-{topic}"] = "lost"
        self.kept.append("leaked")
        self.message("leaked", Message(topic="kept", key=b"k", value=b"not committed"), "1/1", at, at)
        self.write_tombstone("half", "gone", at, "committed")
        self.planted |= {"leaked": "leaked", "gone": "lost"}
        assert self.producer.flush(ANSWERED_WITHIN_S) == 0

    def roll(self, at: int) -> None:
        """Write a record to every partition, so late that the earlier ones are not in the active segment."""
        barrier = codec.encode_barrier(Barrier(incarnation="x", at=at))
        for kind in ("half", "op", "parked"):
            headers = codec.record_headers(codec.KIND_BARRIER, "", "")
            self.log.write(PREFIX + kind, codec.BARRIER_KEY, barrier, at, headers)
        for topic in ("kept", "trimmed", "compacted"):
            self.log.write(topic, b"other", b"somebody else's", at, [])
        assert self.producer.flush(ANSWERED_WITHIN_S) == 0


def uuid7(ms: int) -> UUID:
    """Return a half of a time."""
    return UUID(int=ms << 80 | 7 << 76 | 2 << 62 | uuid4().int & (1 << 62) - 1)


@pytest.fixture(scope="module")
def cleaned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GuardedKafka, Writer]]:
    """Return a broker without halves, tombstones, old ops and old messages, and the records written to it."""
    with CleaningKafka(tmp_path_factory.mktemp("cleaning-kafka")) as kafka:
        new = [NewTopic(name, num_partitions=1, config=config) for name, config in TOPICS.items()]
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        for made in admin.create_topics(new).values():
            made.result(ANSWERED_WITHIN_S)
        now = round(time.time() * 1000)
        writer = Writer(kafka.bootstrap_servers)
        old = writer.transactions(OLD_IDS, now - 10 * DAY, verdict="expired_unknown")
        # Reuse the ids, as clients may after the horizon.
        writer.transactions(NEW_IDS, now - 3 * DAY, name="mine")
        writer.transactions(NEW_IDS, now - 2 * DAY)
        again = writer.transactions(NEW_IDS, now - 5 * HOUR, name="mine")
        wait_until_gone(kafka, writer, old, again)
        writer.plant(now - 60_000)
        yield kafka, writer


def wait_until_gone(kafka: GuardedKafka, writer: Writer, old: list[str], again: list[str]) -> None:
    """Wait until Kafka has removed old ops and messages, ended halves, tombstones and superseded ops.

    A tombstone is removed in the second run of the cleaner, which needs new records.
    """
    at = round(time.time() * 1000)
    cluster = Cluster(kafka.bootstrap_servers)
    deadline = time.monotonic() + CLEANED_WITHIN_S
    writer.roll(at)
    while True:
        at += ROLLED_AFTER
        half, op, trimmed, compacted = (
            cluster.read_now([topic]) for topic in (PREFIX + "half", PREFIX + "op", "trimmed", "compacted")
        )
        left = {
            "old ops": len(_of(op, old)),
            "tombstones": sum(record.value is None for record in half),
            "old messages": sum(record.transaction_id in old for record in trimmed),
            "two ops of one id": len(_of(op, again)) - len({record.key for record in _of(op, again)}),
            "superseded messages": sum(record.transaction_id != "" for record in compacted) > 1,
        }
        if not any(left.values()):
            return
        assert time.monotonic() < deadline, f"the broker has not cleaned up: {left}"
        writer.roll(at)
        time.sleep(0.2)


def _of(records: list[Record], ids: list[str]) -> list[Record]:
    keys = {name.encode() for name in ids}
    return [record for record in records if record.key in keys]


@dataclass(frozen=True, kw_only=True)
class Audited:
    """An audit with the coordinator's own settings, by a user that may only read."""

    folder: Path
    summary: Summary
    told: str
    """The output and the log of this process, with the plan of a read."""


@pytest.fixture(scope="module")
def audited(
    spark: "SparkSession", cleaned: tuple[GuardedKafka, Writer], tmp_path_factory: pytest.TempPathFactory
) -> Audited:
    kafka, _ = cleaned
    rights = (AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS, AclOperation.READ)
    for topic in TOPICS:
        kafka.allow("entitled", ResourceType.TOPIC, topic, *rights)
    settings = {
        "HALFWAY_KAFKA__BOOTSTRAP_SERVERS": kafka.guarded_servers,
        "HALFWAY_KAFKA_PREFIX": PREFIX,
        **credentials("entitled", USERS["entitled"]),
    }
    folder, told, everything = tmp_path_factory.mktemp("entitled"), StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(told), everything.level
    everything.addHandler(handler)
    everything.setLevel(logging.DEBUG)
    try:
        with redirect_stdout(told), redirect_stderr(told):
            source = KafkaSource(SparkReader(spark), load(settings))
            summary = audit.run(SparkEngine(spark), source, Folder(spark, str(folder)), AuditOptions(grace_ms=0))
            source.committed(["kept"]).explain(mode="extended")
    finally:
        everything.removeHandler(handler)
        everything.setLevel(level)
    return Audited(folder=folder, summary=summary, told=told.getvalue())


def test_what_kafka_has_removed_is_no_anomaly(
    spark: "SparkSession", cleaned: tuple[GuardedKafka, Writer], audited: Audited
) -> None:
    """Without halves, tombstones, old ops and messages, each verdict is right or says that it is unknown.

    And lost, leaked or removed messages are found.
    """
    _, writer = cleaned
    assert anomalies(audited.folder) == writer.planted
    assert audited.summary.quarantined == 0
    rows = verdicts_in(audited.folder)
    # The last use of a reused id has its whole history.
    found = {row["id"]: row["verdict"] for row in rows if row["id"] not in writer.planted}
    gone = writer.expected.keys() - found.keys()
    assert {writer.expected[name] for name in gone} == {"expired_unknown"}, "only what left no trace may be missing"
    assert found == {name: verdict for name, verdict in writer.expected.items() if name not in gone}
    first_uses = {row["verdict"] for row in rows if row["id"].startswith("mine") and row["life"] == 0}
    assert "expired_unknown" in first_uses, "the op of a first use is compacted away, its messages are not"


def verdicts(folder: Path) -> dict[tuple[str, int], str]:
    """Return the verdicts of an audit for each use of an id."""
    return {(row["id"], row["life"]): row["verdict"] for row in verdicts_in(folder)}


def anomalies(folder: Path) -> dict[str, str]:
    return {row["id"]: row["verdict"] for row in rows_in(folder, runs.ANOMALIES)}


def test_an_audit_needs_no_more_than_to_read_and_shows_no_password(
    cleaned: tuple[GuardedKafka, Writer], audited: Audited
) -> None:
    """With the coordinator's own settings, a password and three rights on topics.

    The password is in no file, in no output or log of Python, and not in the plan.
    """
    _, writer = cleaned
    assert audited.summary.anomalies == len(writer.planted)
    assert "Physical Plan" in audited.told
    files = list(audited.folder.glob("*.json"))
    assert files
    assert USERS["entitled"] not in "".join((audited.told, *(file.read_text() for file in files)))


def test_what_kafka_removes_while_it_is_read_is_no_anomaly(
    spark: "SparkSession", cleaned: tuple[GuardedKafka, Writer], audited: Audited, tmp_path: Path
) -> None:
    """An audit of a topic at the limit of its retention finishes, and claims nothing about removed records."""
    kafka, writer = cleaned
    before = verdicts(audited.folder)
    # In the middle of records that were complete until now.
    sound = {offset: name for offset, name in enumerate(writer.kept) if before.get((name, 0)) == "committed_ok"}
    until = sorted(sound)[len(sound) // 4]
    access = KafkaAccess(librdkafka={"bootstrap.servers": kafka.bootstrap_servers}, prefix=PREFIX)

    class Trimmed(KafkaSource):
        """The first records of a topic are removed between the pin of the offsets and the read."""

        def extend_unsettled(self, topic: str) -> None:
            super().extend_unsettled(topic)
            admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
            for done in admin.delete_records([TopicPartition("kept", 0, until)]).values():
                done.result(ANSWERED_WITHIN_S)

    audit.run(
        SparkEngine(spark), Trimmed(SparkReader(spark), access), Folder(spark, str(tmp_path)), AuditOptions(grace_ms=0)
    )
    assert anomalies(tmp_path) == writer.planted
    gone = {(name, 0) for offset, name in sound.items() if offset < until}
    assert gone, "nothing was removed that is not proved without it"
    after = verdicts(tmp_path)
    # The topic's retention explains the old ones only.
    assert {after[each] for each in gone & after.keys()} <= {"unproved", "expired_unknown"}
    others = {each: verdict for each, verdict in after.items() if each not in gone}
    assert before | others == before
    # Transactions of which only the message was left have no record now.
    assert {before[each] for each in before.keys() - after.keys()} <= {"expired_unknown"}
