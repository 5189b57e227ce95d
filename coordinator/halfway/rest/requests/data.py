"""Converts keys, values and times between JSON and bytes (docs/rest.md#prepare)."""

from __future__ import annotations

import binascii
from typing import Literal

import msgspec

from halfway.domain.message_json import rfc3339


class TypedData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A key or a value with its type, as in Confluent's REST v3."""

    type: Literal["STRING", "JSON", "BINARY"]
    data: msgspec.Raw
    """STRING: a string. JSON: any JSON; its bytes are kept unchanged. BINARY: a string of base64."""


Data = str | TypedData | None

_STRING = msgspec.json.Decoder(str)


def to_bytes(data: Data) -> bytes | None:
    """Return the bytes of a key or a value, None for null.

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
    """Return the bytes of standard base64 with padding; raise ValueError for anything else."""
    return binascii.a2b_base64(text.encode("ascii"), strict_mode=True)


def rfc3339_or_none(ms: int | None) -> str | None:
    """Return a time in RFC 3339, None for None."""
    return None if ms is None else rfc3339(ms)
