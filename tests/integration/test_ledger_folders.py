"""The ledger's folder over months: compacted, restored, exported, and of one format."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from halfway.pipeline.errors import PipelineError
from halfway.pipeline.jobs import ledger
from halfway.pipeline.jobs.ledger import LedgerOptions
from halfway.pipeline.tables import Folder
from tests.support.pipeline.ledgers import Topics, ended_ids, pending_ids, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_tables_and_checkpoint_stay_together(spark: "SparkSession", topics: Topics, tmp_path: Path) -> None:
    """Without one of them, or with another state of it, the other is refused; and the remedy helps."""
    options = LedgerOptions(once=True)
    checkpoint, older, newer = tmp_path / ledger.CHECKPOINT, tmp_path / "older", tmp_path / "newer"
    ended, away = tmp_path / ledger.ENDED, tmp_path / "away"
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
    ended.rename(away)
    refused(spark, topics, tmp_path, options)
    away.rename(ended)
    shutil.rmtree(tmp_path / ledger.PENDING)
    refused(spark, topics, tmp_path, options)
    for name in (ledger.ENDED, ledger.CHECKPOINT):
        shutil.rmtree(tmp_path / name)
    run(spark, topics, tmp_path, options)
    assert ended_ids(spark, tmp_path) == sorted(topics.ended)
    assert pending_ids(spark, tmp_path) == sorted(topics.pending)


def refused(spark: "SparkSession", topics: Topics, folder: Path, options: LedgerOptions) -> None:
    there = ended_files(folder)
    tables = [name for name in (ledger.ENDED, ledger.PENDING) if (folder / name).exists()]
    remedy = f"take another folder, or delete {', '.join([*tables, ledger.CHECKPOINT])} there"
    with pytest.raises(PipelineError, match=remedy) as error:
        run(spark, topics, folder, options)
    assert str(folder) in str(error.value)
    assert ended_files(folder) == there


def ended_files(folder: Path) -> list[Path]:
    return sorted((folder / ledger.ENDED).rglob("*"))


def test_days_are_folders_and_files_tell_the_bounds_of_times(
    spark: "SparkSession", topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a warehouse skips unneeded files; many small files become one; plain Parquet is an export."""
    monkeypatch.setattr(ledger, "COMPACTED_AFTER", 2)
    topics.write(0, 60)
    run(spark, topics, tmp_path, LedgerOptions(once=True, max_records=60))
    table = DeltaTable(str(tmp_path / ledger.ENDED))
    assert table.metadata().partition_columns == [ledger.DAY]
    assert len(table.file_uris()) < table.version(), "each batch has added a file"
    exported = tmp_path / "exported"
    ledger.export(spark, Folder(spark, str(tmp_path)), Folder(spark, str(exported)))
    read = pq.read_table(exported / ledger.ENDED)
    assert sorted(read["id"].to_pylist()) == sorted(topics.ended)
    assert read.schema.field("ended_at").type == pa.timestamp("us", "UTC")
    for file in (*table.file_uris(), *map(str, exported.rglob("ended_date=*/*.parquet"))):
        columns = pq.ParquetFile(file).metadata.row_group(0)
        times = [columns.column(n) for n in range(columns.num_columns)]
        (bounds,) = (each.statistics for each in times if each.path_in_schema == "ended_at")
        assert bounds.has_min_max
    assert len(pq.read_table(exported / ledger.PENDING)) == len(topics.pending)
