"""Encodes a lane write as records, before its Kafka transaction begins."""

from __future__ import annotations

from typing import NamedTuple

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
    log.warning(
        "op_marker_shortened",
        id=op.id,
        messages=len(op.messages),
        bytes=len(value),
        limit=limit,
        remedy="raise max.message.bytes of the op topic until such transactions have ended",
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
