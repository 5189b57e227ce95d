"""Avro's single-object encoding: `C3 01`, the CRC-64-AVRO fingerprint of the writer's schema, a schemaless body."""

from __future__ import annotations

from typing import Any, Final

from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form

MARKER: Final = b"\xc3\x01"
HEADER_BYTES: Final = 10


def parsed(schema: dict[str, Any]) -> Any:
    """Return a schema parsed for fastavro, without logical types: times stay plain ms, and fastavro is faster."""
    return parse_schema(_plain(schema))


def header(schema: Any) -> bytes:
    """Return the header of records written with a parsed schema; logical types do not change it."""
    # fastavro returns the fingerprint's bytes in the header's order, least significant first.
    return MARKER + bytes.fromhex(fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO"))


def _plain(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _plain(value) for key, value in schema.items() if key != "logicalType"}
    if isinstance(schema, list):
        return [_plain(value) for value in schema]
    return schema
