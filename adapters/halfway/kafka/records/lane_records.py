"""Encodes a lane write as records, before its Kafka transaction begins."""

from __future__ import annotations

import msgspec
import structlog

from halfway.domain.records import Op
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.records.codec import (
    HEADER_PREPARED_AT,
    KIND_HALF,
    KIND_OP,
    KIND_PARKED,
    encode_half,
    encode_op,
    encode_parked,
    half_headers,
    record_headers,
)
from halfway.service.ports import LaneWrite, Tombstone

log = structlog.get_logger(__name__)

ANY_PARTITION = -1
_FRAMING = 512
"""An upper bound for the bytes that librdkafka counts for a record besides its key, value and headers."""

Headers = list[tuple[str, str | bytes | None]]


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


def encode(write: LaneWrite, config: KafkaConfig) -> Encoded:
    """Encode a write: messages with halfway's headers, and internal records (docs/protocol.md#topics).

    An op marker has at most `op_record_bytes` of the configuration, which its topic always accepts.
    """
    group, state = write.group, write.state
    op = half = parked = None
    if write.op is not None:
        op = InternalRecord(_op_value(write.op, config.op_record_bytes), record_headers(KIND_OP, group, state))
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

    Only a transaction from a time with a higher limit of messages has such a marker; it must still be ended.
    """
    value = encode_op(op)
    if len(value) <= limit:
        return value
    log.warning(
        "op_marker_shortened",
        id=op.id,
        messages=len(op.messages),
        bytes=len(value),
        limit=limit,
        remedy="set HALFWAY_MAX_MESSAGES to the most messages that a pending transaction has",
    )
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


def oversized(encoded: Encoded, config: KafkaConfig, largest: int) -> str | None:
    """Return the topic of a record larger than `largest`, the `message.max.bytes` of the producer, or None."""
    limit = largest - _FRAMING - len(encoded.key)
    if _is_above(encoded.op, limit):
        return config.op_topic
    if _is_above(encoded.half, limit):
        return config.half_topic
    if _is_above(encoded.parked, limit):
        return config.parked_topic
    if encoded.write.size + _FRAMING * len(encoded.real) <= limit:
        return None
    return next((message.topic for message in encoded.real if _size(message) > limit), None)


def _is_above(record: InternalRecord | None, limit: int) -> bool:
    return record is not None and record.value is not None and len(record.value) > limit


def _size(message: UserRecord) -> int:
    size = len(message.value or b"") + len(message.key or b"")
    return size + sum(len(name) + len(content or b"") + 16 for name, content in message.headers)
