"""Encodes a lane write as records before its Kafka transaction begins, and validates records before they are used.

Any client with write access to the internal topics can write anything there. A record that halfway cannot have written
is refused here, regardless of its key or value; the reader logs its position and continues.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from operator import methodcaller
from typing import ClassVar, Final, NamedTuple, TypeVar

import msgspec
import structlog
from confluent_kafka import Message

from halfway.coordinator.logging import LogSummary
from halfway.coordinator.ports import LaneWrite, Tombstone
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.records.codec import (
    HEADER_LANE,
    HEADER_PREPARED_AT,
    KIND_BARRIER,
    KIND_GROUP,
    KIND_HALF,
    KIND_KEY,
    KIND_OP,
    KIND_OWNER,
    KIND_PARKED,
    LAYOUT_KEY,
    LAYOUT_PARTITION,
    UndecodableError,
    UnknownSchemaError,
    barrier_of,
    decode_barrier,
    decode_group,
    decode_half,
    decode_key,
    decode_op,
    decode_owner,
    decode_parked,
    encode_half,
    encode_op,
    encode_parked,
    half_headers,
    kind_of,
    record_headers,
)
from halfway.protocol.ids import LEGAL_ID, shard_of
from halfway.protocol.keys import Key
from halfway.protocol.records import Barrier, Group, Half, Op, Owner, Parked

log = structlog.get_logger(__name__)
_shortened: Final = LogSummary(log, "warning", "op_marker_shortened")

ANY_PARTITION = -1
_FRAMING = 512
"""An upper bound for the bytes that Kafka counts for an internal record besides its key and value."""

Headers = list[tuple[str, str | bytes | None]]


class RecordLimits(NamedTuple):
    """`max.message.bytes` of the internal topics that the lane writes to.

    They come from the topics, not from the configuration: a transaction that was prepared under a higher limit of the
    configuration must still be ended, parked and resumed.
    """

    half: int
    op: int
    parked: int

    @classmethod
    def needed(cls, config: KafkaConfig) -> RecordLimits:
        """Return the least limits with which halfway starts."""
        return cls(config.half_max_message_bytes, config.op_max_message_bytes, config.parked_max_message_bytes)


class UserRecord(msgspec.Struct, frozen=True, gc=False):
    """A real message, ready to be produced."""

    topic: str
    value: bytes | None
    key: bytes | None
    partition: int
    headers: Headers


class InternalRecord(msgspec.Struct, frozen=True, gc=False):
    """A record of an internal topic; a value of None is a tombstone."""

    value: bytes | None
    headers: Headers


class Encoded(msgspec.Struct, frozen=True, gc=False):
    """A write with all its records. The key of the internal ones is the id, and their partition is the shard."""

    write: LaneWrite
    key: bytes
    real: list[UserRecord]
    op: InternalRecord | None
    half: InternalRecord | None
    parked: InternalRecord | None


def encode(write: LaneWrite, config: KafkaConfig, limits: RecordLimits) -> Encoded:
    """Encode a write: messages with halfway's headers, and internal records (docs/protocol.md#topics).

    An op marker is never larger than its topic accepts.
    """
    group, state = write.group, write.state
    op = half = parked = None
    if write.op is not None:
        marker = _op_value(write.op, limits.op - _FRAMING - len(write.id))
        op = InternalRecord(marker, record_headers(KIND_OP, group, state))
    if write.half is not None:
        if isinstance(write.half, Tombstone):
            half = InternalRecord(None, record_headers(KIND_HALF, group, state))
        else:
            half = InternalRecord(encode_half(write.half), half_headers(write.half, state))
    if write.parked is not None:
        value = None if isinstance(write.parked, Tombstone) else encode_parked(write.parked)
        parked = InternalRecord(value, record_headers(KIND_PARKED, group, state))
    key = write.id.encode()
    real = _real_messages(write, key, config.prefix_header) if write.messages else []
    return Encoded(write, key, real, op, half, parked)


def _op_value(op: Op, limit: int) -> bytes:
    """Encode an op marker, without the digests of its messages if it would be larger than `limit`.

    Such a marker is of a transaction from a time with a higher limit of messages, or its topic's limit was lowered; it
    must still be ended.
    """
    value = encode_op(op)
    if len(value) <= limit:
        return value
    remedy = "raise max.message.bytes of the op topic until such transactions have ended"
    _shortened.note({"remedy": remedy}, id=op.id, messages=len(op.messages), bytes=len(value), limit=limit)
    return encode_op(msgspec.structs.replace(op, messages=()))


def _real_messages(write: LaneWrite, key: bytes, prefix: tuple[str, bytes]) -> list[UserRecord]:
    """Return the messages of a commit. The header `halfway-message: i/n`, i from 1, makes each one unique."""
    total = len(write.messages)
    prepared_at = b"%d" % write.prepared_at
    return [
        UserRecord(
            message.topic,
            message.value,
            message.key,
            ANY_PARTITION if message.partition is None else message.partition,
            [
                *message.headers,
                ("halfway-transaction-id", key),
                ("halfway-message", b"%d/%d" % (index, total)),
                (HEADER_PREPARED_AT, prepared_at),
                prefix,
            ],
        )
        for index, message in enumerate(write.messages, 1)
    ]


def oversized(encoded: Encoded, config: KafkaConfig, limits: RecordLimits) -> str | None:
    """Return the internal topic that would refuse its record, None if there is none.

    The limits of real topics were applied to the prepare. If one has been lowered since, its lane is the suspects'.
    """
    framing = _FRAMING + len(encoded.key)
    if _is_above(encoded.half, limits.half - framing):
        return config.half_topic
    if _is_above(encoded.parked, limits.parked - framing):
        return config.parked_topic
    return None


def _is_above(record: InternalRecord | None, limit: int) -> bool:
    return record is not None and record.value is not None and len(record.value) > limit


T = TypeVar("T")

_LAST_MS: Final = 253_402_300_799_999
"""The end of the year 9999, in ms since the epoch."""
_read_headers: Final = methodcaller("headers")
"""`message.headers()`, called so that Python checks the result: a warm interpreter does not check a direct call."""

Count = Callable[[str, str], None]
"""Counts a record that was skipped: topic, reason."""


class WrongKeyError(UndecodableError):
    """The key is missing, or does not match the value."""

    reason: ClassVar[str] = "wrong_key"


class ForeignTombstoneError(UndecodableError):
    """A null value without halfway's headers, which must neither end a transaction nor release a shard."""

    reason: ClassVar[str] = "foreign_tombstone"


