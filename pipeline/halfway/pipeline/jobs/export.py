"""The job `export`: the tables of a ledger as of one batch, as plain Parquet or in an Iceberg catalog."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from halfway.pipeline.errors import SourceError
from halfway.pipeline.jobs import ledger
from halfway.pipeline.tables import delta, iceberg

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyarrow.dataset import Dataset
    from pyiceberg.table import Table
    from pyspark.sql import SparkSession

    from halfway.pipeline.tables.folders import Folder, LocalFolder

_AT_ONCE: Final = 500_000
"""The number of rows of `ended` that are in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The batch of the tables in a catalog, the rows that were appended to `ended`, and those of `pending`."""

    batch: int
    appended: int
    pending: int


def to_parquet(spark: SparkSession, source: Folder, into: Folder) -> None:
    """Write `ended`, partitioned by day, and `pending` as of one batch as plain Parquet, in place of what is there.

    Raises:
        SourceError: the folder holds no ledger.

    """
    found = ledger.tables(spark, source)
    if found is None:
        raise _no_ledger(source)
    ended, pending = found
    pending.write.mode("overwrite").parquet(into.path(ledger.PENDING))
    ended.write.mode("overwrite").partitionBy(ledger.DAY).parquet(into.path(ledger.ENDED))


def to_iceberg(source: Folder | LocalFolder, tables: iceberg.Tables) -> Exported:
    """Bring `ended` and `pending` in a catalog to the last batch of a ledger.

    1. Append to `ended` the outcomes that it lacks: those behind the last offset of each shard that its mark names.
    2. Replace all rows of `pending`.

    Each step is one commit, which holds the batch, the offsets and the rows. A table that is of the batch already is
    left alone, so an export that was killed or is repeated writes no row twice.

    Raises:
        SourceError: the folder holds no ledger, the tables are of another one, or they are ahead of this one.

    """
    batch = ledger.last_batch(source)
    if batch is None:
        raise _no_ledger(source)
    of_ended = delta.dataset(source.qualified(ledger.ENDED), upto=batch)
    of_pending = delta.dataset(source.qualified(ledger.PENDING), upto=batch)
    ended = tables.open(ledger.ENDED, of_ended.schema, by=ledger.DAY)
    pending = tables.open(ledger.PENDING, of_pending.schema)
    before, of_pending_before = (_mark(table, tables, batch) for table in (ended, pending))
    appended = 0
    if before.batch < batch.number:
        offsets = dict(before.offsets)
        appended = tables.append(
            ended,
            _lacking(of_ended, offsets),
            lambda: iceberg.Mark(ledger=batch.writer, batch=batch.number, offsets=offsets),
        )
    if of_pending_before.batch < batch.number:
        rows = of_pending.scanner().to_reader()
        tables.replace(pending, rows, iceberg.Mark(ledger=batch.writer, batch=batch.number))
    return Exported(batch=batch.number, appended=appended, pending=of_pending.count_rows())


def _mark(table: Table, tables: iceberg.Tables, batch: delta.Batch) -> iceberg.Mark:
    """Return the mark of a table; SourceError if it is of another ledger, or ahead of this one."""
    mark, name = tables.mark(table), ".".join(table.name())
    if mark.ledger not in (None, batch.writer):
        raise SourceError(f"the Iceberg table {name} is of another ledger: give another --namespace")
    if mark.batch > batch.number:
        raise SourceError(
            f"the Iceberg table {name} has batch {mark.batch} of this ledger, whose last one is {batch.number}: was "
            "the ledger restored from a backup? Give another --namespace"
        )
    return mark


def _lacking(source: Dataset, offsets: dict[int, int]) -> Iterator[pa.Table]:
    """Return the outcomes after the last offsets of their shards, and advance these offsets."""
    import pyarrow as pa
    import pyarrow.compute as pc

    condition = ~pc.field("shard").isin(list(offsets))
    for shard, offset in offsets.items():
        condition |= (pc.field("shard") == shard) & (pc.field("op_offset") > offset)
    kept: list[pa.RecordBatch] = []
    for batch in source.to_batches(filter=condition if offsets else None):
        if not batch.num_rows:
            continue
        last = pa.Table.from_batches([batch]).group_by("shard").aggregate([("op_offset", "max")])
        for row in last.to_pylist():
            offsets[row["shard"]] = max(offsets.get(row["shard"], -1), row["op_offset_max"])
        kept.append(batch)
        if sum(each.num_rows for each in kept) >= _AT_ONCE:
            yield pa.Table.from_batches(kept)
            kept = []
    if kept:
        yield pa.Table.from_batches(kept)


def _no_ledger(source: Folder | LocalFolder) -> SourceError:
    return SourceError(f"{source.uri!r} holds no ledger: run halfway-pipeline ledger first")
