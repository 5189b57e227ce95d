"""The headers that name, date and sign a check, as Standard Webhooks has them (docs/rest.md#a-signed-check)."""

from __future__ import annotations

import hashlib
import hmac
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Final

_VERSION: Final = "v1,"


def signed_headers(check_id: str, body: bytes, secrets: Sequence[bytes]) -> Mapping[str, str]:
    """Return the headers of one request: its check's id, the time, and a signature by each secret if there are any."""
    timestamp = str(int(time.time()))
    headers = {"webhook-id": check_id, "webhook-timestamp": timestamp}
    if secrets:
        content = f"{check_id}.{timestamp}.".encode() + body
        headers["webhook-signature"] = " ".join(signature(secret, content) for secret in secrets)
    return headers


def signature(secret: bytes, content: bytes) -> str:
    """Return `v1,` and the HMAC-SHA-256 of what is signed."""
    return _VERSION + b64encode(hmac.digest(secret, content, hashlib.sha256)).decode("ascii")