SKIP_REASONS: Final = (UndecodableError.reason, WrongKeyError.reason, ForeignTombstoneError.reason)
"""The reasons by which skipped records are counted."""


class NewerReleaseError(Exception):
    """A newer release wrote a record: this release cannot answer calls about its shard without reading it."""

    def __init__(self, place: str, detail: str) -> None:
        """Keep where the record is, as the operator can name it."""
        super().__init__(detail)
        self.remedy = (
            "upgrade this instance. If no newer release has written the record, skip it: set "
            f"HALFWAY_SKIP_RECORDS={place} on every instance and restart it"
        )


def demand_no_newer(message: Message, error: UndecodableError, skip_records: Collection[str]) -> None:
    """Raise NewerReleaseError if a record that could not be decoded has halfway's headers.

    Skipping it could lose a prepare, or resolve a transaction a second time. Foreign records may be skipped, and those
    that the operator has named.
    """
    if not isinstance(error, UnknownSchemaError) or not has_halfway_headers(message):
        return
    place = place_of(message)
    if place not in skip_records:
        raise NewerReleaseError(place, f"{place}: {error}, written by a newer release")


def place_of(message: Message) -> str:
    """Return where a record is, in the form of the setting `skip_records`."""
    return f"{message.topic()}[{message.partition()}]@{message.offset()}"


def note_skipped(message: Message, error: UndecodableError, count: Count) -> None:
    topic = message.topic() or ""
    log.warning(
        "record_skipped", topic=topic, partition=message.partition(), offset=message.offset(), reason=str(error)
    )
    count(topic, error.reason)


def id_of(message: Message, shards: int) -> str:
    """Return the transaction id in the key of a record; WrongKeyError if it is not an id of this partition."""
    name = _text_key(message)
    if LEGAL_ID.match(name) is None:
        raise WrongKeyError("the key is not a transaction id")
    shard = shard_of(name, shards)
    if shard != message.partition():
        raise WrongKeyError(f"the key is an id of shard {shard}")
    return name


def headers_of(message: Message) -> list[tuple[str, bytes | str | None]]:
    """Return a record's headers; an empty list if a name is not UTF-8, which halfway never writes."""
    try:
        headers: list[tuple[str, bytes | str | None]] | None = _read_headers(message)
    except SystemError:
        # Python raises this for confluent_kafka's broken result; reading these headers again would end the process.
        message.set_headers([])
        return []
    return headers or []


def has_halfway_headers(message: Message) -> bool:
    """Return whether a record has halfway's headers. If it cannot be decoded, a later release may have written it."""
    return kind_of(headers_of(message)) is not None


