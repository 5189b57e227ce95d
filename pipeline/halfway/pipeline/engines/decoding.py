"""Decoding of values: Avro in single-object encoding, every version of every schema, in the same way on both engines.

A value is decoded with the schema that the fingerprint in its header names, into the newest schema. Spark does it with
`from_avro`, so no Python runs on its executors; DuckDB with fastavro.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from halfway import schemas
from halfway.schemas.single_object import HEADER_BYTES, MARKER, header, parsed, readable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LIMITS: Final = {
    "org.apache.avro.limits.string.maxLength": str(1 << 20),
    "org.apache.avro.limits.bytes.maxLength": str(1 << 27),
    "org.apache.avro.limits.collectionItems.maxLength": str(1 << 20),
}
"""System properties of a JVM that decodes. Without them a damaged length makes it allocate up to 2 GiB at once."""
_SCALARS: Final = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "int": pa.int32(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "double": pa.float64(),
    "timestamp": pa.timestamp("us", "UTC"),
}
ERROR: Final = pa.field("error", pa.string())
_SEAL: Final = bytes(range(100, 116))
"""These bytes are put after a value. They are read behind it, so that a value is known to end where its record does."""

OP: Final = (
    "`kind` string, `id` string, `group` string, `cause` string, `prepared_at` bigint, `at` bigint, `checks` int, "
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
_TOO_LARGE: Final = (pa.ArrowException, OverflowError, ValueError)
"""What a column raises for a number that it cannot hold. Avro does not bound numbers."""


class DamageError(ValueError):
    """A value is no record of the kind that is expected."""


def decode(records: DataFrame, kind: str, fields: str) -> DataFrame:
    """Return records with the given fields of their values (columns in DDL) in place of `value`, and `error`.

    A value that is no record of this kind has null in every field, and the cause in `error`, which is otherwise null.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.avro.functions import from_avro

    wanted = arrow_of(fields)
    kept = [name for name in records.columns if name != "value"]
    if clash := set(wanted.names) & set(kept):
        raise ValueError(f"the records already have the columns {sorted(clash)}")
    sealed = F.expr(f"concat(substring(value, {HEADER_BYTES + 1}), X'{_SEAL.hex()}')")
    head = F.expr(f"hex(substring(value, 1, {HEADER_BYTES}))")
    options = {"mode": "PERMISSIVE", "avroSchema": json.dumps(_sealed(_plain(schemas.newest(kind))))}
    writers = {header(parsed(each)).hex().upper(): _sealed(_plain(each)) for each in schemas.versions(kind)}
    # A chain of `when` without a last value is null for an unknown header.
    read: Any = F
    for known, schema in writers.items():
        read = read.when(head == known, from_avro(sealed, json.dumps(schema), options))
    decoded = records.select(*kept, "value", read.alias("_read"))
    unfit = " or ".join(_unfit("_read.body", schemas.newest(kind), pa.struct(list(wanted))))
    nothing, headless, unknown, damaged = _errors(kind)
    error = F.expr(f"""case
        when value is null then '{nothing}'
        when length(value) < {HEADER_BYTES} or not startswith(value, X'{MARKER.hex()}') then '{headless}'
        when hex(substring(value, 1, {HEADER_BYTES})) not in ({str([*writers])[1:-1]})
            then concat('{unknown}', lower(hex(substring(value, 3, {HEADER_BYTES - 2}))))
        when coalesce(_read.seal <> X'{_SEAL.hex()}', true) or coalesce({unfit}, false) then '{damaged}'
        end""")
    judged = decoded.select(*kept, "_read", error.alias("error"))
    values = (
        f"'{each.name}', case when error is null then {_taken(f'_read.body.`{each.name}`', each.type)} end"
        for each in wanted
    )
    # As a row of a generator: otherwise each condition on a field would put the whole decoder into the plan again.
    return judged.selectExpr(*kept, f"inline(array(named_struct({', '.join(values)}, 'error', error)))")


def _taken(path: str, of: pa.DataType) -> str:
    """Return SQL for the part of a decoded value that a column of this type holds."""
    if pa.types.is_struct(of):
        parts = (f"'{each.name}', {_taken(f'{path}.`{each.name}`', each.type)}" for each in of.fields)
        return f"named_struct({', '.join(parts)})"
    if pa.types.is_list(of):
        return f"transform({path}, one -> {_taken('one', of.value_type)})"
    return f"cast({path} as int)" if pa.types.is_int32(of) else path


def _unfit(path: str, schema: Any, wanted: pa.DataType | None) -> Iterator[str]:
    """Return SQL for what fastavro refuses and Avro for Java does not, and for numbers that no wanted column holds."""
    if isinstance(schema, list):
        schema = next(each for each in schema if each != "null")
    kind = schema["type"] if isinstance(schema, dict) else schema
    if kind == "string":
        yield f"not is_valid_utf8({path})"
    elif kind == "int" and wanted is not None:
        yield f"{path} not between {-1 << 31} and {(1 << 31) - 1}"
    elif kind == "array":
        inner = list(_unfit("one", schema["items"], None if wanted is None else wanted.value_type))
        if inner:
            yield f"exists({path}, one -> {' or '.join(inner)})"
    elif kind == "record":
        for each in schema["fields"]:
            types = {} if wanted is None else {field.name: field.type for field in wanted.fields}
            yield from _unfit(f"{path}.`{each['name']}`", each["type"], types.get(each["name"]))


