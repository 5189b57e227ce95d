"""The ledger's stream on a real broker: each outcome once, however often it is stopped in the middle."""

from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # they are there

from halfway.domain.records import Half, Message, MessageDigest, Op, OpKind
from halfway.domain.transaction import Cause
from halfway.kafka import codec
from halfway.pipeline.access import KafkaAccess
from halfway.pipeline.folders import Folder
from halfway.pipeline.jobs import ledger
from halfway.pipeline.jobs.ledger import LedgerOptions, Tables
from tests.fixtures_kafka import Kafka

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SHARDS = 2
CREATED = 1_700_000_000_000
MESSAGE = Message(topic="orders", key=b"k", value=b"v")
THREE_BATCHES = LedgerOptions(once=True, max_records=400)


class Topics:
    """half, op and parked under a prefix of their own, and the transactions written to them."""

    def __init__(self, bootstrap_servers: str) -> None:
        self.access = KafkaAccess(java={"bootstrap.servers": bootstrap_servers}, prefix=f"_t{uuid4().hex[:12]}.")
        admin = AdminClient({"bootstrap.servers": bootstrap_servers})
        new = [NewTopic(self.access.topic(kind), num_partitions=SHARDS) for kind in ("half", "op", "parked")]
        for made in admin.create_topics(new).values():
            made.result(20)
        self._producer = Producer({"bootstrap.servers": bootstrap_servers, "transactional.id": uuid4().hex})
        self._producer.init_transactions(30)
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
        self._producer.commit_transaction(30)
        self._producer.begin_transaction()
        for number in range(first, first + count, 3):
            self._end(f"tx-{number}", number, OpKind.COMMITTED)
        self._producer.flush(30)
        self._producer.abort_transaction(30)

    def end_rest(self) -> None:
        """End what is pending."""
        self._producer.begin_transaction()
        for name in self.pending:
            self._end(name, int(name.removeprefix("tx-")), OpKind.ROLLED_BACK)
        self._producer.commit_transaction(30)
        self.ended |= self.pending
        self.pending = set()

    def _half(self, name: str, number: int) -> None:
        half = Half(
            id=name,
            group="g",
            messages=(MESSAGE,),
            prepared_at=CREATED + number,
            since=CREATED + number,
            fingerprint=b"f" * 16,
        )
        self._put("half", name, number, codec.encode_half(half), "prepared")

    def _end(self, name: str, number: int, kind: OpKind) -> None:
        op = Op(
            kind=kind,
            id=name,
            group="g",
            half_offset=0,
            cause=Cause.PRODUCER,
            prepared_at=CREATED + number,
            at=CREATED + 2 * number,
            messages=(MessageDigest.of(MESSAGE),),
        )
        state = "committed" if kind is OpKind.COMMITTED else "rolled_back"
        self._put("op", name, number, codec.encode_op(op), state)
        self._put("half", name, number, None, state)

    def _put(self, kind: str, name: str, number: int, value: bytes | None, state: str) -> None:
        headers = codec.record_headers(kind, "g", state)
        self._producer.produce(self.access.topic(kind), value, name.encode(), number % SHARDS, headers=headers)
        self._producer.poll(0)


@pytest.fixture
def topics(kafka: Kafka) -> Topics:
    return Topics(kafka.bootstrap_servers)


class StoppedError(Exception):
    """What stops a batch in its middle."""


def run(spark: "SparkSession", topics: Topics, folder: Path, options: LedgerOptions = THREE_BATCHES) -> None:
    ledger.start(spark, topics.access, Folder(spark, str(folder)), options).awaitTermination()


def ended_ids(spark: "SparkSession", folder: Path) -> list[str]:
    table = ledger.ended(spark, Folder(spark, str(folder)))
    assert table is not None
    return sorted(row["id"] for row in table.select("id").collect())


def pending_ids(spark: "SparkSession", folder: Path) -> list[str]:
    table = ledger.pending(spark, Folder(spark, str(folder)))
    assert table is not None
    return sorted(row["id"] for row in table.select("id").collect())


def test_each_outcome_is_written_once_and_pending_is_replaced(
    spark: "SparkSession", topics: Topics, tmp_path: Path
) -> None:
    """Over several batches and starts: a row when it ends, what has not ended stands apart, aborted writes nowhere."""
    topics.write(0, 300)
    run(spark, topics, tmp_path)
    assert ended_ids(spark, tmp_path) == sorted(topics.ended)
    assert pending_ids(spark, tmp_path) == sorted(topics.pending)
    topics.write(300, 150)
    topics.end_rest()
    run(spark, topics, tmp_path)
    assert ended_ids(spark, tmp_path) == sorted(topics.ended)
    assert pending_ids(spark, tmp_path) == []


@pytest.mark.parametrize("at", [0, 1, 3])
def test_stopped_in_the_middle_of_a_batch_and_started_again_it_gives_the_same_table(
    spark: "SparkSession", topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Whichever table was written last before it stopped, in whichever batch, no row is lost and none is doubled."""
    topics.write(0, 300)
    writes: list[str] = []
    overwrite = Tables._overwrite

    def stopping(self: Tables, table: "DataFrame", name: str, number: int) -> Any:
        overwrite(self, table, name, number)
        writes.append(name)
        if len(writes) == at + 1:
            raise StoppedError

    from pyspark.errors import StreamingQueryException

    monkeypatch.setattr(Tables, "_overwrite", stopping)
    with pytest.raises(StreamingQueryException):
        run(spark, topics, tmp_path)
    run(spark, topics, tmp_path)
    assert len(writes) > at + 2
    assert ended_ids(spark, tmp_path) == sorted(topics.ended)
    assert pending_ids(spark, tmp_path) == sorted(topics.pending)
