"""Tables in Delta, written by one appender whose batches each count once; the package `deltalake` needs no Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from halfway.pipeline.errors import SourceError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LOG: Final = "_delta_log"


def demand() -> None:
    """Raise SourceError where the package is missing."""
    try:
        import deltalake  # noqa: F401 - whether it can be imported is the question
    except ImportError:
        raise SourceError("Delta tables need the package deltalake: pip install 'halfway[delta]'") from None


def append(rows: DataFrame, uri: str, *, writer: str, batch: int) -> None:
    """Append a batch, unless this writer's batch stands there already.

    The number of the batch is committed with the rows (a `txn` action), so neither is there without the other. The
    rows of a batch pass through the driver.
    """
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

    if DeltaTable.is_deltatable(uri):
        last = DeltaTable(uri).transaction_version(writer)
        if last is not None and last >= batch:
            return
    properties = CommitProperties(app_transactions=[Transaction(writer, batch)])
    write_deltalake(uri, rows.toArrow(), mode="append", commit_properties=properties)


def read(spark: SparkSession, uri: str) -> DataFrame:
    """Return a table as it is now."""
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql.pandas.types import from_arrow_schema

    table = DeltaTable(uri)
    schema = from_arrow_schema(pa.schema(table.schema().to_arrow()))
    files = table.file_uris()
    return spark.read.schema(schema).parquet(*files) if files else spark.createDataFrame([], schema)
