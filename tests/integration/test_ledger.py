"""The ledger's stream on a real broker: each outcome once, however often it is killed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from confluent_kafka import OFFSET_END, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # they are there
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException

from halfway.domain.records import Half, Message, MessageDigest, Op, OpKind
from halfway.domain.transaction import Cause
from halfway.kafka import codec
from halfway.pipeline import delta
from halfway.pipeline.access import KafkaAccess
from halfway.pipeline.errors import SourceError
from halfway.pipeline.folders import Folder
from halfway.pipeline.jobs import ledger
from halfway.pipeline.jobs.ledger import Format, LedgerOptions, Progress, Span
from tests.fixtures_kafka import Kafka
from tests.fixtures_spark import Command
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
        self._admin = AdminClient({"bootstrap.servers": bootstrap_servers})
        new = [NewTopic(self.access.topic(kind), num_partitions=SHARDS) for kind in ("half", "op", "parked")]
        for made in self._admin.create_topics(new).values():
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

    def end_rest(self, *, tombstones: bool = True) -> None:
        """End what is pending."""
        self._producer.begin_transaction()
        for name in self.pending:
            self._end(name, int(name.removeprefix("tx-")), OpKind.ROLLED_BACK, tombstone=tombstones)
        self._producer.commit_transaction(30)
        self.ended |= self.pending
        self.pending = set()

    def write_outcome(self, number: int) -> None:
        """Write an outcome alone, as a ledger sees it that reads op faster than half."""
        self._producer.begin_transaction()
        self._end(f"tx-{number}", number, OpKind.COMMITTED, tombstone=False)
        self._producer.commit_transaction(30)
        self.ended.add(f"tx-{number}")

    def write_half(self, number: int) -> None:
        """Write a half alone, of which the tombstone is gone or not there yet."""
        self._producer.begin_transaction()
        self._half(f"tx-{number}", number)
        self._producer.commit_transaction(30)

    def remove_ops(self) -> None:
        """Remove what op holds, as retention does."""
        ends = [TopicPartition(self.access.topic("op"), shard, OFFSET_END) for shard in range(SHARDS)]
        for removed in self._admin.delete_records(ends).values():
            removed.result(20)

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

    def _end(self, name: str, number: int, kind: OpKind, *, tombstone: bool = True) -> None:
        op = Op(
            kind=kind,
            id=name,
            group="g",
            half_offset=0,
            cause=Cause.PRODUCER,
            prepared_at=CREATED + number,
            at=round(time.time() * 1000),
            messages=(MessageDigest.of(MESSAGE),),
        )
        state = "committed" if kind is OpKind.COMMITTED else "rolled_back"
        self._put("op", name, number, codec.encode_op(op), state)
        if tombstone:
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
    topics.write(0, 100)
    options = LedgerOptions(once=True, max_records=80, format=table_format)
    moments: tuple[Moment, ...] = ("begun", "first table written", "all written")
    for moment in moments:
        with dying(moment, die), pytest.raises(StreamingQueryException, match="DiedError"):
            run(spark, topics, tmp_path, options)
        assert batch_under_way(tmp_path)
    run(spark, topics, tmp_path, options)
    assert ended_ids(spark, tmp_path) == sorted(topics.ended)
    assert pending_ids(spark, tmp_path) == sorted(topics.pending)


def test_killed_without_warning_it_goes_on_to_the_table_of_one_that_was_not(
    spark: "SparkSession", topics: Topics, tmp_path: Path
) -> None:
    """Python and Spark's JVM are killed while files are half written, which only a kill leaves behind."""
    topics.write(0, 100)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    moment: Moment = "half written"
    assert process(topics, killed, dying_ledger.__name__, moment) == -signal.SIGKILL
    assert batch_under_way(killed)
    run(spark, topics, killed, LedgerOptions(once=True, max_records=120))
    run(spark, topics, whole)
    assert ended_rows(spark, killed) == ended_rows(spark, whole)
    assert pending_ids(spark, killed) == pending_ids(spark, whole) == sorted(topics.pending)


