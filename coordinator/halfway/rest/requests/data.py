"""Converts keys, values and times between JSON and bytes (docs/rest.md#prepare)."""

from __future__ import annotations

import binascii
from base64 import b64encode
from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal

import msgspec

from halfway.domain.text import as_text


class TypedData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A key or a value with its type, as in Confluent's REST v3."""

    type: Literal["STRING", "JSON", "BINARY"]
    data: msgspec.Raw
    """STRING: a string. JSON: any JSON, whose bytes are kept unchanged. BINARY: a string of base64."""


class BinaryData(msgspec.Struct, frozen=True, gc=False):
    """Bytes that are not text, in an answer."""

    data: str
    type: Literal["BINARY"] = "BINARY"


Data = str | TypedData | None
ShownData = str | BinaryData | None

_STRING = msgspec.json.Decoder(str)


def to_bytes(data: Data) -> bytes | None:
    """Return the bytes that a key or a value stands for, None for null.

    Raises:
        ValueError: the data does not fit its type, or is not UTF-8.

    """
    if data is None:
        return None
    if isinstance(data, str):
        return data.encode()
    raw = bytes(data.data)
    if data.type == "JSON":
        raw.decode()  # msgspec does not validate the UTF-8 of raw strings
        return raw
    text = _STRING.decode(raw)
    return text.encode() if data.type == "STRING" else from_base64(text)


def from_base64(text: str) -> bytes:
    """Return the bytes of standard base64 with padding; ValueError for anything else."""
    return binascii.a2b_base64(text.encode("ascii"), strict_mode=True)


def shown(data: bytes | None) -> ShownData:
    """Return a key or a value for an answer: a plain string if it is text."""
    if data is None:
        return None
    text = as_text(data)
    return BinaryData(data=b64encode(data).decode()) if text is None else text


def rfc3339(ms: int) -> str:
    """Return milliseconds since the epoch as `2026-01-31T12:00:00.000Z`."""
    return f"{_to_the_second(ms // 1000)}.{ms % 1000:03d}Z"


@lru_cache(maxsize=256)
def _to_the_second(seconds: int) -> str:
    """Return a time without its milliseconds: the same for everything that is prepared within a second."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"


def rfc3339_or_none(ms: int | None) -> str | None:
    """Return a time in RFC 3339, None for None."""
    return None if ms is None else rfc3339(ms)
