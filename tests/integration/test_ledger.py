"""The ledger's stream on a real broker: each outcome once, however often it is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # they are there
from pyspark.errors import StreamingQueryException

from halfway.domain.records import Half, Message, MessageDigest, Op, OpKind
from halfway.domain.transaction import Cause
from halfway.kafka import codec
from halfway.pipeline.access import KafkaAccess
from halfway.pipeline.errors import SourceError
from halfway.pipeline.folders import Folder
from halfway.pipeline.jobs import ledger
from halfway.pipeline.jobs.ledger import Format, LedgerOptions
from tests.fixtures_kafka import Kafka
from tests.integration import dying_ledger
from tests.integration.dying_ledger import Moment, dying

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHARDS = 2
CREATED = 1_700_000_000_000
MESSAGE = Message(topic="orders", key=b"k", value=b"v")
JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
FORMATS: tuple[Format, Format] = ("parquet", "delta")
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


def run(spark: "SparkSession", topics: Topics, folder: Path, options: LedgerOptions = THREE_BATCHES) -> None:
    ledger.start(spark, topics.access, Folder(spark, str(folder)), options).awaitTermination()


def ended_ids(spark: "SparkSession", folder: Path) -> list[str]:
    table = ledger.ended(spark, Folder(spark, str(folder)))
    assert table is not None
    return sorted(row["id"] for row in table.select("id").collect())


def ended_rows(spark: "SparkSession", folder: Path) -> list[str]:
    table = ledger.ended(spark, Folder(spark, str(folder)))
    assert table is not None
    return sorted(map(repr, table.collect()))


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


class DiedError(Exception):
    """What a ledger of this process dies of."""


def die() -> None:
    raise DiedError


@pytest.mark.parametrize("table_format", FORMATS)
def test_it_can_fail_at_any_moment_of_a_batch(
    spark: "SparkSession", topics: Topics, tmp_path: Path, table_format: Format
) -> None:
    """Again and again, each time in the batch after: no row is lost and none is doubled."""
    topics.write(0, 300)
    options = LedgerOptions(once=True, max_records=120, format=table_format)
    moments: tuple[Moment, ...] = ("begun", "first table written", "all written")
    for moment in moments:
        with dying(moment, die), pytest.raises(StreamingQueryException, match="DiedError"):
            run(spark, topics, tmp_path, options)
        assert batch_under_way(tmp_path)
    run(spark, topics, tmp_path, options)
    assert ended_ids(spark, tmp_path) == sorted(topics.ended)
    assert pending_ids(spark, tmp_path) == sorted(topics.pending)


@pytest.mark.parametrize("table_format, moment", [("parquet", "half written"), ("delta", "all written")])
def test_killed_without_warning_it_goes_on_to_the_table_of_one_that_was_not(
    spark: "SparkSession", topics: Topics, tmp_path: Path, table_format: Format, moment: Moment
) -> None:
    """Python and Spark's JVM are killed while files are half written, or where only Spark's own note is missing."""
    topics.write(0, 300)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    assert dying_process(topics, killed, table_format, moment) == -signal.SIGKILL
    assert batch_under_way(killed)
    run(spark, topics, killed, LedgerOptions(once=True, max_records=120, format=table_format))
    run(spark, topics, whole)
    assert ended_rows(spark, killed) == ended_rows(spark, whole)
    assert pending_ids(spark, killed) == pending_ids(spark, whole) == sorted(topics.pending)


def batch_under_way(folder: Path) -> bool:
    """Whether a batch was begun and not noted as done."""
    begun = [int(file.name) for file in (folder / ledger.CHECKPOINT / "offsets").iterdir() if file.name.isdigit()]
    return not (folder / ledger.CHECKPOINT / "commits" / str(max(begun))).exists()


def dying_process(topics: Topics, folder: Path, table_format: Format, moment: Moment) -> int:
    """Run the command as a user does and give its exit status."""
    options = {
        "--master": "local[2]",
        "--memory": "1g",
        "--max-records": "120",
        "--output": str(folder),
        "--format": table_format,
    }
    conf = {"spark.driver.extraJavaOptions": JVM, "spark.sql.shuffle.partitions": "2"}
    settings = {
        "HALFWAY_KAFKA__BOOTSTRAP_SERVERS": topics.access.bootstrap_servers,
        "HALFWAY_KAFKA_PREFIX": topics.access.prefix,
    }
    # Not the gateway of this process.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HALFWAY_", "PYSPARK_"))}
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", dying_ledger.__name__, moment, "ledger", "--once"),
            *(part for pair in options.items() for part in pair),
            *(part for name, value in conf.items() for part in ("--conf", f"{name}={value}")),
        ],
        env=inherited | settings,
        start_new_session=True,
    )
    try:
        return process.wait(300)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_ledger_keeps_its_format(spark: "SparkSession", topics: Topics, tmp_path: Path) -> None:
    """Rows of one table never stand in two formats, of which a reader sees one."""
    topics.write(0, 3)
    once = {name: LedgerOptions(once=True, format=name) for name in FORMATS}
    for first, second in (FORMATS, reversed(FORMATS)):
        folder = tmp_path / first
        run(spark, topics, folder, once[first])
        assert ended_ids(spark, folder) == sorted(topics.ended)
        with pytest.raises(SourceError, match="another format"):
            run(spark, topics, folder, once[second])
