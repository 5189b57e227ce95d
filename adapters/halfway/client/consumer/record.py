"""A record as a handler gets it, and what tells it from every other."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, Final

from confluent_kafka import Message

Headers = tuple[tuple[str, bytes | None], ...]

_TRANSACTION_ID: Final = re.compile(rb"[A-Za-z0-9._~-]{1,128}")
_MESSAGE: Final = re.compile(rb"([1-9][0-9]{0,5})/[1-9][0-9]{0,5}")
_read_headers: Final = methodcaller("headers")
"""`message.headers()`, by a call whose result Python checks: an interpreter that is warm checks no direct one."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One record of a topic."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers

    @classmethod
    def of(cls, message: Message) -> Record:
        """Take over a message that is no error."""
        return cls(
            topic=message.topic() or "",
            partition=message.partition() or 0,
            offset=message.offset() or 0,
            timestamp_ms=message.timestamp()[1],
            key=_data(message.key()),
            value=_data(message.value()),
            headers=_headers(message),
        )

    @property
    def id(self) -> str:
        """What the record is recognised by: its message in its transaction, or its place if halfway did not write it.

        A place has the timestamp with it, because a topic that is deleted and made again has the same places again.
        """
        message = _MESSAGE.fullmatch(self.header("halfway-message") or b"")
        if self.transaction_id is None or message is None:
            return f"{self.topic}/{self.partition}/{self.offset}/{self.timestamp_ms}"
        return f"{self.transaction_id}/{message[1].decode()}"

    @property
    def transaction_id(self) -> str | None:
        """The id of the transaction that the message belongs to; None if halfway did not write it."""
        found = self.header("halfway-transaction-id") or b""
        return found.decode() if _TRANSACTION_ID.fullmatch(found) else None

    def header(self, name: str) -> bytes | None:
        """Return the last value of a header, None if there is none."""
        return next((value for found, value in reversed(self.headers) if found == name), None)

    def json(self) -> Any:
        """Return the value read as JSON."""
        return json.loads(self.value or b"null")


def _headers(message: Message) -> Headers:
    """Return the headers; none if a name is not UTF-8: anybody who may write to the topic can append such a record."""
    try:
        found = _read_headers(message) or ()
    except SystemError:
        # What Python makes of confluent_kafka's answer then, whose broken headers end the process if they are read.
        message.set_headers([])
        return ()
    return tuple((str(header[0]), _data(header[1])) for header in found)


def _data(data: str | bytes | None) -> bytes | None:
    return data.encode() if isinstance(data, str) else data
