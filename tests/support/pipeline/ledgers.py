"""What the tests of the ledger share: its topics on a real broker, a run, and the rows of its tables."""

import time
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from confluent_kafka import OFFSET_END, IsolationLevel, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec  # type: ignore[attr-defined]  # they are there

from halfway.kafka.records import codec
from halfway.pipeline.access import KafkaAccess
from halfway.pipeline.engines.engine import SparkEngine
from halfway.pipeline.jobs import ledger
from halfway.pipeline.jobs.ledger import LedgerOptions
from halfway.pipeline.tables import Folder
from halfway.protocol.records import Message, Op, OpKind
from tests.support.pipeline.log_writer import KafkaLog, Writer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SHARDS = 2
CREATED = 1_700_000_000_000
ANSWERED_WITHIN_S = 120
MESSAGE = Message(topic="orders", key=b"k", value=b"v")
ONCE = LedgerOptions(once=True, max_records=400)


class Topics:
    """half, op and parked under a prefix of their own, and the transactions written to them."""

    def __init__(self, bootstrap_servers: str) -> None:
        self.access = KafkaAccess(librdkafka={"bootstrap.servers": bootstrap_servers}, prefix=f"_t{uuid4().hex[:12]}.")
        self._admin = AdminClient({"bootstrap.servers": bootstrap_servers})
        new = [NewTopic(self.access.topic(kind), num_partitions=SHARDS) for kind in ("half", "op", "parked")]
        for made in self._admin.create_topics(new).values():
            made.result(ANSWERED_WITHIN_S)
        self._producer = Producer({"bootstrap.servers": bootstrap_servers, "transactional.id": uuid4().hex})
        self._producer.init_transactions(ANSWERED_WITHIN_S)
        self._writer = Writer(KafkaLog(self._producer, _shard), prefix=self.access.prefix)
        self.ended: set[str] = set()
        self.pending: set[str] = set()

    def write(self, first: int, count: int) -> None:
        """Prepare transactions and end two of three, then leave some in a Kafka transaction that is aborted."""
        self._producer.begin_transaction()
        for number in range(first, first + count):
            name = f"tx-{number}"
            self._half(name, number)
            if number % 3:
                self._end(name, number, OpKind.COMMITTED if number % 3 == 1 else OpKind.ROLLED_BACK)
                self.ended.add(name)
            else:
                self.pending.add(name)
        self._producer.commit_transaction(ANSWERED_WITHIN_S)
        self._producer.begin_transaction()
        for number in range(first, first + count, 3):
            self._end(f"tx-{number}", number, OpKind.COMMITTED)
        self._producer.flush(ANSWERED_WITHIN_S)
        self._producer.abort_transaction(ANSWERED_WITHIN_S)

    def end_rest(self, *, tombstones: bool = True) -> None:
        """End what is pending."""
        self._producer.begin_transaction()
        for name in self.pending:
            self._end(name, int(name.removeprefix("tx-")), OpKind.ROLLED_BACK, tombstone=tombstones)
        self._producer.commit_transaction(ANSWERED_WITHIN_S)
        self.ended |= self.pending
        self.pending = set()

    def write_outcomes(self, *numbers: int) -> None:
        """Write outcomes alone, as a ledger sees them that reads op faster than half."""
        self._producer.begin_transaction()
        for number in numbers:
            self._end(f"tx-{number}", number, OpKind.COMMITTED, tombstone=False)
        self._producer.commit_transaction(ANSWERED_WITHIN_S)
        self.ended |= {f"tx-{number}" for number in numbers}

    def park(self, number: int) -> None:
        """Park what is pending, as the coordinator does that has asked for long enough."""
        self._producer.begin_transaction()
        self._writer.park(f"tx-{number}", (MESSAGE,), CREATED, CREATED + number)
        self._producer.commit_transaction(ANSWERED_WITHIN_S)

    def resume(self, number: int) -> None:
        """Take up again what is parked."""
        self._producer.begin_transaction()
        self._half(f"tx-{number}", number)
        self._writer.write_tombstone("parked", f"tx-{number}", CREATED, "prepared")
        self._producer.commit_transaction(ANSWERED_WITHIN_S)

    def write_half(self, number: int) -> None:
        """Write a half without its tombstone, which is gone or not there yet."""
        self._producer.begin_transaction()
        self._half(f"tx-{number}", number)
        self._producer.commit_transaction(ANSWERED_WITHIN_S)

    def write_garbage(self) -> None:
        """Write a record that cannot be read into each topic. That in op has the headers of an outcome."""
        self._producer.begin_transaction()
        for kind in ("half", "parked"):
            self._producer.produce(self.access.topic(kind), b"garbage", b"who-knows", 0)
        self._writer.raw_op("damaged", b"garbage", CREATED, "committed")
        self._producer.commit_transaction(ANSWERED_WITHIN_S)

    def write_ops(self, *ops: Op) -> None:
        """Write outcomes as they are, all to one shard."""
        self._producer.begin_transaction()
        for op in ops:
            self._writer.raw_op(op.id, codec.encode_op(op), CREATED, "committed")
        self._producer.commit_transaction(ANSWERED_WITHIN_S)

    def remove_ops(self) -> None:
        """Remove what op holds, as retention does, the markers of its Kafka transactions too."""
        # They come a moment after what they end.
        deadline = time.monotonic() + ANSWERED_WITHIN_S
        while self._op_ends(IsolationLevel.READ_COMMITTED) != self._op_ends(IsolationLevel.READ_UNCOMMITTED):
            assert time.monotonic() < deadline, "a Kafka transaction does not end"
            time.sleep(0.05)
        ends = [TopicPartition(self.access.topic("op"), shard, OFFSET_END) for shard in range(SHARDS)]
        for removed in self._admin.delete_records(ends).values():
            removed.result(ANSWERED_WITHIN_S)

    def _op_ends(self, level: IsolationLevel) -> list[int]:
        asked = {
            TopicPartition(self.access.topic("op"), shard): OffsetSpec.latest()  # type: ignore[no-untyped-call]
            for shard in range(SHARDS)
        }
        told = self._admin.list_offsets(asked, isolation_level=level)
        return [told[partition].result(ANSWERED_WITHIN_S).offset for partition in asked]

    def _half(self, name: str, number: int) -> None:
        self._writer.half(name, (MESSAGE,), CREATED + number)

    def _end(self, name: str, number: int, kind: OpKind, *, tombstone: bool = True) -> None:
        now = round(time.time() * 1000)
        self._writer.op(name, kind, (MESSAGE,), now, CREATED + number)
        if tombstone:
            self._writer.write_tombstone("half", name, now, kind.value.lower())


