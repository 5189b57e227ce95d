"""The records of the internal topics as bytes, and the headers that each carries (docs/protocol.md#topics).

fastavro reads every version of every schema. On the hot path bodies are encoded with the functions below, which cost a
quarter of the time of fastavro's writer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from io import BytesIO
from typing import Any, ClassVar, Final, TypeVar

import fastavro
import msgspec

from halfway import schemas
from halfway.protocol.keys import Key
from halfway.protocol.records import (
    NO_BARRIER,
    AuditEvent,
    Barrier,
    Count,
    Group,
    Half,
    LimitOverrides,
    Message,
    Op,
    OpKind,
    Origin,
    Owner,
    Parked,
    Rate,
)
from halfway.protocol.transactions import Cause
from halfway.schemas.single_object import HEADER_BYTES, MARKER, header, parsed, readable

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
        self._writers = {header(parsed(schema)): readable(schema) for schema in reversed(versions)}

    def encode(self, fields: dict[str, Any]) -> bytes:
        out = BytesIO()
        out.write(self.header)
        fastavro.schemaless_writer(out, self._current, fields)
        return out.getvalue()

    def decode(self, data: bytes | None) -> dict[str, Any]:
        """Return the fields of a record in any version.

        Raises UndecodableError: no value, another format, an unknown schema, a damaged body.
        """
        if data is None:
            raise UndecodableError(f"no value where a {self.name} record was expected")
        body = BytesIO(data)
        record_header = body.read(HEADER_BYTES)
        writer = self._writer(record_header)
        reader = None if record_header == self.header else self._current
        try:
            fields = fastavro.schemaless_reader(body, writer, reader)
        # For damaged bytes fastavro raises many kinds of errors: EOFError, IndexError, UnicodeDecodeError, ...
        except Exception as error:
            raise UndecodableError(f"damaged {self.name} record: {type(error).__name__}") from error
        if body.tell() != len(data) or not isinstance(fields, dict):
            raise UndecodableError(f"damaged {self.name} record: {len(data) - body.tell()} bytes too many")
        return fields

    def _writer(self, record_header: bytes) -> Any:
        writer = self._writers.get(record_header)
        if writer is None:
            if record_header[:2] != MARKER or len(record_header) < HEADER_BYTES:
                raise UndecodableError(f"not in Avro single-object encoding where a {self.name} record was expected")
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


_higher: Final = lru_cache(maxsize=4096)(_varint)
"""Offsets that follow each other differ in their first byte only."""
_FOLLOWED: Final = [bytes([low | 0x80]) for low in range(_ONE_BYTE)]


def long(number: int) -> bytes:
    """Encode an int or long: zigzag, then seven bits per byte."""
    rest = (number << 1) ^ (number >> 63)
    return _varint(rest) if rest < _ONE_BYTE else _FOLLOWED[rest & 0x7F] + _higher(rest >> 7)


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
    return b"\0" if data is None else b"\2" + length(len(data)) + data


def optional_string(value: str | None) -> bytes:
    return b"\0" if value is None else b"\2" + string(value)


def boolean(value: bool) -> bytes:  # noqa: FBT001 - as an Avro type
    return b"\1" if value else b"\0"


Headers = list[tuple[str, str | bytes | None]]
"""Headers as `produce` takes them."""

HEADER_KIND: Final = "halfway-kind"
HEADER_GROUP: Final = "halfway-group"
HEADER_STATE: Final = "halfway-state"
HEADER_PREPARED_AT: Final = "halfway-prepared-at"
HEADER_BARRIER: Final = "halfway-barrier"
HEADER_LANE: Final = "halfway-lane"
"""In a release: the transactional id that wrote it, and so the owner whose release it is."""
HEADER_LIMITS: Final = "halfway-limits"
"""A group's limits as JSON. An earlier release reads the group without them, and leaves them out if it changes it."""

KIND_HALF: Final = "half"
KIND_OP: Final = "op"
KIND_PARKED: Final = "parked"
KIND_GROUP: Final = "group"
KIND_OWNER: Final = "owner"
KIND_KEY: Final = "key"
KIND_AUDIT: Final = "audit"
KIND_BARRIER: Final = "barrier"
KIND_LAYOUT: Final = "layout"

# No transaction id and no shard number can be equal to these: neither may hold an exclamation mark.
BARRIER_KEY: Final = b"!barrier"
LAYOUT_KEY: Final = schemas.LAYOUT_KEY.encode()
LAYOUT_PARTITION: Final = 0
"""The partition of owners that holds the layout."""
_OFFSET_DIGITS: Final = 19
"""Offsets have no more: they are signed and have 64 bits."""

