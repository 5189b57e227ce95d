"""Values decoded: Avro in single-object encoding, every version of every schema, a batch of records at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F

from halfway import schemas

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_MARKER: Final = b"\xc3\x01"
_HEADER_BYTES: Final = 10
_ERROR_CHARACTERS: Final = 200
PLACE: Final = ("topic", "partition", "offset")

OP: Final = (
    "`kind` string, `id` string, `group` string, `half_offset` bigint, `cause` string, `prepared_at` bigint, "
    "`at` bigint, `checks` int, `commit_verdict` boolean, `remark` string, "
    "`messages` array<struct<topic: string, key_hash: binary, value_hash: binary, size: bigint>>"
)
PARKED: Final = "`half` struct<id: string, group: string, prepared_at: bigint>, `reason` string, `parked_at` bigint"
GROUP: Final = "`name` string, `topics` array<string>, `policy` struct<first_check_after_s: double>"


def decode(records: DataFrame, kind: str, fields: str) -> DataFrame:
    """Return records with the given fields of their values (columns in DDL) in place of `value`, and `error`.

    A value that is no record of this kind has null in every field and says why in `error`; the others have null there.
    """
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StringType, StructType

    kept = records.drop("value").schema
    wanted = columns_of(fields)
    names = [field.name for field in wanted]
    taken = set(names)
    if clash := taken & set(kept.names):
        raise ValueError(f"columns {sorted(clash)} stand in the records already")
    result = StructType([*kept.fields, *wanted.fields]).add("error", StringType())
    arrow = to_arrow_schema(wanted)
    versions = json.dumps(schemas.versions(kind))

    def batches(incoming: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        read = reader(kind, versions)
        for batch in incoming:
            yield _decoded(batch, read, names, arrow)

    return records.mapInArrow(batches, result)


def columns_of(ddl: str) -> StructType:
    """Return columns in DDL as a schema; needs a running session."""
    from pyspark.sql.types import StructType

    schema: Any = StructType.fromDDL(ddl)
    assert isinstance(schema, StructType)  # noqa: S101 - what DDL of columns gives
    return schema


def quarantined(decoded: DataFrame) -> DataFrame:
    """Return topic, partition, offset and error of the records that could not be decoded."""
    return decoded.where(F.col("error").isNotNull()).select(*PLACE, "error")


def faulty(told: DataFrame) -> DataFrame:
    """Return topic, partition, offset and error of the records whose key and headers halfway cannot have written."""
    return told.where(F.col("fault").isNotNull()).select(*PLACE, F.col("fault").alias("error"))


def _decoded(
    batch: pa.RecordBatch, read: Callable[[bytes | None], dict[str, Any]], names: list[str], arrow: pa.Schema
) -> pa.RecordBatch:
    import pyarrow as pa

    columns: list[list[Any]] = [[] for _ in names]
    errors: list[str | None] = []
    nothing: dict[str, Any] = dict.fromkeys(names)
    for value in batch.column("value").to_pylist():
        try:
            fields, error = read(value), None
        # fastavro answers damaged bytes with whatever its parts raise: EOFError, IndexError, UnicodeDecodeError, ...
        except Exception as raised:  # noqa: BLE001
            fields, error = nothing, f"{type(raised).__name__}: {raised}"[:_ERROR_CHARACTERS]
        for column, name in zip(columns, names, strict=True):
            column.append(fields[name])
        errors.append(error)
    kept = [(name, batch.column(name)) for name in batch.schema.names if name != "value"]
    made = [(name, pa.array(column, type=arrow.field(name).type)) for name, column in zip(names, columns, strict=True)]
    everything = [*kept, *made, ("error", pa.array(errors, type=pa.string()))]
    return pa.RecordBatch.from_arrays([column for _, column in everything], names=[name for name, _ in everything])


@cache
def reader(kind: str, versions: str) -> Callable[[bytes | None], dict[str, Any]]:
    """Return a function from a value to its fields, which raises for anything that is no record of this kind.

    `versions` is a JSON list of schemas, the current one first: the workers need not find the files.
    """
    import fastavro
    from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form

    # Logical types are left out, so that times stay plain ms; the fingerprint does not see them.
    parsed = [parse_schema(_plain(schema)) for schema in json.loads(versions)]
    current = parsed[0]
    writers = {
        bytes.fromhex(fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO")): schema
        for schema in reversed(parsed)
    }

    def read(data: bytes | None) -> dict[str, Any]:
        if data is None:
            raise ValueError(f"no value where a {kind} record was expected")
        if data[:2] != _MARKER or len(data) < _HEADER_BYTES:
            raise ValueError(f"not in Avro single-object encoding where a {kind} record was expected")
        writer = writers.get(data[2:_HEADER_BYTES])
        if writer is None:
            raise ValueError(f"unknown schema fingerprint {data[2:_HEADER_BYTES].hex()} for a {kind} record")
        body = BytesIO(data)
        body.seek(_HEADER_BYTES)
        fields = fastavro.schemaless_reader(body, writer, None if writer is current else current)
        if body.tell() != len(data) or not isinstance(fields, dict):
            raise ValueError(f"damaged {kind} record: {len(data) - body.tell()} bytes too many")
        return fields

    return read


def _plain(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _plain(value) for key, value in schema.items() if key != "logicalType"}
    if isinstance(schema, list):
        return [_plain(value) for value in schema]
    return schema
