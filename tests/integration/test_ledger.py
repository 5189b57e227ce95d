"""The ledger's stream on a real broker: what it writes, and what it tells."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException

from halfway.pipeline.folders import Folder
from halfway.pipeline.jobs import ledger
from halfway.pipeline.jobs.ledger import Format, LedgerOptions, Progress
from tests.fixtures_spark import Command
from tests.integration.dying_ledger import dying
from tests.integration.ledgers import FORMATS, THREE_BATCHES, Topics, die, ended_ids, pending_ids, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_each_outcome_is_written_once_and_pending_is_replaced(
    spark: "SparkSession", topics: Topics, tmp_path: Path
) -> None:
    """Over several batches and starts: a row when it ends, what has not ended stands apart, aborted writes nowhere.

    Each batch is told: what it read and wrote, and what is pending after it.
    """
    topics.write(0, 300)
    batches: list[Progress] = []
    folder = Folder(spark, str(tmp_path))
    ledger.start(spark, topics.access, folder, THREE_BATCHES, done=batches.append).awaitTermination()
    assert [one.batch for one in batches] == list(range(len(batches)))
    assert len(batches) > 1
    assert sum(one.ended for one in batches) == len(topics.ended)
    assert sum(one.records for one in batches) == 300 + 2 * len(topics.ended)
    assert batches[-1].pending == len(topics.pending)
    assert ended_ids(spark, tmp_path) == sorted(topics.ended)
    assert pending_ids(spark, tmp_path) == sorted(topics.pending)
    topics.write(300, 150)
    topics.end_rest()
    run(spark, topics, tmp_path)
    assert ended_ids(spark, tmp_path) == sorted(topics.ended)
    assert pending_ids(spark, tmp_path) == []


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
    topics.write_outcome(100)
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
