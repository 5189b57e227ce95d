"""Decoding of values: Avro in single-object encoding, every version of every schema, in batches of records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

from halfway import schemas

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_ERROR_CHARACTERS: Final = 200
PLACE: Final = ("topic", "partition", "offset")

OP: Final = (
    "`kind` string, `id` string, `group` string, `half_offset` bigint, `cause` string, `prepared_at` bigint, "
    "`at` bigint, `checks` int, `commit_verdict` boolean, `remark` string, "
    "`messages` array<struct<topic: string, key_hash: binary, value_hash: binary, size: bigint, headers_hash: binary, "
    "partition: int>>"
)
PARKED: Final = "`half` struct<id: string, group: string, prepared_at: bigint>, `reason` string, `parked_at` bigint"
AUDIT: Final = (
    "`id` string, `at` bigint, `action` string, `actor_kind` string, `actor` string, `key_id` string, "
    "`subject` string, `group` string, `detail` string, `remark` string, `result` string, `instance` string"
)
GROUP: Final = "`name` string, `topics` array<string>, `policy` struct<first_check_after_s: double, max_age_s: double>"
LAYOUT: Final = "`shards` int, `created_at` bigint"


def decode(records: DataFrame, kind: str, fields: str) -> DataFrame:
    """Return records with the given fields of their values (columns in DDL) in place of `value`, and `error`.

    A value that is no record of this kind has null in every field, and the cause in `error`, which is otherwise null.
    """
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StringType, StructType

    kept = records.drop("value").schema
    wanted = columns_of(fields)
    names = [field.name for field in wanted]
    taken = set(names)
    if clash := taken & set(kept.names):
        raise ValueError(f"the records already have the columns {sorted(clash)}")
    result = StructType([*kept.fields, *wanted.fields]).add("error", StringType())
    arrow = to_arrow_schema(wanted)
    versions = json.dumps(schemas.versions(kind))

    def batches(incoming: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        read = reader(kind, versions)
        for batch in incoming:
            yield decoded(batch, read, names, arrow)

    return records.mapInArrow(batches, result)


def columns_of(ddl: str) -> StructType:
    """Return columns in DDL as a schema. It needs a running session."""
    from pyspark.sql.types import StructType

    schema: Any = StructType.fromDDL(ddl)
    assert isinstance(schema, StructType)  # noqa: S101 - what DDL of columns gives
    return schema


def quarantined(decoded: DataFrame) -> DataFrame:
    """Return topic, partition, offset and error of the records that could not be decoded."""
    return decoded.where("error is not null").select(*PLACE, "error")


def decoded(
    batch: pa.RecordBatch, read: Callable[[bytes | None], dict[str, Any]], names: list[str], arrow: pa.Schema
) -> pa.RecordBatch:
    import pyarrow as pa

    rows: list[dict[str, Any]] = []
    errors: list[str | None] = []
    for value in batch.column("value").to_pylist():
        try:
            fields, error = read(value), None
        # fastavro raises many kinds of errors for damaged bytes: EOFError, IndexError, UnicodeDecodeError, ...
        except Exception as raised:  # noqa: BLE001
            fields, error = {}, _message_of(raised)
        rows.append(fields)
        errors.append(error)
    made = _columns(rows, errors, names, arrow)
    kept = [(name, batch.column(name)) for name in batch.schema.names if name != "value"]
    everything = [*kept, *zip(names, made, strict=True), ("error", pa.array(errors, type=pa.string()))]
    return pa.RecordBatch.from_arrays([column for _, column in everything], names=[name for name, _ in everything])


def _columns(rows: list[dict[str, Any]], errors: list[str | None], names: list[str], arrow: pa.Schema) -> list[Any]:
    """Return the columns. A row with a number that its column cannot hold gets an error in place of its fields.

    Avro does not bound numbers, so a record can have one that no column can hold.
    """
    import pyarrow as pa

    def columns(some: list[dict[str, Any]]) -> list[Any]:
        # A field that the writer's schema does not have is null.
        return [pa.array([row.get(name) for row in some], type=arrow.field(name).type) for name in names]

    try:
        return columns(rows)
    except (pa.ArrowException, OverflowError, ValueError):
        for number, row in enumerate(rows):
            try:
                columns([row])
            except (pa.ArrowException, OverflowError, ValueError) as raised:
                rows[number], errors[number] = {}, _message_of(raised)
        return columns(rows)


def _message_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]


@cache
def reader(kind: str, versions: str) -> Callable[[bytes | None], dict[str, Any]]:
    """Return a function from a value to its fields, which raises an error for a value that is no record of this kind.

    `versions` is a JSON list of schemas, so that the workers do not need the files. A record has the fields that it was
    written with.
    """
    import fastavro

    from halfway.schemas.single_object import HEADER_BYTES, MARKER, header, parsed

    writers = {header(schema): schema for schema in map(parsed, reversed(json.loads(versions)))}

    def read(data: bytes | None) -> dict[str, Any]:
        if data is None:
            raise ValueError(f"no value where a {kind} record was expected")
        if data[:2] != MARKER or len(data) < HEADER_BYTES:
            raise ValueError(f"not in Avro single-object encoding where a {kind} record was expected")
        writer = writers.get(data[:HEADER_BYTES])
        if writer is None:
            raise ValueError(f"unknown schema fingerprint {data[2:HEADER_BYTES].hex()} for a {kind} record")
        body = BytesIO(data)
        body.seek(HEADER_BYTES)
        fields = fastavro.schemaless_reader(body, writer, None)
        if body.tell() != len(data) or not isinstance(fields, dict):
            raise ValueError(f"damaged {kind} record: {len(data) - body.tell()} bytes too many")
        return fields

    return read
