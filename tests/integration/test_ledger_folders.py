"""The ledger's folder over months: merged, compacted, restored, and of one format."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException

from halfway.pipeline import delta
from halfway.pipeline.errors import SourceError
from halfway.pipeline.folders import Folder
from halfway.pipeline.jobs import ledger
from halfway.pipeline.jobs.ledger import Format, LedgerOptions, Span
from tests.support.pipeline.ledgers import DiedError, Topics, ended_ids, pending_ids, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_tables_and_checkpoint_stay_together(spark: "SparkSession", topics: Topics, tmp_path: Path) -> None:
    """Without the one, or with another state of it, the other is not gone on with; and the remedy helps."""
    options = LedgerOptions(once=True)
    checkpoint, older, newer = tmp_path / ledger.CHECKPOINT, tmp_path / "older", tmp_path / "newer"
    ended, away = tmp_path / ledger.ENDED, tmp_path / "away"
    topics.write(0, 30)
    run(spark, topics, tmp_path, options)
    shutil.copytree(checkpoint, older)
    topics.write(30, 30)
    run(spark, topics, tmp_path, options)
    refused_in_another_format(spark, topics, tmp_path, "delta")
    checkpoint.rename(newer)
    refused(spark, topics, tmp_path, options)
    older.rename(checkpoint)
    refused(spark, topics, tmp_path, options)
    shutil.rmtree(checkpoint)
    newer.rename(checkpoint)
    for missing in (ended, *ended.iterdir()):
        missing.rename(away)
        refused(spark, topics, tmp_path, options)
        away.rename(missing)
    shutil.rmtree(tmp_path / ledger.PENDING)
    refused(spark, topics, tmp_path, options)
    for name in (ledger.ENDED, ledger.CHECKPOINT):
        shutil.rmtree(tmp_path / name)
    run(spark, topics, tmp_path, options)
    assert ended_ids(spark, tmp_path) == sorted(topics.ended)
    assert pending_ids(spark, tmp_path) == sorted(topics.pending)


def test_a_delta_table_stays_with_its_checkpoint(spark: "SparkSession", topics: Topics, tmp_path: Path) -> None:
    """And is never gone on with in Parquet."""
    options = LedgerOptions(once=True, format="delta")
    topics.write(0, 30)
    run(spark, topics, tmp_path, options)
    refused_in_another_format(spark, topics, tmp_path, "parquet")
    for missing in (ledger.ENDED, ledger.CHECKPOINT):
        shutil.rmtree(tmp_path / missing)
        refused(spark, topics, tmp_path, options)


def refused_in_another_format(spark: "SparkSession", topics: Topics, folder: Path, other: Format) -> None:
    """Rows of one table never stand in two formats, of which a reader sees one."""
    with pytest.raises(SourceError, match=f"another format than {other}"):
        run(spark, topics, folder, LedgerOptions(once=True, format=other))


def refused(spark: "SparkSession", topics: Topics, folder: Path, options: LedgerOptions) -> None:
    there = ended_files(folder)
    tables = [name for name in (ledger.ENDED, ledger.PENDING) if (folder / name).exists()]
    remedy = f"take another folder, or delete {', '.join([*tables, ledger.CHECKPOINT])} there"
    with pytest.raises(SourceError, match=remedy) as error:
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
    options = LedgerOptions(once=True, max_records=36)
    folder, ended = Folder(spark, str(tmp_path)), tmp_path / ledger.ENDED
    merge, delete = ledger.Tables._merge_into, Folder.delete
    reads: list[list[str]] = []

    def look() -> set[str]:
        reads.append(ended_ids(spark, tmp_path))
        return {name.name for name in ended.iterdir()}

    def half_written(self: ledger.Tables, merged: Span, spans: list[Span]) -> None:
        merge(self, merged, spans)
        (ended / merged.name / "_SUCCESS").unlink()
        raise DiedError

    def half_deleted(self: Folder, *parts: str) -> None:
        if parts[0] != ledger.ENDED:
            return delete(self, *parts)
        next((tmp_path.joinpath(*parts)).glob("part-*")).unlink()
        raise DiedError

    topics.write(0, 60)
    for owner, name, fails in ((ledger.Tables, "_merge_into", half_written), (Folder, "delete", half_deleted)):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fails)
            with pytest.raises(StreamingQueryException, match="DiedError"):
                run(spark, topics, tmp_path, options)
        assert {"batch=0", "batch=0-1", "batch=1"} <= look()
    run(spark, topics, tmp_path, options)
    assert {"batch=0-1", "batch=2-3", "batch=0-3"} <= look()
    # As the eighth batch would: what the four first stand in together is old enough.
    later = ledger.Tables(spark, folder, topics.access.prefix, options, lambda _: None)
    later._merge(8)
    names = {name.name for name in ended.iterdir()}
    assert {"batch=0-3", "batch=4-7"} <= names
    assert names.isdisjoint({"batch=0", "batch=0-1", "batch=2-3"})
    table = later._ended(spark)
    assert table is not None
    reads.append(sorted(row["id"] for row in table.collect()))
    assert all(len({*found}) == len(found) for found in reads)
    assert {*reads[0]} < {*reads[1]} <= topics.ended
    assert reads[-1] == reads[-2] == sorted(topics.ended)
    assert pending_ids(spark, tmp_path) == sorted(topics.pending)


def test_a_merged_folder_does_not_grow_without_end(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that are large already stay as they are, beside others that are merged."""
    monkeypatch.setattr(ledger, "WIDTHS", (2,))
    monkeypatch.setattr(ledger, "LARGE_BYTES", 10_000)
    tables = ledger.Tables(spark, Folder(spark, str(tmp_path)), "_halfway.", LedgerOptions(), lambda _: None)
    ended = tmp_path / ledger.ENDED
    for number, size in enumerate((20_000, 20_000, 1, 1)):
        folder = ended / f"batch={number}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"id": [os.urandom(size).hex()]}), folder / "part-0.parquet")
        (folder / "_SUCCESS").touch()
    for number in range(1, 5):
        tables._merge(number)
    assert {name.name for name in ended.iterdir()} == {"batch=0", "batch=1", "batch=2", "batch=3", "batch=2-3"}


def test_delta_refuses_where_only_spark_could_write() -> None:
    """A URI that deltalake does not know would become a folder of this machine."""
    with pytest.raises(SourceError, match="cannot be written to wasbs: URIs"):
        delta.demand("wasbs://container@account.blob.core.windows.net/ledger/ended")
