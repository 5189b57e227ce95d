"""A message for a real topic, and its JSON format."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfway.client.errors import HalfwayError

Data = str | bytes | None
"""Text is sent as UTF-8, bytes are sent unchanged, None is null."""
Value = Data | Mapping[str, Any] | Sequence[Any]
"""A mapping or a list is sent as JSON; None is a tombstone."""


class UnserialisableMessageError(HalfwayError, TypeError):
    """A part of a message cannot be serialised; the error names the part and the accepted types."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message that a transaction writes to a topic when it commits."""

    topic: str
    value: Value = None
    key: Data = None
    headers: Mapping[str, Data] = field(default_factory=dict)
    partition: int | None = None
    """None lets halfway choose the partition by the key, as Kafka's Java client does."""

    def as_json(self) -> dict[str, Any]:
        """Return the message in the format of `POST /v1/transactions` (docs/rest.md, "Prepare")."""
        document: dict[str, Any] = {
            "topic": self.topic,
            "key": _data(self.key, "key"),
            "value": _value(self.value),
        }
        if self.headers:
            document["headers"] = [
                {"name": name, "value": _data(value, f"headers[{name!r}]")} for name, value in self.headers.items()
            ]
        if self.partition is not None:
            document["partition"] = self.partition
        return document


def _data(data: object, part: str) -> object:
    match data:
        case str():
            return _text(data, part)
        case None:
            return data
        case bytes() | bytearray() | memoryview():
            return {"type": "BINARY", "data": base64.b64encode(data).decode()}
        case _:
            raise UnserialisableMessageError(f"{part} is {type(data).__name__}: give str, bytes or None")


def _value(value: object) -> object:
    if value is None or isinstance(value, str | bytes | bytearray | memoryview):
        return _data(value, "value")
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UnserialisableMessageError(
            f"value cannot be serialised as JSON ({error}): give str, bytes, None, or a value that json.dumps accepts"
        ) from None
    return {"type": "JSON", "data": value}


def _text(text: str, part: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnserialisableMessageError(f"{part} cannot be encoded as UTF-8 ({error}): give bytes") from None
    return text
