"""Verifying that a check comes from halfway, and now (docs/rest.md, "A signed check")."""

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
from halfway.client.forks import ForkSafeLock

WITHIN_S: Final = 300.0
"""By how much the time of a check may differ from this machine's."""
ID_HEADER: Final = "webhook-id"
TIMESTAMP_HEADER: Final = "webhook-timestamp"
SIGNATURE_HEADER: Final = "webhook-signature"
_PREFIX: Final = "whsec_"
_MIN_SECRET_BYTES: Final = 24
_MAX_HEADER: Final = 4096
_MAX_DIGITS: Final = 12
_REMEMBERED: Final = 100_000

Headers = Mapping[str, str] | Iterable[tuple[str, str]]
"""Of a request: names, in any case, and values."""


class InvalidSignatureError(HalfwayError):
    """This request is no check that halfway has just sent: answer it with 401."""


class InvalidSecretError(HalfwayError, ValueError):
    """A secret is not one that halfway shows, such as whsec_…: take it from GET /v1/groups/{group}/check-secrets."""


class CheckVerifier:
    """Verifies the signatures of checks; one for all threads and endpoints of a service.

    It remembers the requests that it has accepted, so that a copy of one is refused: for as long as their time would
    let them pass, and the latest 100,000 at most. If halfway sends a check again, that is another request.
    """

    def __init__(
        self,
        *secrets: str,
        within_s: float = WITHIN_S,
        clock: Callable[[], float] = time.time,
        remember: int = _REMEMBERED,
    ) -> None:
        """Take the secrets of the group, of which any may have signed; raises InvalidSecretError."""
        if not secrets:
            raise InvalidSecretError("no secret was given: GET /v1/groups/{group}/check-secrets shows them")
        self._secrets = tuple(map(_secret, secrets))
        self._within_s = within_s
        self._clock = clock
        self._remember = remember
        self._seen: OrderedDict[bytes, float] = OrderedDict()
        self._lock = ForkSafeLock()

    def verify(self, body: bytes, headers: Headers) -> None:
        """Return if halfway has signed this very body within the last minutes, and it is no copy of one before.

        `body` is the raw bytes as received. Header names may have any case. Raises InvalidSignatureError for anything
        wrong.
        """
        found = _found(headers)
        check_id, timestamp, signatures = (
            _header(found, name) for name in (ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER)
        )
        if not (timestamp.isdigit() and len(timestamp) <= _MAX_DIGITS):
            raise InvalidSignatureError(f"{TIMESTAMP_HEADER} is no time in seconds")
        now = self._clock()
        if abs(now - int(timestamp)) > self._within_s:
            raise InvalidSignatureError(f"{TIMESTAMP_HEADER} is more than {self._within_s:g} s away from this clock")
        content = f"{check_id}.{timestamp}.".encode("ascii") + body
        if not self._is_signed(content, signatures):
            raise InvalidSignatureError(f"{SIGNATURE_HEADER} holds no signature by a secret of the group")
        self._demand_first(hashlib.sha256(content).digest(), int(timestamp) + self._within_s, now)

    def _is_signed(self, content: bytes, signatures: str) -> bool:
        given = [one.encode("ascii") for one in signatures.split(" ")]
        matches = False
        for secret in self._secrets:
            expected = b"v1," + b64encode(hmac.digest(secret, content, hashlib.sha256))
            for one in given:  # compare with all of them, so that the time reveals nothing
                matches |= hmac.compare_digest(expected, one)
        return matches

    def _demand_first(self, content: bytes, until: float, now: float) -> None:
        with self._lock:
            while self._seen and (len(self._seen) >= self._remember or next(iter(self._seen.values())) < now):
                self._seen.popitem(last=False)
            if content in self._seen:
                raise InvalidSignatureError("this request came before: a copy is not answered")
            self._seen[content] = until


def _secret(shown: str) -> bytes:
    try:
        secret = b64decode(shown.removeprefix(_PREFIX), validate=True)
    except (ValueError, binascii.Error, AttributeError):
        secret = b""
    if len(secret) < _MIN_SECRET_BYTES:
        raise InvalidSecretError(f"a secret is {_PREFIX} and at least {_MIN_SECRET_BYTES} bytes in base64")
    return secret


def _found(headers: Headers) -> dict[str, str]:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    found: dict[str, str] = {}
    for name, value in pairs:
        lower = name.lower()
        if lower in found and lower in (ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER):
            raise InvalidSignatureError(f"{lower} is given twice")
        found[lower] = value
    return found


def _header(found: Mapping[str, str], name: str) -> str:
    value = found.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidSignatureError(f"the header {name} is missing")
    if len(value) > _MAX_HEADER or not value.isascii():
        raise InvalidSignatureError(f"the header {name} is none of halfway's")
    return value