def overwritten_id(message: Message, shards: int, skip_records: Collection[str]) -> str | None:
    """Return the id whose record a foreign record overwrites; None if it has no id, or may be halfway's own."""
    try:
        if has_halfway_headers(message) and place_of(message) not in skip_records:
            return None
        return id_of(message, shards)
    except WrongKeyError:
        return None


def half_in(message: Message, shards: int) -> tuple[str, Half | None]:
    """Return the id and the half in a record of half, None for a tombstone; UndecodableError if it is neither."""
    name, value = id_of(message, shards), message.value()
    if value is None:
        _require_tombstone(message, KIND_HALF)
        return name, None
    half = decode_half(value, barrier_of(headers_of(message)))
    _require_same_name(name, half.id)
    _require_valid_times(half.prepared_at, half.since)
    return name, half


def op_in(message: Message, shards: int) -> Op:
    """Return the op marker in a record of op; UndecodableError if it is not one."""
    name = id_of(message, shards)
    op = decode_op(message.value())
    _require_same_name(name, op.id)
    _require_valid_times(op.prepared_at, op.at)
    return op


def parked_in(message: Message, shards: int) -> tuple[str, Parked | None]:
    """Return the id and the parked transaction in a record of parked, None for a tombstone; else UndecodableError."""
    name, value = id_of(message, shards), message.value()
    if value is None:
        _require_tombstone(message, KIND_PARKED)
        return name, None
    parked = decode_parked(value)
    _require_same_name(name, parked.half.id)
    _require_valid_times(parked.half.prepared_at, parked.half.since, parked.parked_at)
    return name, parked


def group_in(message: Message) -> tuple[str, Group | None]:
    """Return the name and the group in a record of groups, None for a tombstone; UndecodableError if it is neither."""
    decode = partial(decode_group, headers=headers_of(message))
    return _entry_in(message, KIND_GROUP, decode, lambda group: group.name)


def key_in(message: Message) -> tuple[str, Key | None]:
    """Return the public id and the key in a record of keys, None for a tombstone; UndecodableError if it is neither."""
    return _entry_in(message, KIND_KEY, decode_key, lambda key: key.id)


def _entry_in(
    message: Message, kind: str, decode: Callable[[bytes], T], name_of: Callable[[T], str]
) -> tuple[str, T | None]:
    """Return the name and the entry of a compacted table's record, None for a tombstone of this kind."""
    name, value = _text_key(message), message.value()
    if value is None:
        _require_tombstone(message, kind)
        return name, None
    entry = decode(value)
    _require_same_name(name, name_of(entry))
    return name, entry


def owner_in(message: Message) -> Owner | None:
    """Return the owner in a record of owners, None for a release; UndecodableError if it is neither."""
    shard, value = message.partition() or 0, message.value()
    if message.key() != owner_key(shard):
        raise WrongKeyError("the key is not that of the shard")
    if value is None:
        _require_tombstone(message, KIND_OWNER)
        return None
    owner = decode_owner(value)
    _require_same_name(str(shard), str(owner.shard))
    return owner


def released_by(message: Message) -> tuple[str, ...]:
    """Return the transactional id that a release names; nothing for one of an earlier release of halfway."""
    values = (value for name, value in headers_of(message) if name == HEADER_LANE)
    return tuple(value.decode(errors="replace") for value in values if isinstance(value, bytes))


def is_layout(message: Message) -> bool:
    """Return whether a record of owners has the key and partition of the layout record."""
    return message.key() == LAYOUT_KEY and message.partition() == LAYOUT_PARTITION


def barrier_in(message: Message) -> Barrier:
    """Return the barrier in a record with the barriers' key; UndecodableError if it is not one."""
    if kind_of(headers_of(message)) != KIND_BARRIER:
        raise UndecodableError("a barrier without halfway's headers")
    return decode_barrier(message.value())


def owner_key(shard: int) -> bytes:
    return b"%d" % shard


def _text_key(message: Message) -> str:
    key = message.key()
    if not key:
        raise WrongKeyError("there is no key")
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise WrongKeyError("the key is not UTF-8") from None


def _require_same_name(name: str, name_in_value: str) -> None:
    if name != name_in_value:
        raise WrongKeyError(f"the key is {name!r}, but the value is of {name_in_value!r}")


def _require_valid_times(*times: int) -> None:
    for at in times:
        if not 0 <= at <= _LAST_MS:
            raise UndecodableError("a time is negative or after the year 9999")


def _require_tombstone(message: Message, kind: str) -> None:
    if kind_of(headers_of(message)) != kind:
        raise ForeignTombstoneError("a null value without halfway's headers")
