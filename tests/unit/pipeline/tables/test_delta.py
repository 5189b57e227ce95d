"""What a log says of the batches of a writer."""

from datetime import date
from pathlib import Path

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.tables import delta
from halfway.pipeline.tables.folders import LocalFolder


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
