"""The body of a check request (docs/rest.md#answer-a-check): messages in the form in which a prepare takes them."""

from __future__ import annotations

from base64 import b64encode
from datetime import UTC, datetime

import msgspec

from halfway.domain.records import Message
from halfway.domain.text import as_text
from halfway.service.ports import CheckRequest

_JSON = msgspec.json.Encoder()


def encode(request: CheckRequest, nonce: str) -> bytes:
    """Return the JSON of one question, whose answer echoes `nonce`; `prepared_at` is RFC 3339 with milliseconds."""
    return _JSON.encode(
        {
            "type": "transaction.check",
            "nonce": nonce,
            "id": request.id,
            "group": request.group,
            "prepared_at": rfc3339(request.prepared_at),
            "attempt": request.attempt,
            "messages": [_message(message) for message in request.messages],
        }
    )


def rfc3339(ms: int) -> str:
    """Return milliseconds since the epoch as `2026-01-31T12:00:00.000Z`."""
    moment = datetime.fromtimestamp(ms // 1000, UTC).replace(microsecond=ms % 1000 * 1000)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _message(message: Message) -> dict[str, object]:
    return {
        "topic": message.topic,
        "key": _data(message.key),
        "value": _data(message.value),
        "headers": [{"name": name, "value": _data(value)} for name, value in message.headers],
        "partition": message.partition,
    }


def _data(data: bytes | None) -> str | dict[str, str] | None:
    if data is None:
        return None
    text = as_text(data)
    return {"type": "BINARY", "data": b64encode(data).decode("ascii")} if text is None else text
