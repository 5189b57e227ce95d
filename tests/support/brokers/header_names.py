"""Records with arbitrary bytes as header names, which Kafka accepts and confluent_kafka's producer cannot write."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import confluent_kafka

NO_TEXT: Final = b"\xff\xfe"
"""A name that is not UTF-8."""

_PRODUCER: Final = 0
_COPY: Final = 0x2
_TOPIC, _PARTITION, _VALUE, _KEY, _FLAGS, _HEADER = 1, 3, 4, 5, 7, 9
"""The field of a record that is set: `rd_kafka_vtype_t`."""
_DELIVERED_WITHIN_MS: Final = 60_000
_ERROR_BYTES: Final = 512


class _Data(ctypes.Structure):
    _fields_ = (("start", ctypes.c_char_p), ("bytes", ctypes.c_size_t))


class _Header(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_char_p), ("bytes", ctypes.c_ssize_t))


class _Content(ctypes.Union):
    _fields_ = (
        ("text", ctypes.c_char_p),
        ("number", ctypes.c_int32),
        ("flags", ctypes.c_int),
        ("data", _Data),
        ("header", _Header),
        ("room", ctypes.c_char * 64),
    )


class _Field(ctypes.Structure):
    """`rd_kafka_vu_t`: one field of a record."""

    _fields_ = (("type", ctypes.c_int), ("content", _Content))


class _Message(ctypes.Structure):
    """`rd_kafka_message_t` up to the offset."""

    _fields_ = (
        ("error", ctypes.c_int),
        ("topic", ctypes.c_void_p),
        ("partition", ctypes.c_int32),
        ("value", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("key", ctypes.c_void_p),
        ("key_bytes", ctypes.c_size_t),
        ("offset", ctypes.c_int64),
    )


_Delivered = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(_Message), ctypes.c_void_p)


def append_with_header_name(
    bootstrap_servers: str,
    topic: str,
    partition: int,
    records: Sequence[tuple[bytes | None, bytes | None]],
    name: bytes = NO_TEXT,
) -> list[int]:
    """Append records, each a key and a value, with one header of this name; return their offsets."""
    delivered: list[tuple[int, int]] = []

    def note(_client: object, message: "ctypes._Pointer[_Message]", _opaque: object) -> None:
        delivered.append((message.contents.error, message.contents.offset))

    called = _Delivered(note)
    kafka = _librdkafka()
    said = ctypes.create_string_buffer(_ERROR_BYTES)
    config = ctypes.c_void_p(kafka.rd_kafka_conf_new())
    for option, value in ((b"bootstrap.servers", bootstrap_servers.encode()), (b"acks", b"all")):
        assert kafka.rd_kafka_conf_set(config, option, value, said, _ERROR_BYTES) == 0, said.value
    kafka.rd_kafka_conf_set_dr_msg_cb(config, called)
    producer = ctypes.c_void_p(kafka.rd_kafka_new(_PRODUCER, config, said, _ERROR_BYTES))
    assert producer.value, said.value
    try:
        for record in records:
            fields = _fields(topic, partition, *record, name)
            error = ctypes.c_void_p(kafka.rd_kafka_produceva(producer, fields, len(fields)))
            assert error.value is None, kafka.rd_kafka_error_string(error)
        assert kafka.rd_kafka_flush(producer, _DELIVERED_WITHIN_MS) == 0
    finally:
        kafka.rd_kafka_destroy(producer)
    assert [error for error, _ in delivered] == [0] * len(records)
    return [offset for _, offset in delivered]


def _fields(topic: str, partition: int, key: bytes | None, value: bytes | None, name: bytes) -> "ctypes.Array[_Field]":
    fields = [
        _Field(_TOPIC, _Content(text=topic.encode())),
        _Field(_PARTITION, _Content(number=partition)),
        _Field(_FLAGS, _Content(flags=_COPY)),
        _Field(_HEADER, _Content(header=_Header(name, b"", 0))),
    ]
    for kind, data in ((_KEY, key), (_VALUE, value)):
        if data is not None:
            fields.append(_Field(kind, _Content(data=_Data(data, len(data)))))
    return (_Field * len(fields))(*fields)


def _librdkafka() -> ctypes.CDLL:
    """Return the library of confluent_kafka, which the process has loaded already."""
    package = Path(confluent_kafka.__file__).parent
    [path, *_] = [*package.parent.glob("confluent_kafka.libs/librdkafka*"), *package.glob(".dylibs/librdkafka*")]
    kafka = ctypes.CDLL(str(path))
    for function in (kafka.rd_kafka_conf_new, kafka.rd_kafka_new, kafka.rd_kafka_produceva):
        function.restype = ctypes.c_void_p
    kafka.rd_kafka_error_string.restype = ctypes.c_char_p
    return kafka
