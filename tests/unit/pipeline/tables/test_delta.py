"""What a log says of the batches of a writer."""

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from halfway.pipeline import tables as delta
from halfway.pipeline.engines.dialect import Merge, Once
from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.engines.engine import SparkEngine
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.tables import LocalFolder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BY_ID = Merge(same="old.id = new.id", deletes="false", replaces="new.n > old.n", begins="true")


def test_a_table_is_read_as_of_a_batch(tmp_path: Path) -> None:
    """Commits of others, and those without a batch, change nothing."""
    folder, rows = LocalFolder(str(tmp_path)), pa.table({"id": ["a"]})
    assert delta.last(folder, "ended", "mine") == -1
    for writer, number in (("mine", 0), ("other", 7), ("mine", 1), (None, 0), ("mine", 2)):
        made = CommitProperties(app_transactions=[Transaction(writer, number)] if writer else [])
        write_deltalake(tmp_path / "ended", rows, mode="append", commit_properties=made)
    DeltaTable(tmp_path / "ended").optimize.compact()
    assert delta.versions(folder, "ended") == [5, 4, 3, 2, 1, 0]
    assert delta.last(folder, "ended", "mine") == 2
    assert [delta.as_of(folder, "ended", "mine", number) for number in (2, 1, 0)] == [4, 2, 0]


def test_duckdb_gives_the_columns_of_a_table_whatever_its_folder_is_called(tmp_path: Path) -> None:
    """The column by which it is partitioned is only in the names of folders, and `env=prod` is no column of it."""
    rows, engine = pa.table({"id": ["a"], "ended_date": [date(2026, 1, 2)]}), DuckEngine()
    write_deltalake(tmp_path / "env=prod" / "a b" / "ended", rows, partition_by=["ended_date"])
    assert engine.rows(engine.load(str(tmp_path / "env=prod" / "a b" / "ended"))) == rows.to_pylist()
    engine.close()


@pytest.mark.parametrize("name", ["a%20b", "a[b]", "a|b", "a^b", "a\\b"])
def test_a_folder_that_duckdb_would_take_for_another_one_is_refused(tmp_path: Path, name: str) -> None:
    """By its name and with a remedy, whether there is a table or not; names that look alike are none of these."""
    rows, engine = "id string, n int", DuckEngine()
    for usable in ("100%", "a b", "ä=#'\"`", "{a}"):
        path = str(tmp_path / usable / "table")
        engine.save(engine.table([("a", 1)], rows), path)
        engine.merge(engine.table([("b", 2)], rows), path, BY_ID)
        assert len(engine.rows(engine.load(path))) == 2
    path = str(tmp_path / name / "table")
    for does in (lambda: engine.save(engine.table([("a", 1)], rows), path), lambda: engine.load(path)):
        with pytest.raises(PipelineError, match=r"DuckDB cannot use tables in a folder with .*: rename .*, or") as told:
            does()
        assert repr(path) in str(told.value)
    assert not (tmp_path / name).exists()
    engine.close()


def test_a_commit_of_spark_that_changes_nothing_is_in_the_log(spark: "SparkSession", tmp_path: Path) -> None:
    """So a merge is not done again on either engine, and a run that finds nothing sees its own commits."""
    folder, rows, path = LocalFolder(str(tmp_path)), "id string, n int", str(tmp_path / "a`b")
    on_spark, on_duckdb = SparkEngine(spark), DuckEngine()
    on_spark.save(on_spark.table([("a", 1)], rows), path, once=Once("w", 0))
    on_spark.merge(on_spark.table([("a", 0)], rows), path, BY_ID, once=Once("w", 1))
    assert delta.last(folder, "a`b", "w") == 1
    on_spark.merge(on_spark.table([("a", 7)], rows), path, BY_ID, once=Once("w", 1))
    for engine in (on_spark, on_duckdb):
        engine.save(engine.table([("a", 7)], rows), path, once=Once("w", 1))
        assert engine.rows(engine.load(path)) == [{"id": "a", "n": 1}]
        assert delta.versions(folder, "a`b") == [1, 0]
    on_spark.save(on_spark.table([], rows), path)
    assert delta.versions(folder, "a`b") == [2, 1, 0]
    on_spark.close()
    on_duckdb.close()
