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


class _Choices(list[Any]):
    """The symbols of an enum or the types of a union, as fastavro's reader takes them.

    The reader takes a negative index in a damaged record as one from the end, which Avro for Java refuses. It adds
    this length to it, so that no such index is found.
    """

    def __len__(self) -> int:
        return 1 << 62


def readable(schema: dict[str, Any]) -> Any:
    """Return a schema as `parsed` does, to be read only: an index that is negative raises IndexError."""
    return _guarded(parsed(schema))


def _guarded(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: _guarded(value) for key, value in part.items()}
    if isinstance(part, list):
        return _Choices(map(_guarded, part))
    return part


def _plain(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _plain(value) for key, value in schema.items() if key != "logicalType"}
    if isinstance(schema, list):
        return [_plain(value) for value in schema]
    return schema