_KIND_BYTES: Final = {
    kind: kind.encode()
    for kind in (
        KIND_HALF,
        KIND_OP,
        KIND_PARKED,
        KIND_GROUP,
        KIND_KEY,
        KIND_AUDIT,
        KIND_OWNER,
        KIND_BARRIER,
        KIND_LAYOUT,
    )
}


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions of the topics' creation, which never change; `created_at` in ms since the epoch."""

    shards: int
    created_at: int


@lru_cache(maxsize=4096)
def record_headers(kind: str, group: str, state: str) -> Headers:
    """Return the headers that every record carries, tombstones too, so that tools need not decode: a shared list."""
    return [(HEADER_KIND, _KIND_BYTES[kind]), (HEADER_GROUP, group.encode()), (HEADER_STATE, state.encode())]


def half_headers(half: Half, state: str) -> Headers:
    """Return the headers of a half record: its timestamp is that of its append, however old the transaction is."""
    return _half_headers(half.group, state, half.prepared_at, half.barrier)


@lru_cache(maxsize=256)
def _half_headers(group: str, state: str, prepared_at: int, barrier: int) -> Headers:
    """Return a shared list. It is cached, because records that arrive together often have the same time."""
    headers: Headers = [*record_headers(KIND_HALF, group, state), (HEADER_PREPARED_AT, b"%d" % prepared_at)]
    if barrier != NO_BARRIER:
        headers.append((HEADER_BARRIER, b"%d" % barrier))
    return headers


def barrier_of(headers: Sequence[tuple[str, bytes | str | None]]) -> int:
    """Return the offset of its writer's barrier that the headers of a half record name, NO_BARRIER if they do not."""
    for name, value in headers:
        if name == HEADER_BARRIER and isinstance(value, bytes) and value.isdigit() and len(value) <= _OFFSET_DIGITS:
            return int(value)
    return NO_BARRIER


def kind_of(headers: Sequence[tuple[str, bytes | str | None]] | None) -> str | None:
    """Return what the header `halfway-kind` says, None if there is none."""
    for name, value in headers or ():
        if name == HEADER_KIND and value is not None:
            return value.decode(errors="replace") if isinstance(value, bytes) else value
    return None


# --- half, op and parked: on the path of every transaction

_ORIGIN: Final = {Origin.PREPARE: long(0), Origin.LANE: long(1)}
_CAUSE: Final = {cause: long(1 + index) for index, cause in enumerate(Cause)}
_OP_KIND: Final = {kind: long(1 + index) for index, kind in enumerate(OpKind)}


def encode_half(half: Half) -> bytes:
    parts: list[bytes] = [registry("half").header]
    _half_body(parts, half)
    return b"".join(parts)


def _half_body(parts: list[bytes], half: Half) -> None:
    parts += (string(half.id), label(half.group))
    if half.messages:
        parts.append(length(len(half.messages)))
        for message in half.messages:
            _message_body(parts, message)
    parts += (
        b"\0",
        time(half.prepared_at),
        time(half.since),
        length(len(half.fingerprint)),
        half.fingerprint,
        optional_long(half.check_after_ms),
        _ORIGIN[half.origin],
        _totals(half.checks, half.checked_at, half.commit_verdict, half.remark),
    )


@lru_cache(maxsize=1024)
def _totals(checks: int, checked_at: int | None, commit_verdict: bool, remark: str | None) -> bytes:  # noqa: FBT001 - as in the schemas
    """Encode the fields that say what checks brought; it is cached, because most transactions have had no check."""
    return b"".join((long(checks), optional_long(checked_at), boolean(commit_verdict), optional_string(remark)))


def _message_body(parts: list[bytes], message: Message) -> None:
    parts += (label(message.topic), optional_bytes(message.key), optional_bytes(message.value))
    if message.headers:
        parts.append(length(len(message.headers)))
        for name, value in message.headers:
            parts += (string(name), optional_bytes(value))
    parts += (b"\0", optional_long(message.partition))


def decode_half(data: bytes | None, barrier: int = NO_BARRIER) -> Half:
    """Return the half record of a value, with the barrier of its header; UndecodableError if it is not one."""
    fields = registry("half").decode(data)
    fields["barrier"] = barrier
    _headers_as_pairs(fields)
    return _convert(fields, Half, "half")


def _headers_as_pairs(half: dict[str, Any]) -> None:
    for message in half["messages"]:
        if message["headers"]:
            message["headers"] = [(header["name"], header["value"]) for header in message["headers"]]


def encode_op(op: Op) -> bytes:
    parts: list[bytes] = [
        registry("op").header,
        _OP_KIND[op.kind],
        string(op.id),
        label(op.group),
        long(op.half_offset),
        _CAUSE[op.cause],
        time(op.prepared_at),
        time(op.at),
        length(len(op.fingerprint)),
        op.fingerprint,
        _totals(op.checks, op.checked_at, op.commit_verdict, op.remark),
    ]
    if op.messages:
        parts.append(length(len(op.messages)))
        for message in op.messages:
            parts += (
                label(message.topic),
                optional_bytes(message.key_hash),
                optional_bytes(message.value_hash),
                length(message.size),
                optional_bytes(message.headers_hash),
                optional_long(message.partition),
            )
    parts.append(b"\0")
    return b"".join(parts)