def _shard(_topic: str, key: bytes | None) -> int:
    kind, _, number = (key or b"").partition(b"-")
    return int(number) % SHARDS if kind == b"tx" else 0


def run(spark: "SparkSession", topics: Topics, folder: Path, options: LedgerOptions = ONCE) -> None:
    ledger.start(spark, topics.access, Folder(spark, str(folder)), options).awaitTermination()


def tables(spark: "SparkSession", folder: Path) -> "tuple[DataFrame, DataFrame]":
    """Return what has ended and what is pending."""
    found = ledger.tables(SparkEngine(spark), Folder(spark, str(folder)))
    assert found is not None
    return found


def ended_ids(spark: "SparkSession", folder: Path) -> list[str]:
    ended, _ = tables(spark, folder)
    return sorted(row["id"] for row in ended.select("id").collect())


def pending_ids(spark: "SparkSession", folder: Path) -> list[str]:
    _, pending = tables(spark, folder)
    return sorted(row["id"] for row in pending.select("id").collect())


def parked_ids(spark: "SparkSession", folder: Path) -> list[str]:
    """Give, of what is pending, what halfway has stopped asking about."""
    _, pending = tables(spark, folder)
    return sorted(row["id"] for row in pending.where("state = 'parked'").select("id").collect())


def unreadable(spark: "SparkSession", folder: Path) -> list[tuple[str, str]]:
    """Return the kind of topic and the error of each record in quarantine."""
    found = ledger.quarantine(SparkEngine(spark), Folder(spark, str(folder)))
    rows = found.collect() if found is not None else []
    return sorted((row["topic"].rpartition(".")[2], row["error"]) for row in rows)


GARBAGE = [
    ("half", "no header halfway-kind"),
    ("op", "not in Avro single-object encoding where a record of the kind op was expected"),
    ("parked", "no header halfway-kind"),
]
"""What `write_garbage` leaves there."""


class DiedError(Exception):
    """What a ledger of this process dies of."""


def die() -> None:
    raise DiedError
