"""The ledger fails and is killed at any moment: each outcome is written once nevertheless."""

import os
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException

from halfway.pipeline.engines.engine import SparkEngine
from halfway.pipeline.jobs import ledger
from halfway.pipeline.jobs.ledger import LedgerOptions
from halfway.pipeline.tables import Folder
from tests.support.pipeline import dying_ledger
from tests.support.pipeline.dying_ledger import UNFINISHED, Moment, dying
from tests.support.pipeline.fixtures import QUICK, as_options, without_spark
from tests.support.pipeline.ledgers import (
    CREATED,
    GARBAGE,
    MESSAGE,
    SHARDS,
    Topics,
    die,
    ended_ids,
    pending_ids,
    run,
    unreadable,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


SECRET = "not-to-be-told"


def test_it_can_fail_at_any_moment_of_a_batch(spark: "SparkSession", topics: Topics, tmp_path: Path) -> None:
    """Again and again in the same batch, the first and the second: no row is lost and none is doubled.

    An unreadable record is quarantined, also once, and stops nothing. A concurrent reader sees the tables of the batch
    before, even while only one of them has the next one. The table is compacted in the meantime, and the batch that was
    appended last is still known.
    """
    topics.write_garbage()
    topics.write(0, 60)
    prepared = topics.ended | topics.pending
    topics.end_rest()
    topics.write_half(100)
    topics.write_garbage()
    options = LedgerOptions(once=True, max_records=120)

    def fail(moment: Moment, batch: int) -> None:
        with dying(moment, die, batch_of_run=batch), pytest.raises(StreamingQueryException, match="DiedError"):
            run(spark, topics, tmp_path, options)
        assert batch_under_way(tmp_path)

    fail("half written", 1)
    fail("quarantine begun", 1)
    fail("all written", 1)
    ended, pending = seen = ended_ids(spark, tmp_path), pending_ids(spark, tmp_path)
    assert len({*ended, *pending}) == len(ended) + len(pending)
    assert {*ended, *pending} <= prepared
    assert topics.ended & {*pending}, "what the second batch ends is pending before it"
    fail("first table written", 2)
    assert (ended_ids(spark, tmp_path), pending_ids(spark, tmp_path)) == seen
    fail("all written", 1)
    for name in (ledger.PENDING, ledger.ENDED):
        compact(tmp_path / name)
    run(spark, topics, tmp_path, options)
    assert ended_ids(spark, tmp_path) == sorted(topics.ended)
    assert pending_ids(spark, tmp_path) == ["tx-100"]
    assert unreadable(spark, tmp_path) == sorted(GARBAGE * 2)


def test_what_kafka_removes_between_two_attempts_takes_no_row_away(
    spark: "SparkSession", topics: Topics, tmp_path: Path
) -> None:
    """A repeated batch can find fewer records than before; its earlier rows stay."""
    topics.write(0, 30)
    with dying("first table written", die, batch_of_run=1), pytest.raises(StreamingQueryException, match="DiedError"):
        run(spark, topics, tmp_path)
    found = ledger.tables(SparkEngine(spark), Folder(spark, str(tmp_path)))
    assert found is None, "of the first batch only one table is there"
    topics.remove_ops()
    run(spark, topics, tmp_path)
    assert ended_ids(spark, tmp_path) == sorted(topics.ended)
    assert pending_ids(spark, tmp_path) == sorted(topics.pending)


def test_killed_without_warning_it_goes_on_to_the_table_of_one_that_was_not(
    spark: "SparkSession", topics: Topics, tmp_path: Path
) -> None:
    """Python and Spark's JVM are killed while files are partly written, and neither reveals the password.

    Another process goes on: that of the tests, whose Spark runs already.
    """
    topics.write(0, 100)
    assert process(topics, tmp_path) == -signal.SIGKILL
    assert batch_under_way(tmp_path)
    assert (tmp_path / ledger.ENDED / UNFINISHED).exists(), "nothing was half written"
    run(spark, topics, tmp_path)
    ended = sorted(DeltaTable(str(tmp_path / ledger.ENDED)).to_pyarrow_table().to_pylist(), key=itemgetter("id"))
    assert [row["id"] for row in ended] == sorted(topics.ended)
    for row in ended:
        number = int(row["id"].removeprefix("tx-"))
        assert row["outcome"] == ("committed" if number % 3 == 1 else "rolled_back")
        assert (row["group"], row["cause"], row["checks"]) == ("g", "producer", 0)
        assert row["prepared_at"] == datetime.fromtimestamp((CREATED + number) / 1000, UTC)
        assert row["ended_at"] - row["prepared_at"] == timedelta(milliseconds=row["latency_ms"])
        assert (row["topics"], row["messages"], row["size"]) == ([MESSAGE.topic], 1, 2)
        assert (row["shard"], row["ended_date"]) == (number % SHARDS, row["ended_at"].date())
    assert len({(row["shard"], row["op_offset"]) for row in ended}) == len(ended)
    assert SECRET not in (tmp_path / "told").read_text()
    pending = DeltaTable(str(tmp_path / ledger.PENDING)).to_pyarrow_table()
    assert sorted(pending["id"].to_pylist()) == sorted(topics.pending)


def test_of_two_ledgers_over_one_folder_one_fails(spark: "SparkSession", topics: Topics, tmp_path: Path) -> None:
    """Another ledger has continued in the meantime: a batch that it has recorded is not recorded again."""
    folder, others = tmp_path / "folder", tmp_path / "others"
    options = LedgerOptions(once=True, max_records=120)
    topics.write(0, 70)
    # One session does not run one stream twice: the other one changes the folder elsewhere, beforehand.
    run(spark, topics, others, options)

    def overtake() -> None:
        shutil.rmtree(folder)
        shutil.copytree(others, folder)

    with (
        dying("all written", overtake, batch_of_run=1),
        pytest.raises(StreamingQueryException, match=r"(?i)concurrent"),
    ):
        run(spark, topics, folder, options)
    run(spark, topics, folder, options)
    assert ended_ids(spark, folder) == sorted(topics.ended)
    assert pending_ids(spark, folder) == sorted(topics.pending)


def compact(table: Path) -> None:
    DeltaTable(str(table)).optimize.compact()
    assert len(DeltaTable(str(table)).file_uris()) == 1


def batch_under_way(folder: Path) -> bool:
    """Return whether a batch was begun and not recorded as done."""
    begun = [int(file.name) for file in (folder / ledger.CHECKPOINT / "offsets").iterdir() if file.name.isdigit()]
    return not (folder / ledger.CHECKPOINT / "commits" / str(max(begun))).exists()


def process(topics: Topics, folder: Path) -> int:
    """Run the command as a user does until it kills itself, and return its exit status."""
    options = {"--master": "local[1]", "--memory": "1g", "--max-records": "80", "--output": str(folder)}
    conf = QUICK | {"spark.sql.shuffle.partitions": "1"}
    settings = {
        "HALFWAY_KAFKA__BOOTSTRAP_SERVERS": topics.access.bootstrap_servers,
        "HALFWAY_KAFKA_PREFIX": topics.access.prefix,
        "HALFWAY_PIPELINE_KAFKA__SSL_KEY_PASSWORD": SECRET,
    }
    command = [
        *(sys.executable, "-m", dying_ledger.__name__, "half written", "ledger", "--once"),
        *(part for pair in options.items() for part in pair),
        *as_options(conf),
    ]
    with (folder / "told").open("a") as told:
        running = subprocess.Popen(
            command, env=without_spark() | settings, stdout=told, stderr=told, start_new_session=True
        )
    try:
        return running.wait(1000)
    finally:
        if running.returncode is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
