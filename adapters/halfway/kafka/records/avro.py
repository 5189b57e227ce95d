"""Avro records: fastavro reads every version of every schema.

On the hot path bodies are encoded with the functions below, which cost a quarter of the time of fastavro's writer.
"""

from __future__ import annotations

from functools import cache, lru_cache
from io import BytesIO
from typing import Any, ClassVar, Final

import fastavro

from halfway import schemas
from halfway.schemas.single_object import HEADER_BYTES, MARKER, header, parsed

_ONE_BYTE: Final = 0x80


class UndecodableError(ValueError):
    """The bytes are not a record of the expected kind."""

    reason: ClassVar[str] = "undecodable"
    """The label `reason` of the counter of skipped records."""


class UnknownSchemaError(UndecodableError):
    """A record in the right encoding with a schema that this release does not know: a newer one may have written it."""


class Registry:
    """All versions of one schema: writes the current one; reads every version, resolved to the current one."""

    def __init__(self, name: str, versions: tuple[dict[str, Any], ...]) -> None:
        """Take the versions of a schema, the current one first."""
        self.name = name
        self._current = parsed(versions[0])
        self.header = header(self._current)
        self._older_versions = {header(schema): schema for schema in map(parsed, versions[1:])}
        self._older_versions.pop(self.header, None)

    def encode(self, fields: dict[str, Any]) -> bytes:
        """Return a record with its header."""
        out = BytesIO()
        out.write(self.header)
        fastavro.schemaless_writer(out, self._current, fields)
        return out.getvalue()

    def decode(self, data: bytes | None) -> dict[str, Any]:
        """Return the fields of a record in any version.

        Raises:
            UndecodableError: no value, another format, an unknown schema, a damaged body.

        """
        if data is None:
            raise UndecodableError(f"no value where a {self.name} record was expected")
        body = BytesIO(data)
        record_header = body.read(HEADER_BYTES)
        if record_header == self.header:
            writer, reader = self._current, None
        else:
            writer, reader = self._writer(record_header), self._current
        try:
            fields = fastavro.schemaless_reader(body, writer, reader)
        # For damaged bytes fastavro raises many kinds of errors: EOFError, IndexError, UnicodeDecodeError, ...
        except Exception as error:
            raise UndecodableError(f"damaged {self.name} record: {type(error).__name__}") from error
        if body.tell() != len(data) or not isinstance(fields, dict):
            raise UndecodableError(f"damaged {self.name} record: {len(data) - body.tell()} bytes too many")
        return fields

    def _writer(self, record_header: bytes) -> Any:
        if record_header[:2] != MARKER or len(record_header) < HEADER_BYTES:
            raise UndecodableError(f"not in Avro single-object encoding where a {self.name} record was expected")
        writer = self._older_versions.get(record_header)
        if writer is None:
            raise UnknownSchemaError(f"unknown schema fingerprint {record_header[2:].hex()} for a {self.name} record")
        return writer


@cache
def registry(name: str) -> Registry:
    """Return the registry of a kind of record, from the files of `halfway.schemas`."""
    return Registry(name, schemas.versions(name))


# --- parts of a body


def _varint(rest: int) -> bytes:
    out = bytearray()
    while rest >= _ONE_BYTE:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def long(number: int) -> bytes:
    """Encode an int or long: zigzag, then seven bits per byte."""
    return _varint((number << 1) ^ (number >> 63))


length = lru_cache(maxsize=4096)(long)
"""Encodes a long with few different values, such as a length or a count; it is cached."""


@lru_cache(maxsize=1024)
def time(ms: int) -> bytes:
    """Encode a time as a long. It is cached, because records that arrive together often have the same time."""
    return long(ms)


def string(value: str) -> bytes:
    """Encode a string: its length in bytes, then UTF-8."""
    data = value.encode()
    return length(len(data)) + data


@lru_cache(maxsize=4096)
def label(value: str) -> bytes:
    """Encode a string with few different values, such as the name of a group or a topic; it is cached."""
    return string(value)


@lru_cache(maxsize=1024)
def optional_long(number: int | None) -> bytes:
    """Encode a `["null", "long"]` with few different values; it is cached."""
    return b"\0" if number is None else b"\2" + long(number)


def optional_bytes(data: bytes | None) -> bytes:
    """Encode a `["null", "bytes"]`."""
    return b"\0" if data is None else b"\2" + length(len(data)) + data


def optional_string(value: str | None) -> bytes:
    """Encode a `["null", "string"]`."""
    return b"\0" if value is None else b"\2" + string(value)


def boolean(value: bool) -> bytes:  # noqa: FBT001 - as an Avro type
    """Encode a boolean."""
    return b"\1" if value else b"\0"