def batch_under_way(folder: Path) -> bool:
    """Whether a batch was begun and not noted as done."""
    begun = [int(file.name) for file in (folder / ledger.CHECKPOINT / "offsets").iterdir() if file.name.isdigit()]
    return not (folder / ledger.CHECKPOINT / "commits" / str(max(begun))).exists()


def process(topics: Topics, folder: Path, *program: str) -> int:
    """Run the command as a user does and give its exit status."""
    options = {
        "--master": "local[2]",
        "--memory": "1g",
        "--max-records": "80",
        "--output": str(folder),
    }
    conf = {"spark.driver.extraJavaOptions": JVM, "spark.sql.shuffle.partitions": "2"}
    settings = {
        "HALFWAY_KAFKA__BOOTSTRAP_SERVERS": topics.access.bootstrap_servers,
        "HALFWAY_KAFKA_PREFIX": topics.access.prefix,
    }
    # Not the gateway of this process.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HALFWAY_", "PYSPARK_"))}
    running = subprocess.Popen(
        [
            *(sys.executable, "-m", *program, "ledger", "--once"),
            *(part for pair in options.items() for part in pair),
            *(part for name, value in conf.items() for part in ("--conf", f"{name}={value}")),
        ],
        env=inherited | settings,
        start_new_session=True,
    )
    try:
        return running.wait(300)
    finally:
        if running.returncode is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


@pytest.mark.parametrize("table_format", FORMATS)
def test_a_reader_in_the_middle_of_a_batch_sees_the_one_before(
    spark: "SparkSession", topics: Topics, tmp_path: Path, table_format: Format
) -> None:
    """What a batch ends stands in one of the two tables, also while only one of them has the batch."""
    options = LedgerOptions(once=True, format=table_format)
    folder = Folder(spark, str(tmp_path))
    topics.write(0, 30)
    with dying("first table written", die, batch_of_run=1), pytest.raises(StreamingQueryException, match="DiedError"):
        run(spark, topics, tmp_path, options)
    assert ledger.tables(spark, folder) is None
    run(spark, topics, tmp_path, options)
    before = sorted(topics.ended), sorted(topics.pending)
    topics.end_rest()
    with dying("first table written", die, batch_of_run=1), pytest.raises(StreamingQueryException, match="DiedError"):
        run(spark, topics, tmp_path, options)
    assert (ended_ids(spark, tmp_path), pending_ids(spark, tmp_path)) == before
    run(spark, topics, tmp_path, options)
    assert (ended_ids(spark, tmp_path), pending_ids(spark, tmp_path)) == (sorted(topics.ended), [])


def test_an_outcome_counts_whose_tombstone_was_never_seen(
    spark: "SparkSession", topics: Topics, tmp_path: Path
) -> None:
    """Kafka has removed it while the ledger did not run: the outcome is enough, whenever it was read."""
    topics.write(0, 30)
    run(spark, topics, tmp_path)
    topics.end_rest(tombstones=False)
    run(spark, topics, tmp_path)
    assert pending_ids(spark, tmp_path) == []
    topics.write_outcome(100)
    run(spark, topics, tmp_path)
    topics.write_half(100)
    run(spark, topics, tmp_path)
    topics.write(200, 3)
    run(spark, topics, tmp_path)
    assert pending_ids(spark, tmp_path) == sorted(topics.pending)
    assert ended_ids(spark, tmp_path) == sorted(topics.ended)


@pytest.mark.parametrize("table_format", FORMATS)
def test_tables_and_checkpoint_stay_together(
    spark: "SparkSession", topics: Topics, tmp_path: Path, table_format: Format
) -> None:
    """Without the one, or with another state of it, the other is not gone on with; and the remedy helps."""
    options = LedgerOptions(once=True, format=table_format)
    checkpoint, older, newer = tmp_path / ledger.CHECKPOINT, tmp_path / "older", tmp_path / "newer"
    topics.write(0, 30)
    run(spark, topics, tmp_path, options)
    shutil.copytree(checkpoint, older)
    topics.write(30, 30)
    run(spark, topics, tmp_path, options)
    checkpoint.rename(newer)
    refused(spark, topics, tmp_path, options)
    older.rename(checkpoint)
    refused(spark, topics, tmp_path, options)
    shutil.rmtree(checkpoint)
    newer.rename(checkpoint)
    shutil.rmtree(tmp_path / ledger.PENDING)
    refused(spark, topics, tmp_path, options)
    for name in (ledger.ENDED, ledger.CHECKPOINT):
        shutil.rmtree(tmp_path / name)
    run(spark, topics, tmp_path, options)
    assert ended_ids(spark, tmp_path) == sorted(topics.ended)
    assert pending_ids(spark, tmp_path) == sorted(topics.pending)


