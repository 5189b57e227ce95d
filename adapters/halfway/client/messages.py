"""A message for a real topic, and how it is written in JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfway.client.errors import HalfwayError

Data = str | bytes | None
"""Text is sent as UTF-8, bytes as they are, None is a null."""
Value = Data | Mapping[str, Any] | Sequence[Any]
"""A mapping or list is written as JSON; a value of None is a tombstone."""


class UnserialisableMessageError(HalfwayError, TypeError):
    """A part of a message cannot be sent; the message names the part and what it may be."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message that a transaction writes to a topic when it commits."""

    topic: str
    value: Value = None
    key: Data = None
    headers: Mapping[str, Data] = field(default_factory=dict)
    partition: int | None = None
    """None lets halfway choose by the key, as Kafka's Java client does."""

    def as_json(self) -> dict[str, Any]:
        """Return the message as `POST /v1/transactions` takes it (docs/rest.md, "Prepare")."""
        shown: dict[str, Any] = {
            "topic": self.topic,
            "key": _data(self.key, "key"),
            "value": _value(self.value),
        }
        if self.headers:
            shown["headers"] = [
                {"name": name, "value": _data(value, f"headers[{name!r}]")} for name, value in self.headers.items()
            ]
        if self.partition is not None:
            shown["partition"] = self.partition
        return shown


def _data(data: object, where: str) -> object:
    match data:
        case str():
            return _text(data, where)
        case None:
            return data
        case bytes() | bytearray() | memoryview():
            return {"type": "BINARY", "data": base64.b64encode(data).decode()}
        case _:
            raise UnserialisableMessageError(f"{where} is {type(data).__name__}: give str, bytes or None")


def _value(value: object) -> object:
    if value is None or isinstance(value, str | bytes | bytearray | memoryview):
        return _data(value, "value")
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UnserialisableMessageError(
            f"value cannot be written as JSON ({error}): give str, bytes, None, or what json.dumps takes"
        ) from None
    return {"type": "JSON", "data": value}


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnserialisableMessageError(f"{where} is no text in UTF-8 ({error}): give bytes for such data") from None
    return text
