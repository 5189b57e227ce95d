"""Answers halfway's checks, and verifies that they come from halfway and are recent.

See docs/api.md, "Answer a check" and "A signed check".
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import hmac
import json
import logging
import re
import time
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from inspect import iscoroutine
from typing import Any, Final

from halfway.client.errors import HalfwayError, demand
from halfway.client.messages import OUTCOMES, Outcome
from halfway.client.threads import AllBusyError, BoundedThreads, ForkSafeLock, awaited, is_async

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


log = logging.getLogger(__name__)

Decide = Callable[["Check"], Outcome | Awaitable[Outcome]]
"""Returns the outcome of a transaction. A coroutine function runs in the event loop, any other function in a thread."""
DecideSync = Callable[["Check"], Outcome]


def demand_decide(decide: object, *, has_loop: bool) -> None:
    """Raise InvalidSettingError for what cannot decide a check; a coroutine function needs an event loop."""
    is_usable = callable(decide) and (has_loop or not is_async(decide))
    demand(is_usable, "decide", decide, f"a function{' without async' * (not has_loop)}: barrier.decide")


MAX_CHECK_BYTES: Final = 32 * 1024 * 1024
"""The limit of a check's body, which contains the prepared messages."""
CONTENT_TYPE: Final = "application/json"
_MAX_TOKEN: Final = 256
ANSWER_WITHIN_S: Final = 1.0
"""How long an endpoint waits for `decide`."""
_FAILED: Final = "the check of %s failed: the answer is unknown"
_LATE: Final = "the check of %s took longer than %s s: the answer is unknown"

_threads: Final = BoundedThreads(16, "halfway-check")
"""The threads that decide checks for callers without an event loop."""


class InvalidCheckError(HalfwayError, ValueError):
    """The request is not a check of halfway: answer it with 400."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """halfway's question whether the local transaction with this id has committed."""

    id: str
    group: str
    prepared_at: str
    """RFC 3339, UTC."""
    attempt: int
    """Counted from 1."""
    messages: Sequence[Mapping[str, Any]]
    """The prepared messages, in the format of docs/api.md."""
    nonce: str | None = None
    """The answer repeats it, so that it is valid only for this check."""
    check_id: str | None = None
    """The same for a check that was fetched (`CheckWorker`)."""
    is_verified: bool = False
    """Whether halfway has certainly sent it: it was signed, or fetched from halfway."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, is_verified: bool = False) -> Check:
        """Read a check in halfway's JSON format; raises InvalidCheckError.

        Anybody may have sent it, and its id gets into logs, so every field is as halfway sends it.
        """
        fields: dict[str, Any] = {field: document.get(field) for field in _VALID}
        for field, is_valid in _VALID.items():
            if not is_valid(fields[field]):
                raise InvalidCheckError(
                    f"this is not a check of halfway: {field} is missing or not as halfway sends it"
                )
        return cls(**fields, is_verified=is_verified)


def _matches(pattern: str) -> Callable[[object], bool]:
    compiled = re.compile(pattern)
    return lambda value: isinstance(value, str) and compiled.fullmatch(value) is not None


def _is_time(value: object) -> bool:
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _is_token(value: object) -> bool:
    return value is None or (isinstance(value, str) and len(value) <= _MAX_TOKEN)


_VALID: Final[Mapping[str, Callable[[object], bool]]] = {
    "id": _matches(r"[A-Za-z0-9._~-]{1,128}"),
    "group": _matches(r"[A-Za-z0-9._-]{1,100}"),
    "prepared_at": _is_time,
    "attempt": lambda value: type(value) is int and value >= 0,
    "messages": lambda value: isinstance(value, list),
    "nonce": _is_token,
    "check_id": _is_token,
}
"""Whether the value of a field can be from halfway."""


def read_check(body: bytes, *, is_verified: bool = False) -> Check:
    """Read the body of a check request; raises InvalidCheckError."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidCheckError("the body is not JSON") from None
    if not isinstance(document, dict) or document.get("type") != "transaction.check":
        raise InvalidCheckError("the body does not have the type 'transaction.check'")
    return Check.from_json(document, is_verified=is_verified)