def refused(spark: "SparkSession", topics: Topics, folder: Path, options: LedgerOptions) -> None:
    there = ended_files(folder)
    with pytest.raises(SourceError, match=r"take another folder, or delete .*ended.* _checkpoint") as error:
        run(spark, topics, folder, options)
    assert str(folder) in str(error.value)
    assert ended_files(folder) == there


def ended_files(folder: Path) -> list[Path]:
    return sorted((folder / ledger.ENDED).rglob("*"))


def test_batches_are_merged_and_read_once_wherever_that_ends(
    spark: "SparkSession", topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it merges, with half of a merged folder written or half of the small ones deleted, too."""
    monkeypatch.setattr(ledger, "WIDTHS", (2, 4))
    ended, runs = tmp_path / ledger.ENDED, 0
    seen: set[str] = set()

    def batch(*, fails: bool = False) -> None:
        nonlocal runs
        topics.write(10 * runs, 3)
        runs += 1
        if fails:
            with pytest.raises(StreamingQueryException, match="DiedError"):
                run(spark, topics, tmp_path)
            assert set(ended_ids(spark, tmp_path)) < topics.ended
        run(spark, topics, tmp_path)
        seen.update(name.name for name in ended.iterdir())
        assert ended_ids(spark, tmp_path) == sorted(topics.ended)
        assert pending_ids(spark, tmp_path) == sorted(topics.pending)

    for _ in range(2):
        batch()
    with monkeypatch.context() as patched:
        merge = ledger.Tables._merge_into

        def half_written(self: ledger.Tables, merged: Span, spans: list[Span]) -> None:
            merge(self, merged, spans)
            (ended / merged.name / "_SUCCESS").unlink()
            patched.undo()
            raise DiedError

        patched.setattr(ledger.Tables, "_merge_into", half_written)
        batch(fails=True)
    batch()
    with monkeypatch.context() as patched:

        def half_deleted(self: Folder, *parts: str) -> None:
            next((tmp_path.joinpath(*parts)).glob("part-*")).unlink()
            patched.undo()
            raise DiedError

        patched.setattr(Folder, "delete", half_deleted)
        batch(fails=True)
    for _ in range(4):
        batch()
    assert {"batch=0", "batch=0-1", "batch=0-3", "batch=4-7"} <= seen
    assert "batch=0-1" not in {name.name for name in ended.iterdir()}
    assert len(list(ended.iterdir())) < runs


def test_a_merged_folder_does_not_grow_without_end(
    spark: "SparkSession", topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that are large already stay as they are."""
    monkeypatch.setattr(ledger, "WIDTHS", (2,))
    monkeypatch.setattr(ledger, "LARGE_BYTES", 100)
    topics.write(0, 60)
    run(spark, topics, tmp_path, LedgerOptions(once=True, max_records=60))
    names = {name.name for name in (tmp_path / ledger.ENDED).iterdir()}
    assert len(names) > 2
    assert names == {f"batch={number}" for number in range(len(names))}
    assert ended_ids(spark, tmp_path) == sorted(topics.ended)


def test_a_delta_table_can_be_compacted_between_batches(spark: "SparkSession", topics: Topics, tmp_path: Path) -> None:
    """By deltalake's own means; the batch that was appended last is known still."""
    options = LedgerOptions(once=True, max_records=120, format="delta")
    topics.write(0, 150)
    run(spark, topics, tmp_path, options)
    topics.write(150, 30)
    with dying("first table written", die, batch_of_run=1), pytest.raises(StreamingQueryException, match="DiedError"):
        run(spark, topics, tmp_path, options)
    DeltaTable(str(tmp_path / ledger.ENDED)).optimize.compact()
    run(spark, topics, tmp_path, options)
    assert len(DeltaTable(str(tmp_path / ledger.ENDED)).file_uris()) == 1
    assert ended_ids(spark, tmp_path) == sorted(topics.ended)


def test_delta_refuses_where_only_spark_could_write() -> None:
    """A URI that deltalake does not know would become a folder of this machine."""
    with pytest.raises(SourceError, match="cannot be written to wasbs: URIs"):
        delta.demand("wasbs://container@account.blob.core.windows.net/ledger/ended")


def test_outcomes_that_were_removed_before_they_were_read_are_told(
    spark: "SparkSession", topics: Topics, tmp_path: Path
) -> None:
    """How many at most, once; a first start has missed nothing that it could know of."""
    warnings: list[str] = []
    missed = 30

    def once() -> None:
        folder = Folder(spark, str(tmp_path))
        ledger.start(spark, topics.access, folder, LedgerOptions(once=True), warn=warnings.append).awaitTermination()

    topics.write(0, 30)
    topics.remove_ops()
    topics.write(30, 30)
    once()
    assert not warnings
    for number in range(100, 100 + missed):
        topics.write_outcome(number)
    topics.remove_ops()
    once()
    (warning,) = warnings
    # With each outcome, the marker of its Kafka transaction.
    assert f"removed up to {2 * missed} records of {topics.access.topic('op')}" in warning


def test_each_batch_is_told(spark: "SparkSession", topics: Topics, tmp_path: Path) -> None:
    """What it read and wrote, and what is pending after it."""
    topics.write(0, 300)
    batches: list[Progress] = []
    folder = Folder(spark, str(tmp_path))
    ledger.start(spark, topics.access, folder, THREE_BATCHES, done=batches.append).awaitTermination()
    assert [one.batch for one in batches] == list(range(len(batches)))
    assert len(batches) > 1
    assert sum(one.ended for one in batches) == len(topics.ended)
    assert sum(one.records for one in batches) == 300 + 2 * len(topics.ended)
    assert batches[-1].pending == len(topics.pending)


def test_the_command_tells_what_it_does(command: Command, topics: Topics, tmp_path: Path) -> None:
    """Folder and topics, each batch, and at the end the outcomes; on stderr, and not the password."""
    topics.write(0, 30)
    result = command(
        *("ledger", "--once", "--output", str(tmp_path)),
        HALFWAY_KAFKA__BOOTSTRAP_SERVERS=topics.access.bootstrap_servers,
        HALFWAY_KAFKA_PREFIX=topics.access.prefix,
        HALFWAY_PIPELINE_KAFKA__SSL_KEY_PASSWORD="not-to-be-told",
    )
    assert (result.exit_code, result.stdout) == (0, "")
    begun, batch, ended = result.stderr.splitlines()
    assert str(tmp_path) in begun
    assert topics.access.topic("op") in begun
    assert "batch 0: 70 records" in batch
    assert "20 ended, 10 pending" in batch
    assert "20 outcomes written" in ended
    assert "not-to-be-told" not in result.stderr


def test_of_two_ledgers_over_one_folder_one_fails(spark: "SparkSession", topics: Topics, tmp_path: Path) -> None:
    """Another one has gone on meanwhile: a batch that it has noted is not noted again."""
    options = LedgerOptions(once=True, max_records=120)
    topics.write(0, 100)

    def overtake() -> None:
        assert process(topics, tmp_path, "halfway.pipeline") == 0

    with dying("all written", overtake), pytest.raises(StreamingQueryException, match=r"(?i)concurrent"):
        run(spark, topics, tmp_path, options)
    run(spark, topics, tmp_path, options)
    assert ended_ids(spark, tmp_path) == sorted(topics.ended)
    assert pending_ids(spark, tmp_path) == sorted(topics.pending)


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
