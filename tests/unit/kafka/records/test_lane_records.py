"""A lane write becomes records with the headers of docs/protocol.md#topics."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from halfway.coordinator.ports import TOMBSTONE, LaneWrite
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.records.codec import decode_half, decode_op, decode_parked, encode_half, encode_op
from halfway.kafka.records.lane_records import Encoded, RecordLimits, encode, oversized
from halfway.protocol.records import Half, Message, MessageDigest, Op, OpKind, Parked
from halfway.protocol.transactions import Cause

CONFIG = KafkaConfig(properties={"bootstrap.servers": "127.0.0.1:9"}, max_prepare_bytes=1_000)
MESSAGES = (
    Message(topic="orders", key=b"k", value=b"v", headers=(("h", b"1"), ("h", None)), partition=3),
    Message(topic="points", key=None, value=None),
)
HALF = Half(id="a-1", group="g", messages=MESSAGES, prepared_at=7, since=7, fingerprint=b"f" * 16)
OP = Op(
    kind=OpKind.COMMITTED, id="a-1", group="g", half_offset=1, cause=Cause.PRODUCER, prepared_at=7, at=8, messages=()
)


def write(**fields: object) -> LaneWrite:
    settings: dict[str, object] = {
        "shard": 2,
        "id": "a-1",
        "group": "g",
        "state": "committed",
        "prepared_at": 7,
        "deadline": 0,
    }
    return LaneWrite(**(settings | fields))  # type: ignore[arg-type]


def encoded(lane_write: LaneWrite, **limits: int) -> Encoded:
    return encode(lane_write, CONFIG, RecordLimits.needed(CONFIG)._replace(**limits))


def marker_of(messages: int, topic: str) -> Op:
    """Return the marker of a commit with this many of the smallest messages that have a key and a value."""
    digest = MessageDigest.of(Message(topic=topic, key=b"k", value=b"v"))
    return msgspec.structs.replace(OP, fingerprint=b"f" * 16, remark="r" * 1024, messages=(digest,) * messages)


@pytest.mark.parametrize("topic", ["t", "orders", "t" * 249])
@pytest.mark.parametrize("most", [1, 1_000, 30_000])
def test_a_marker_of_as_many_messages_as_a_prepare_may_have_is_whole(most: int, topic: str) -> None:
    """For any topic names that the half message allows."""
    config = replace(CONFIG, max_prepare_bytes=max(4_194_304, most * 4096))
    half = msgspec.structs.replace(HALF, messages=(Message(topic=topic, key=b"k", value=b"v"),) * most)
    assert most <= config.max_messages
    assert len(encode_half(half)) <= config.half_record_bytes
    assert len(encode_op(marker_of(most, topic))) <= config.op_record_bytes


def test_a_marker_that_its_topic_does_not_take_names_no_messages() -> None:
    """It was accepted when a prepare could have more messages, and is ended nevertheless; what counts is the topic."""
    large = marker_of(26_000, "orders")
    assert len(encode_op(large)) > CONFIG.op_max_message_bytes
    record = encoded(write(op=large, half=TOMBSTONE), op=1_048_588).op
    assert record is not None
    assert decode_op(record.value) == msgspec.structs.replace(large, messages=())
    whole = encoded(write(op=large, half=TOMBSTONE), op=8_000_000).op
    assert whole is not None
    assert decode_op(whole.value) == large


def test_kept_records_are_written_as_far_as_the_write_has_them() -> None:
    ended = encoded(write(op=OP, half=TOMBSTONE))
    assert ended.key == b"a-1"
    assert ended.real == []
    assert ended.parked is None
    assert ended.half is not None
    assert ended.half.value is None
    assert ended.op is not None
    assert decode_op(ended.op.value) == OP
    assert ended.op.headers == [("halfway-kind", b"op"), ("halfway-group", b"g"), ("halfway-state", b"committed")]
    parked = Parked(half=HALF, reason="asked enough", parked_at=9, checks=15)
    record = encoded(write(half=HALF, parked=parked))
    assert record.op is None
    assert record.half is not None
    assert decode_half(record.half.value) == HALF
    assert record.half.headers[3:] == [("halfway-prepared-at", b"7")], "its timestamp is that of the append"
    assert record.parked is not None
    assert decode_parked(record.parked.value) == parked


def test_the_internal_topic_that_would_refuse_a_record_is_named() -> None:
    """It is found before the Kafka transaction begins; a payload is as large as the real topics take."""
    parked = Parked(half=HALF, reason="r" * 10_000, parked_at=9, checks=15)
    parking = encoded(write(parked=parked, op=OP, half=TOMBSTONE, size=HALF.size))
    again = encoded(write(half=msgspec.structs.replace(HALF, remark="r" * 10_000), size=HALF.size))
    limits = RecordLimits(half=9_000, op=9_000, parked=9_000)
    assert oversized(parking, CONFIG, limits) == CONFIG.parked_topic
    assert oversized(parking, CONFIG, limits._replace(parked=12_000)) is None
    assert oversized(again, CONFIG, limits) == CONFIG.half_topic
    assert oversized(again, CONFIG, limits._replace(half=12_000)) is None
    large = encoded(write(messages=(Message(topic="points", value=b"x" * 10_000),), op=OP, size=10_000))
    assert oversized(large, CONFIG, limits) is None
