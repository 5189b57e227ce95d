"""Delta tables with one writer, each of whose batches counts once. The package `deltalake` needs no Spark."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from halfway.pipeline.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from deltalake import CommitProperties, DeltaTable
    from pyarrow.dataset import Dataset
    from pyspark.sql import DataFrame, SparkSession

LOG: Final = "_delta_log"
_SCHEMES: Final = ("file", "s3", "s3a", "abfs", "abfss", "gs", "hdfs")
"""The schemes of URIs that both deltalake and Spark, with the package of a file system, understand."""


def require_writable(uri: str) -> None:
    """Raise SourceError if the package is missing, or would take a URI for a local path."""
    try:
        import deltalake  # noqa: F401 - to know whether it is installed
    except ImportError:
        raise SourceError("Delta tables need the package deltalake: pip install '.[pipeline]' in a checkout") from None
    scheme = uri.partition(":")[0]
    if scheme not in _SCHEMES:
        raise SourceError(f"Delta tables cannot be written to {scheme}: URIs, only to {', '.join(_SCHEMES)}")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch of one writer. Its number is committed together with its rows (a `txn` action).

    The rows of a batch pass through the driver.
    """

    writer: str
    number: int

    @property
    def properties(self) -> CommitProperties:
        """The properties of a commit of this batch."""
        from deltalake import CommitProperties, Transaction

        return CommitProperties(app_transactions=[Transaction(self.writer, self.number)])

    def written(self, table: DeltaTable) -> bool:
        """Return whether a table has this batch already."""
        return _last(table, self.writer) >= self.number


@dataclass(frozen=True, kw_only=True)
class Merge:
    """How a row `new` changes the row `old` of a table, as SQL. Columns that the table lacks serve conditions only."""

    same: str
    deletes: str
    replaces: str
    begins: str
    settings: Mapping[str, str | None] = field(default_factory=dict)
    """The settings of a table that is created."""


def append(rows: DataFrame, uri: str, batch: Batch, *, by: tuple[str, ...] = ()) -> int:
    """Append rows and return their number, 0 if the batch is there already. A new table is partitioned by `by`."""
    from deltalake import write_deltalake

    # The rows are always computed, because their frame has observations.
    read = rows.toArrow()
    table = _opened(uri, read.schema, partition_by=list(by) or None)
    if batch.written(table):
        return 0
    write_deltalake(table, read, mode="append", commit_properties=batch.properties)
    return int(read.num_rows)


def merge(changes: DataFrame, uri: str, batch: Batch, columns: Sequence[str], rule: Merge) -> int:
    """Apply changes, unless the batch is there already, and return the number of rows of the table.

    Only files with a row that changes are written again.
    """
    from deltalake import write_deltalake

    # Always, as above.
    rows = changes.toArrow()
    schema = rows.select(list(columns)).schema
    table = _opened(uri, schema, configuration=rule.settings)
    if not batch.written(table):
        merging = table.merge(
            rows, rule.same, source_alias="new", target_alias="old", commit_properties=batch.properties
        )
        deciding = [name for name in rows.column_names if name not in schema.names]
        merging.when_matched_delete(rule.deletes)
        merging.when_matched_update_all(rule.replaces, except_cols=deciding)
        merging.when_not_matched_insert_all(rule.begins, except_cols=deciding)
        merging.execute()
    if not batch.written(table):
        # A merge that changes no row commits nothing, but the batch is done.
        write_deltalake(table, schema.empty_table(), mode="append", commit_properties=batch.properties)
    return count(table)


def _opened(uri: str, schema: pa.Schema, **settings: Any) -> DeltaTable:
    """Return a table, created first if it does not exist."""
    from deltalake import DeltaTable

    if DeltaTable.is_deltatable(uri):
        return DeltaTable(uri)
    return DeltaTable.create(uri, schema, mode="ignore", **settings)


def count(table: DeltaTable) -> int:
    """Return the number of rows of a table by its log."""
    return sum(table.get_add_actions(flatten=True).column("num_records").to_pylist())


def compact(uri: str) -> None:
    """Combine files, and delete files that have been out of use for longer than the table keeps them."""
    from deltalake import DeltaTable

    table = DeltaTable(uri)
    table.optimize.compact()
    table.vacuum(dry_run=False)


def last(uri: str, *, writer: str) -> int:
    """Return the number of the last batch of a writer, -1 if there is none."""
    from deltalake import DeltaTable

    return _last(DeltaTable(uri), writer) if DeltaTable.is_deltatable(uri) else -1


def _last(table: DeltaTable, writer: str) -> int:
    number = table.transaction_version(writer)
    return -1 if number is None else int(number)


def _as_of(uri: str, upto: Batch | None) -> DeltaTable:
    """Return a table as it is now, or as it was before its writer wrote more than a batch."""
    from deltalake import DeltaTable

    table = DeltaTable(uri)
    while upto is not None and table.version() and (table.transaction_version(upto.writer) or 0) > upto.number:
        table.load_as_version(table.version() - 1)
    return table


def read(spark: SparkSession, uri: str, *, upto: Batch | None = None) -> DataFrame:
    """Return a table as it is now, or as it was before its writer wrote more than a batch."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import from_arrow_schema

    table = _as_of(uri, upto)
    schema = from_arrow_schema(pa.schema(table.schema().to_arrow()))
    files = table.file_uris()
    # The names of the folders, not the files, have the column by which a table is partitioned.
    reader = spark.read.schema(schema).option("basePath", uri)
    return reader.parquet(*files) if files else spark.createDataFrame([], schema)


def dataset(uri: str, *, upto: Batch | None = None) -> Dataset:
    """Return the same without Spark."""
    found: Dataset = _as_of(uri, upto).to_pyarrow_dataset()
    return found
