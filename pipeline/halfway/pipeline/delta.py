"""Tables in Delta with one writer, whose batches each count once; the package `deltalake` needs no Spark."""

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
"""What both Spark, with the file system's own package, and deltalake can reach by the same URI."""


def demand(uri: str) -> None:
    """Raise SourceError where the package is missing, or cannot write there: it would take the URI for a local path."""
    try:
        import deltalake  # noqa: F401 - whether it can be imported is the question
    except ImportError:
        raise SourceError("Delta tables need the package deltalake: pip install '.[pipeline]' in a checkout") from None
    scheme = uri.partition(":")[0]
    if scheme not in _SCHEMES:
        raise SourceError(f"Delta tables cannot be written to {scheme}: URIs, only to {', '.join(_SCHEMES)}")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch of one writer. Its number is committed with its rows (a `txn` action): neither stands without the other.

    The rows of a batch pass through the driver.
    """

    writer: str
    number: int

    @property
    def properties(self) -> CommitProperties:
        """What a commit of this batch tells."""
        from deltalake import CommitProperties, Transaction

        return CommitProperties(app_transactions=[Transaction(self.writer, self.number)])

    def written(self, table: DeltaTable) -> bool:
        """Whether a table has this batch already."""
        return _last(table, self.writer) >= self.number


@dataclass(frozen=True, kw_only=True)
class Merge:
    """How a row `new` changes the row `old` of a table, as SQL; columns that the table lacks only decide."""

    same: str
    deletes: str
    replaces: str
    begins: str
    settings: Mapping[str, str | None] = field(default_factory=dict)
    """Of a table that is made now."""


def append(rows: DataFrame, uri: str, batch: Batch, *, by: tuple[str, ...] = ()) -> int:
    """Append rows and return their number, 0 if the batch is there already; a new table is partitioned by `by`."""
    from deltalake import write_deltalake

    # In any case: what is noted while the rows are made has to be told.
    read = rows.toArrow()
    table = _opened(uri, read.schema, partition_by=list(by) or None)
    if batch.written(table):
        return 0
    write_deltalake(table, read, mode="append", commit_properties=batch.properties)
    return int(read.num_rows)


def merge(changes: DataFrame, uri: str, batch: Batch, columns: Sequence[str], rule: Merge) -> int:
    """Apply changes, unless the batch is there already, and return how many rows the table, of these columns, has.

    Only files with a row that is changed are written anew.
    """
    from deltalake import write_deltalake

    # In any case, as above.
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
        # A merge that changes no row commits nothing; the batch is done all the same.
        write_deltalake(table, schema.empty_table(), mode="append", commit_properties=batch.properties)
    return count(table)


def _opened(uri: str, schema: pa.Schema, **settings: Any) -> DeltaTable:
    """Return a table, made first if it is not there: one with files and no log would be taken for something else."""
    from deltalake import DeltaTable

    if DeltaTable.is_deltatable(uri):
        return DeltaTable(uri)
    return DeltaTable.create(uri, schema, mode="ignore", **settings)


def count(table: DeltaTable) -> int:
    """Return how many rows a table has, by its log alone."""
    return sum(table.get_add_actions(flatten=True).column("num_records").to_pylist())


def compact(uri: str) -> None:
    """Make few files of many, and delete those that have been out of use for as long as the table keeps them."""
    from deltalake import DeltaTable

    table = DeltaTable(uri)
    table.optimize.compact()
    table.vacuum(dry_run=False)


def last(uri: str, *, writer: str) -> int:
    """Return the last batch that a writer has written, -1 if there is none."""
    from deltalake import DeltaTable

    return _last(DeltaTable(uri), writer) if DeltaTable.is_deltatable(uri) else -1


def _last(table: DeltaTable, writer: str) -> int:
    number = table.transaction_version(writer)
    return -1 if number is None else int(number)


def _as_of(uri: str, upto: Batch | None) -> DeltaTable:
    """Return a table as it is now, or as it was when its writer had not yet written more than a batch."""
    from deltalake import DeltaTable

    table = DeltaTable(uri)
    while upto is not None and table.version() and (table.transaction_version(upto.writer) or 0) > upto.number:
        table.load_as_version(table.version() - 1)
    return table


def read(spark: SparkSession, uri: str, *, upto: Batch | None = None) -> DataFrame:
    """Return a table as it is now, or as it was when its writer had not yet written more than a batch."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import from_arrow_schema

    table = _as_of(uri, upto)
    schema = from_arrow_schema(pa.schema(table.schema().to_arrow()))
    files = table.file_uris()
    # What a table is partitioned by stands in the names of its folders, not in its files.
    reader = spark.read.schema(schema).option("basePath", uri)
    return reader.parquet(*files) if files else spark.createDataFrame([], schema)


def dataset(uri: str, *, upto: Batch) -> Dataset:
    """Return a table, without Spark, as it was when its writer had not yet written more than a batch."""
    found: Dataset = _as_of(uri, upto).to_pyarrow_dataset()
    return found
