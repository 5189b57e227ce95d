"""Verifies that a check comes from halfway and is recent (docs/rest.md, "A signed check")."""

from __future__ import annotations

import binascii
import hashlib
import hmac
import time
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from halfway.client.errors import HalfwayError
from halfway.client.threads import ForkSafeLock

WITHIN_S: Final = 300.0
"""How much the time of a check may differ from the local clock, in seconds."""
ID_HEADER: Final = "webhook-id"
TIMESTAMP_HEADER: Final = "webhook-timestamp"
SIGNATURE_HEADER: Final = "webhook-signature"
_PREFIX: Final = "whsec_"
_MIN_SECRET_BYTES: Final = 24
_MAX_HEADER: Final = 4096
_MAX_DIGITS: Final = 12
_MAX_REMEMBERED: Final = 100_000

Headers = Mapping[str, str] | Iterable[tuple[str, str]]
"""The headers of a request: names, in any case, and values."""


class InvalidSignatureError(HalfwayError):
    """The request is not a recent check of halfway: answer it with 401."""


class InvalidSecretError(HalfwayError, ValueError):
    """A secret is not in halfway's form, whsec_…: take it from GET /v1/groups/{group}/check-secrets."""


class CheckVerifier:
    """Verifies the signatures of checks. All threads and endpoints of a service share one.

    It remembers accepted requests, so that a copy of a request is refused: as long as its time is valid, and at most
    the latest 100,000. If halfway sends a check again, that is a different request.
    """

    def __init__(
        self,
        *secrets: str,
        within_s: float = WITHIN_S,
        clock: Callable[[], float] = time.time,
        remember: int = _MAX_REMEMBERED,
    ) -> None:
        """Take the secrets of the group; a check may be signed with any of them. Raises InvalidSecretError."""
        if not secrets:
            raise InvalidSecretError("no secret was given: GET /v1/groups/{group}/check-secrets shows them")
        self._secrets = tuple(map(_secret, secrets))
        self._within_s = within_s
        self._clock = clock
        self._remember = remember
        self._seen: OrderedDict[bytes, float] = OrderedDict()
        self._lock = ForkSafeLock()

    def verify(self, body: bytes, headers: Headers) -> None:
        """Raise InvalidSignatureError unless halfway has signed this body recently, and it is not a copy.

        `body` is the raw bytes as received. Header names may have any case.
        """
        by_name = _by_name(headers)
        check_id, timestamp, signatures = (
            _header(by_name, name) for name in (ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER)
        )
        if not (timestamp.isdigit() and len(timestamp) <= _MAX_DIGITS):
            raise InvalidSignatureError(f"{TIMESTAMP_HEADER} is not a time in seconds")
        now = self._clock()
        if abs(now - int(timestamp)) > self._within_s:
            raise InvalidSignatureError(f"{TIMESTAMP_HEADER} is more than {self._within_s:g} s away from this clock")
        content = f"{check_id}.{timestamp}.".encode("ascii") + body
        if not self._is_signed(content, signatures):
            raise InvalidSignatureError(f"{SIGNATURE_HEADER} has no signature with a secret of the group")
        self._demand_new(hashlib.sha256(content).digest(), int(timestamp) + self._within_s, now)

    def _is_signed(self, content: bytes, signatures: str) -> bool:
        encoded = [signature.encode("ascii") for signature in signatures.split(" ")]
        matches = False
        for secret in self._secrets:
            expected = b"v1," + b64encode(hmac.digest(secret, content, hashlib.sha256))
            for signature in encoded:  # compare all of them, so that the duration reveals nothing
                matches |= hmac.compare_digest(expected, signature)
        return matches

    def _demand_new(self, content: bytes, until: float, now: float) -> None:
        with self._lock:
            while self._seen and (len(self._seen) >= self._remember or next(iter(self._seen.values())) < now):
                self._seen.popitem(last=False)
            if content in self._seen:
                raise InvalidSignatureError("this request is a copy of an earlier one")
            self._seen[content] = until


def _secret(text: str) -> bytes:
    try:
        secret = b64decode(text.removeprefix(_PREFIX), validate=True)
    except (ValueError, binascii.Error, AttributeError):
        secret = b""
    if len(secret) < _MIN_SECRET_BYTES:
        raise InvalidSecretError(f"a secret is {_PREFIX} and at least {_MIN_SECRET_BYTES} bytes in base64")
    return secret


def _by_name(headers: Headers) -> dict[str, str]:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    by_name: dict[str, str] = {}
    for name, value in pairs:
        lower = name.lower()
        if lower in by_name and lower in (ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER):
            raise InvalidSignatureError(f"the header {lower} occurs twice")
        by_name[lower] = value
    return by_name


def _header(by_name: Mapping[str, str], name: str) -> str:
    value = by_name.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidSignatureError(f"the header {name} is missing")
    if len(value) > _MAX_HEADER or not value.isascii():
        raise InvalidSignatureError(f"the header {name} is not from halfway")
    return value
