"""Tables in Delta, written by one appender whose batches each count once; the package `deltalake` needs no Spark."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from halfway.pipeline.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, SparkSession

LOG: Final = "_delta_log"


_SCHEMES: Final = ("file", "s3", "s3a", "abfs", "abfss", "gs", "hdfs")
"""What both Spark, with the file system's own package, and deltalake can reach by the same URI."""


def demand(uri: str) -> None:
    """Raise SourceError where the package is missing, or cannot write there: it would take the URI for a local path."""
    try:
        import deltalake  # noqa: F401 - whether it can be imported is the question
    except ImportError:
        raise SourceError("Delta tables need the package deltalake: pip install 'halfway[pipeline]'") from None
    scheme = uri.partition(":")[0]
    if scheme not in _SCHEMES:
        raise SourceError(f"Delta tables cannot be written to {scheme}: URIs, only to {', '.join(_SCHEMES)}")


def append(rows: DataFrame, uri: str, *, writer: str, batch: int, by: Sequence[str] = ()) -> int:
    """Append a batch and return its rows' number, 0 where this writer's batch stands there already.

    The number of the batch is committed with the rows (a `txn` action), so neither is there without the other. The
    rows of a batch pass through the driver. A table that is made now is partitioned by the columns `by`.
    """
    from deltalake import CommitProperties, Transaction, write_deltalake

    # In any case: what is noted while the rows are made has to be told.
    table = rows.toArrow()
    if appended(uri, writer=writer) >= batch:
        return 0
    properties = CommitProperties(app_transactions=[Transaction(writer, batch)])
    write_deltalake(uri, table, mode="append", partition_by=list(by) or None, commit_properties=properties)
    return int(table.num_rows)


def compact(uri: str) -> None:
    """Make few files of many, and delete those that no reader can have open any more, after a week."""
    from deltalake import DeltaTable

    table = DeltaTable(uri)
    table.optimize.compact()
    table.vacuum(dry_run=False)


def appended(uri: str, *, writer: str) -> int:
    """Return the last batch that a writer has appended, -1 where there is none."""
    from deltalake import DeltaTable

    last = DeltaTable(uri).transaction_version(writer) if DeltaTable.is_deltatable(uri) else None
    return -1 if last is None else int(last)


def newest(uri: str, *, writer: str | None) -> int:
    """Return the last batch that a writer has appended; of a writer that is not known, one after all others."""
    last = -1 if writer is None else appended(uri, writer=writer)
    return sys.maxsize if last < 0 else last


def read(spark: SparkSession, uri: str, *, writer: str | None = None, upto: int = sys.maxsize) -> DataFrame:
    """Return a table as it is now, or as it was when a writer had not yet appended more than a batch."""
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql.pandas.types import from_arrow_schema

    table = DeltaTable(uri)
    while writer is not None and table.version() and (table.transaction_version(writer) or 0) > upto:
        table.load_as_version(table.version() - 1)
    schema = from_arrow_schema(pa.schema(table.schema().to_arrow()))
    files = table.file_uris()
    # What a table is partitioned by stands in the names of its folders, not in its files.
    reader = spark.read.schema(schema).option("basePath", uri)
    return reader.parquet(*files) if files else spark.createDataFrame([], schema)
