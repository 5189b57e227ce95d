"""The body of a check request (docs/rest.md#answer-a-check). Messages have the same form as in a prepare."""

from __future__ import annotations

import msgspec

from halfway.domain.message_json import rfc3339, shown_message
from halfway.service.check_ports import CheckRequest

_JSON = msgspec.json.Encoder()


def encode(request: CheckRequest, nonce: str) -> bytes:
    """Return the JSON of one check; its answer echoes `nonce`. `prepared_at` is RFC 3339 with milliseconds."""
    return _JSON.encode(
        {
            "type": "transaction.check",
            "nonce": nonce,
            "id": request.id,
            "group": request.group,
            "prepared_at": rfc3339(request.prepared_at),
            "attempt": request.attempt,
            "messages": [shown_message(message) for message in request.messages],
        }
    )