async def answer_check(
    body: bytes,
    decide: Decide,
    *,
    within_s: float = ANSWER_WITHIN_S,
    headers: Headers = (),
    verifier: CheckVerifier | None = None,
) -> tuple[int, bytes]:
    """Return the HTTP status and the JSON body that answer a check request.

    If `decide` raises, or takes longer than `within_s`, the answer is `unknown`, and halfway asks again. With a
    verifier, a request that halfway has not signed is answered with 401.
    """
    try:
        check = _verify(body, headers, verifier)
    except (InvalidSignatureError, InvalidCheckError) as error:
        return refusal(error)
    return _answer(check, await decide_within(check, decide, within_s))


def answer_check_sync(
    body: bytes,
    decide: DecideSync,
    *,
    within_s: float | None = ANSWER_WITHIN_S,
    headers: Headers = (),
    verifier: CheckVerifier | None = None,
) -> tuple[int, bytes]:
    """Answer like `answer_check`, without an event loop. The content type of the answer is CONTENT_TYPE.

    `decide` runs in its own thread, without the caller's context variables. A process runs at most 16 at a time: if all
    are busy, the answer is `unknown`. With `within_s=None`, `decide` runs in the caller's thread without a time limit.
    """
    try:
        check = _verify(body, headers, verifier)
    except (InvalidSignatureError, InvalidCheckError) as error:
        return refusal(error)
    return _answer(check, _decide_sync(check, decide, within_s))


def _decide_sync(check: Check, decide: DecideSync, within_s: float | None) -> Outcome:
    """Return the outcome, `unknown` if `decide` raises or takes too long.

    A `decide` that continues after that may still write the barrier's decision, as the repeated check would. A later
    check then reads it, and a later local transaction fails.
    """
    try:
        if within_s is None:
            return _valid_outcome(check, decide(check))
        future = _threads.start(lambda: _valid_outcome(check, decide(check)))
        if not wait([future], within_s).done:
            log.warning(_LATE, check.id, within_s)
            return "unknown"
        if (failure := future.exception()) is None:
            return future.result()
        log.error(_FAILED, check.id, exc_info=failure)
    except AllBusyError as error:
        log.warning("there is no free thread for the check of %s, %s: the answer is unknown", check.id, error)
    except Exception:
        log.exception(_FAILED, check.id)
    return "unknown"


async def decide_within(check: Check, decide: Decide, within_s: float) -> Outcome:
    """Return the result of `decide`, `unknown` if it raises or takes too long."""
    try:
        async with asyncio.timeout(within_s):
            outcome = decide(check) if is_async(decide) else await asyncio.to_thread(decide, check)
            return _valid_outcome(check, await awaited(outcome))
    except TimeoutError:
        log.warning(_LATE, check.id, within_s)
        return "unknown"
    except Exception:
        log.exception(_FAILED, check.id)
        return "unknown"


def _valid_outcome(check: Check, outcome: object) -> Outcome:
    if isinstance(outcome, str) and outcome in OUTCOMES:
        return outcome  # type: ignore[return-value]  # it is one of them
    if iscoroutine(outcome):
        outcome.close()
    log.error("the check of %s returned %r, not commit, rollback or unknown", check.id, outcome)
    return "unknown"


def _answer(check: Check, outcome: Outcome) -> tuple[int, bytes]:
    answer: dict[str, object] = {"outcome": outcome}
    if check.nonce is not None:
        answer["nonce"] = check.nonce
    return HTTPStatus.OK, json.dumps(answer).encode()


def _verify(body: bytes, headers: Headers, verifier: CheckVerifier | None) -> Check:
    if verifier is not None:
        verifier.verify(body, headers)
    return read_check(body, is_verified=verifier is not None)


def refusal(error: InvalidSignatureError | InvalidCheckError) -> tuple[int, bytes]:
    """Return the answer to a request that is not a check of halfway."""
    status = HTTPStatus.UNAUTHORIZED if isinstance(error, InvalidSignatureError) else HTTPStatus.BAD_REQUEST
    return status, json.dumps({"error": str(error)}).encode()


def too_large() -> tuple[int, bytes]:
    """Return the answer to a body of more than MAX_CHECK_BYTES."""
    detail = f"the body has more than {MAX_CHECK_BYTES} bytes"
    return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, json.dumps({"error": detail}).encode()
