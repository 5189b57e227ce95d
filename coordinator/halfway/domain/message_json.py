"""The JSON form of messages and times, in answers and in check requests (docs/rest.md#prepare)."""

from __future__ import annotations

from base64 import b64encode
from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal

import msgspec

from halfway.domain.records import Message
from halfway.domain.text import as_text


class BinaryData(msgspec.Struct, frozen=True, gc=False):
    """Bytes that are not text."""

    data: str
    type: Literal["BINARY"] = "BINARY"


ShownData = str | BinaryData | None


class ShownHeader(msgspec.Struct, frozen=True, kw_only=True):
    """A header of a prepared message."""

    name: str
    value: ShownData


class ShownMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared message. Text is shown as a plain string, anything else as BINARY."""

    topic: str
    key: ShownData
    value: ShownData
    headers: list[ShownHeader]
    partition: int | None

    def __repr__(self) -> str:
        """Leave the payload out, because a repr may end up in a log."""
        return f"ShownMessage(topic={self.topic!r})"


def shown_message(message: Message) -> ShownMessage:
    """Return the JSON form of a message."""
    return ShownMessage(
        topic=message.topic,
        key=shown_data(message.key),
        value=shown_data(message.value),
        headers=[ShownHeader(name=name, value=shown_data(value)) for name, value in message.headers],
        partition=message.partition,
    )


def shown_data(data: bytes | None) -> ShownData:
    """Return the JSON form of a key or a value: a plain string if it is text."""
    if data is None:
        return None
    text = as_text(data)
    return BinaryData(data=b64encode(data).decode()) if text is None else text


@lru_cache(maxsize=1024)
def rfc3339(ms: int) -> str:
    """Return milliseconds since the epoch as `2026-01-31T12:00:00.000Z`. Cached: many come within a millisecond."""
    return f"{_to_the_second(ms // 1000)}.{ms % 1000:03d}Z"


@lru_cache(maxsize=256)
def _to_the_second(seconds: int) -> str:
    """Return a time without its milliseconds. Cached, since it is the same for all prepares of one second."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"