def decode_op(data: bytes | None) -> Op:
    """Return the op record of a value; UndecodableError if it is not one."""
    return _convert(registry("op").decode(data), Op, "op")


def encode_parked(parked: Parked) -> bytes:
    parts: list[bytes] = [registry("parked").header]
    _half_body(parts, parked.half)
    parts += (string(parked.reason), long(parked.parked_at), long(parked.checks))
    return b"".join(parts)


def decode_parked(data: bytes | None) -> Parked:
    """Return the parked record of a value; UndecodableError if it is not one."""
    fields = registry("parked").decode(data)
    _headers_as_pairs(fields["half"])
    return _convert(fields, Parked, "parked")


# --- the others: rare


class _Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The header with a group's limits. Fields of a later release are ignored."""

    pending: Count | None = None
    prepares_per_s: Rate | None = None
    bytes_in_flight: Count | None = None
    reject_prepares: bool = False


def group_headers(name: str, group: Group | None) -> Headers:
    """Return the headers of a group's record, or of the tombstone of its name."""
    headers = record_headers(KIND_GROUP, name, "deleted" if group is None else "registered")
    if group is None:
        return headers
    own = _Limits(**msgspec.structs.asdict(group.limits), reject_prepares=group.reject_prepares)
    return headers if own == _Limits() else [*headers, (HEADER_LIMITS, msgspec.json.encode(own))]


def encode_group(group: Group) -> bytes:
    fields = msgspec.structs.asdict(group)
    fields["policy"] = msgspec.structs.asdict(group.policy)
    del fields["limits"], fields["reject_prepares"]
    return registry("group").encode(fields)


def decode_group(data: bytes | None, headers: Sequence[tuple[str, bytes | str | None]] = ()) -> Group:
    """Return the group of a record; UndecodableError if its value or its limits cannot be read."""
    group = _convert(registry("group").decode(data), Group, "group")
    limits = dict(headers).get(HEADER_LIMITS)
    if limits is None:
        return group
    try:
        own = msgspec.structs.asdict(msgspec.json.decode(limits, type=_Limits))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UndecodableError(f"limits of a group that cannot be read: {error}") from error
    return msgspec.structs.replace(group, reject_prepares=own.pop("reject_prepares"), limits=LimitOverrides(**own))


def encode_key(key: Key) -> bytes:
    return registry("key").encode(msgspec.structs.asdict(key))


def decode_key(data: bytes | None) -> Key:
    """Return the key record of a value; UndecodableError if it is not one."""
    return _convert(registry("key").decode(data), Key, "key")


def encode_audit(event: AuditEvent) -> bytes:
    return registry("audit").encode(msgspec.structs.asdict(event))


def decode_audit(data: bytes | None) -> AuditEvent:
    """Return the event of a value; UndecodableError if it is not one."""
    return _convert(registry("audit").decode(data), AuditEvent, "audit")


def encode_owner(owner: Owner) -> bytes:
    return registry("owner").encode(msgspec.structs.asdict(owner))


def decode_owner(data: bytes | None) -> Owner:
    """Return the owner record of a value; UndecodableError if it is not one."""
    return _convert(registry("owner").decode(data), Owner, "owner")


def encode_barrier(barrier: Barrier) -> bytes:
    return registry("barrier").encode(msgspec.structs.asdict(barrier))


def decode_barrier(data: bytes | None) -> Barrier:
    """Return the barrier record of a value; UndecodableError if it is not one."""
    return _convert(registry("barrier").decode(data), Barrier, "barrier")


def encode_layout(layout: Layout) -> bytes:
    return registry("layout").encode(msgspec.structs.asdict(layout))


def decode_layout(data: bytes | None) -> Layout:
    """Return the layout record of a value; UndecodableError if it is not one."""
    return _convert(registry("layout").decode(data), Layout, "layout")


# msgspec looks at a class when it is used for the first time. Two threads that do so at once can end the process by
# SIGSEGV (msgspec 0.22), and shards are read on several threads: so it is done here.
for _kind in (Half, Op, Parked, Group, Key, AuditEvent, Owner, Barrier, Layout, _Limits):
    msgspec.json.Decoder(_kind)

_T = TypeVar("_T")


def _convert(fields: dict[str, Any], kind: type[_T], record: str) -> _T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        # Such as an enum's fallback symbol, written by a version whose records this one cannot act on.
        raise UnknownSchemaError(f"{record} record that this version cannot use: {error}") from error
