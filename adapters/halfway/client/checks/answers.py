"""Answers halfway's checks (docs/rest.md, "Answer a check")."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Any, Final

from halfway.client.checks.verification import CheckVerifier, Headers, InvalidSignatureError
from halfway.client.errors import HalfwayError
from halfway.client.messages import OUTCOMES, Outcome
from halfway.client.threads import AllBusyError, BoundedThreads

log = logging.getLogger(__name__)

Decide = Callable[["Check"], Outcome | Awaitable[Outcome]]
"""Returns the outcome of a transaction. A coroutine function runs in the event loop, any other function in a thread."""
DecideSync = Callable[["Check"], Outcome]

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
    """The prepared messages, in the format of docs/rest.md."""
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
            if inspect.iscoroutinefunction(decide):
                return _valid_outcome(check, await decide(check))
            outcome = await asyncio.to_thread(decide, check)
            return _valid_outcome(check, await outcome if inspect.isawaitable(outcome) else outcome)
    except TimeoutError:
        log.warning(_LATE, check.id, within_s)
        return "unknown"
    except Exception:
        log.exception(_FAILED, check.id)
        return "unknown"


def _valid_outcome(check: Check, outcome: object) -> Outcome:
    if isinstance(outcome, str) and outcome in OUTCOMES:
        return outcome  # type: ignore[return-value]  # it is one of them
    if inspect.iscoroutine(outcome):
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
