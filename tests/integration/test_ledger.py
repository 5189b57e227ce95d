"""The ledger's stream on a real broker: what it writes and reports."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from halfway.pipeline import tables as delta
from halfway.pipeline.jobs import ledger
from halfway.pipeline.jobs.ledger import LedgerOptions, Progress
from halfway.pipeline.sources.headers import LATEST_MS
from halfway.pipeline.tables import Folder
from halfway.protocol.records import MessageDigest, Op, OpKind
from halfway.protocol.transactions import Cause
from tests.support.pipeline.fixtures import Command
from tests.support.pipeline.ledgers import CREATED, SHARDS, Topics, ended_ids, parked_ids, pending_ids, run, unreadable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_each_outcome_is_written_once_and_pending_is_replaced(
    spark: "SparkSession", topics: Topics, tmp_path: Path
) -> None:
    """Over several batches and starts: a row for each ended one, pending ones separate, aborted writes nowhere.

    Parked transactions are pending until they end, resumed or not. Each batch is reported: what it read and wrote, and
    what is pending after it.
    """
    topics.write(0, 150)
    for number in (0, 3, 6):
        topics.park(number)
    batches: list[Progress] = []
    folder = Folder(spark, str(tmp_path))
    few = LedgerOptions(once=True, max_records=220)
    stream = ledger.start(spark, topics.access, folder, few, done=batches.append)
    stream.awaitTermination()
    assert [one.batch for one in batches] == list(range(len(batches)))
    # Spark counts a record each time that it reads it from Kafka.
    assert [progress.numInputRows for progress in stream.recentProgress] == [one.records for one in batches]
    assert len(batches) > 1
    assert sum(one.ended for one in batches) == len(topics.ended)
    assert sum(one.records for one in batches) == 150 + 2 * len(topics.ended) + 2 * 3
    assert batches[-1].pending == len(topics.pending)
    assert ended_ids(spark, tmp_path) == sorted(topics.ended)
    assert pending_ids(spark, tmp_path) == sorted(topics.pending)
    assert parked_ids(spark, tmp_path) == ["tx-0", "tx-3", "tx-6"]
    topics.write(150, 50)
    topics.resume(3)
    topics.end_rest()
    run(spark, topics, tmp_path)
    assert ended_ids(spark, tmp_path) == sorted(topics.ended)
    assert pending_ids(spark, tmp_path) == []
    assert unreadable(spark, tmp_path) == []


def test_a_ledger_goes_on_while_nothing_is_pending(spark: "SparkSession", topics: Topics, tmp_path: Path) -> None:
    """Batches that do not change `pending` count: the next start and the report depend on the last known batch."""
    for number in range(3):
        topics.write(10 * number, 10)
        topics.end_rest()
        run(spark, topics, tmp_path)
        assert ended_ids(spark, tmp_path) == sorted(topics.ended)
        assert pending_ids(spark, tmp_path) == []


def test_an_outcome_counts_whose_tombstone_was_never_seen(
    spark: "SparkSession", topics: Topics, tmp_path: Path
) -> None:
    """Kafka has removed it while the ledger did not run: the outcome is enough, at any later time."""
    topics.write(0, 30)
    topics.write_outcomes(100)
    run(spark, topics, tmp_path)
    assert pending_ids(spark, tmp_path) == sorted(topics.pending)
    topics.end_rest(tombstones=False)
    topics.write_half(100)
    run(spark, topics, tmp_path)
    assert pending_ids(spark, tmp_path) == []
    topics.write(200, 3)
    run(spark, topics, tmp_path)
    assert pending_ids(spark, tmp_path) == sorted(topics.pending)
    assert ended_ids(spark, tmp_path) == sorted(topics.ended)


def test_outcomes_that_were_removed_before_they_were_read_are_told(
    spark: "SparkSession", topics: Topics, tmp_path: Path
) -> None:
    """The maximum number, once; a first start cannot have missed anything."""
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
    topics.write_outcomes(*range(100, 100 + missed))
    topics.remove_ops()
    once()
    once()
    (warning,) = warnings
    # In both shards, including the marker of their Kafka transaction.
    assert f"removed up to {missed + SHARDS} records of {topics.access.topic('op')}" in warning


def test_numbers_that_cannot_be_stop_no_batch(spark: "SparkSession", topics: Topics, tmp_path: Path) -> None:
    """Avro does not limit the value: the outcome is quarantined, the others are written, the next start continues."""
    numbers = (-1, LATEST_MS + 1, (1 << 63) - 1, -(1 << 63))
    odd = []
    for field in ("prepared_at", "at", "size", "checks"):
        for number in numbers[2 * (field == "checks") :]:
            told: dict[str, Any] = {"prepared_at": CREATED, "at": CREATED, "size": 1, "checks": 0, field: number}
            message = MessageDigest(topic="orders", key_hash=None, value_hash=None, size=told.pop("size"))
            op = Op(
                kind=OpKind.COMMITTED, id=f"{field}-{number}", group="g", half_offset=0, cause=Cause.PRODUCER,
                messages=(message,), **told,
            )  # fmt: skip
            odd.append(op)
    last = structs.replace(odd[0], id="last", prepared_at=LATEST_MS, at=LATEST_MS)
    topics.write(0, 6)
    topics.write_ops(*odd, last)
    run(spark, topics, tmp_path)
    topics.write(6, 6)
    run(spark, topics, tmp_path)
    assert ended_ids(spark, tmp_path) == sorted([*topics.ended, "last"])
    assert pending_ids(spark, tmp_path) == sorted(topics.pending)
    assert len(unreadable(spark, tmp_path)) == len(odd)


def test_the_command_tells_what_it_does(command: Command, topics: Topics, tmp_path: Path) -> None:
    """Folder and topics, each batch, and finally the outcomes; on stderr, and without the password."""
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
    assert delta.LOG in {file.name for file in (tmp_path / ledger.ENDED).iterdir()}