def _sealed(schema: Any) -> dict[str, Any]:
    seal = {"type": "fixed", "name": "Seal", "size": len(_SEAL)}
    fields = [{"name": "body", "type": schema}, {"name": "seal", "type": seal}]
    return {"type": "record", "name": "Sealed", "namespace": "halfway.pipeline", "fields": fields}


def _plain(schema: Any) -> Any:
    """Return a schema without documentation and logical types, and with long for int.

    Both numbers are written in the same way, and Avro for Java would cut a large int off.
    """
    if isinstance(schema, dict):
        kept = {name: value for name, value in schema.items() if name not in ("doc", "logicalType")}
        return {name: value if name == "default" else _plain(value) for name, value in kept.items()}
    if isinstance(schema, list):
        return [_plain(value) for value in schema]
    return "long" if schema == "int" else schema


def decoded(batch: pa.RecordBatch, kind: str, fields: str) -> pa.RecordBatch:
    """Return the given fields of the column `value`, and `error`, as `decode` does."""
    read, schema = _reader(kind), arrow_of(fields)
    rows: list[dict[str, Any]] = []
    errors: list[str | None] = []

    def columns(some: list[dict[str, Any]]) -> list[Any]:
        return [pa.array([row.get(field.name) for row in some], type=field.type) for field in schema]

    for value in batch.column("value").to_pylist():
        try:
            row, error = read(value), None
        except DamageError as raised:
            row, error = {}, str(raised)
        rows.append(row)
        errors.append(error)
    try:
        made = columns(rows)
    except _TOO_LARGE:
        *_, damaged = _errors(kind)
        for number, row in enumerate(rows):
            try:
                columns([row])
            except _TOO_LARGE:
                rows[number], errors[number] = {}, damaged
        made = columns(rows)
    return pa.RecordBatch.from_arrays([*made, pa.array(errors, pa.string())], schema=schema.append(ERROR))


@cache
def _reader(kind: str) -> Callable[[bytes | None], dict[str, Any]]:
    """Return a function from a value to its fields, which raises DamageError if it is no record of this kind."""
    import fastavro

    nothing, headless, unknown, damaged = _errors(kind)
    into = parsed(_plain(schemas.newest(kind)))
    writers = {header(parsed(version)): readable(_plain(version)) for version in schemas.versions(kind)}

    def read(data: bytes | None) -> dict[str, Any]:
        if data is None:
            raise DamageError(nothing)
        if data[:2] != MARKER or len(data) < HEADER_BYTES:
            raise DamageError(headless)
        writer = writers.get(data[:HEADER_BYTES])
        if writer is None:
            raise DamageError(f"{unknown}{data[2:HEADER_BYTES].hex()}")
        body = BytesIO(data)
        body.seek(HEADER_BYTES)
        try:
            found: Any = fastavro.schemaless_reader(body, writer, into)
        # fastavro raises many kinds of errors for damaged bytes: EOFError, IndexError, UnicodeDecodeError, ...
        except Exception as error:
            raise DamageError(damaged) from error
        if body.tell() != len(data):
            raise DamageError(damaged)
        return dict(found)

    return read


def _errors(kind: str) -> tuple[str, str, str, str]:
    """Return what is wrong with nothing, with a wrong header, with a fingerprint (it follows), with damaged bytes."""
    expected = f"where a record of the kind {kind} was expected"
    return (
        f"no value {expected}",
        f"not in Avro single-object encoding {expected}",
        f"{expected}: unknown schema fingerprint ",
        f"a damaged record of the kind {kind}",
    )


@cache
def arrow_of(ddl: str) -> pa.Schema:
    """Return the Arrow schema of columns in Spark's DDL."""
    return pa.schema([pa.field(name, kind) for name, kind in _fields(ddl, " ")])


def _fields(ddl: str, between: str) -> Iterator[tuple[str, pa.DataType]]:
    depth, start = 0, 0
    for position, letter in enumerate(ddl + ","):
        depth += (letter == "<") - (letter == ">")
        if letter == "," and not depth:
            name, _, kind = ddl[start:position].strip().partition(between)
            yield name.strip("` "), _type(kind.strip())
            start = position + 1


def _type(ddl: str) -> pa.DataType:
    if ddl.startswith("array<"):
        return pa.list_(_type(ddl[len("array<") : -1]))
    if ddl.startswith("struct<"):
        return pa.struct([pa.field(name, kind) for name, kind in _fields(ddl[len("struct<") : -1], ":")])
    return _SCALARS[ddl]
