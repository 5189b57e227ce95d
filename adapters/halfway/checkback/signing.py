"""The headers that identify, date and sign a check, as in Standard Webhooks (docs/rest.md#a-signed-check)."""

from __future__ import annotations

import hashlib
import hmac
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Final

_VERSION: Final = "v1,"


def signed_headers(check_id: str, body: bytes, secrets: Sequence[bytes]) -> Mapping[str, str]:
    """Return the headers of one request: the id of its check, the time, and one signature per secret, if any."""
    timestamp = str(int(time.time()))
    headers = {"webhook-id": check_id, "webhook-timestamp": timestamp}
    if secrets:
        content = f"{check_id}.{timestamp}.".encode() + body
        headers["webhook-signature"] = " ".join(signature(secret, content) for secret in secrets)
    return headers


def signature(secret: bytes, content: bytes) -> str:
    """Return `v1,` and the HMAC-SHA-256 of the signed content."""
    return _VERSION + b64encode(hmac.digest(secret, content, hashlib.sha256)).decode("ascii")
