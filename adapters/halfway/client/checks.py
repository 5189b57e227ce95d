"""Answering halfway's question what became of a transaction (docs/rest.md, "Answer a check")."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from halfway.client.errors import HalfwayError
from halfway.client.outcome import OUTCOMES, Outcome
from halfway.client.threads import AllBusyError, BoundedThreads
from halfway.client.verification import CheckVerifier, Headers, InvalidSignatureError

log = logging.getLogger(__name__)

Decide = Callable[["Check"], Outcome | Awaitable[Outcome]]
"""Says what became of a transaction. A coroutine function runs in the event loop, any other in a thread."""
DecideSync = Callable[["Check"], Outcome]

MAX_QUESTION_BYTES: Final = 32 * 1024 * 1024
"""Of a check's body, which holds the messages as they were prepared."""
CONTENT_TYPE: Final = "application/json"
ANSWER_WITHIN_S: Final = 1.0
"""How long an endpoint waits for `decide`."""
_FAILED: Final = "the check of %s failed: the answer is unknown"
_LATE: Final = "the check of %s took longer than %s s: the answer is unknown"

_deciding: Final = BoundedThreads(16, "halfway-check")
"""What decides checks for callers without an event loop."""


class InvalidCheckError(HalfwayError, ValueError):
    """What came is no check of halfway's: answer it with 400."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """halfway's question whether the local transaction with this id committed."""

    id: str
    group: str
    prepared_at: str
    """RFC 3339, UTC."""
    attempt: int
    """Counted from 1."""
    messages: Sequence[Mapping[str, Any]]
    """As they were prepared, in the form of docs/rest.md."""
    nonce: str | None = None
    """Echoed with the answer, so that it counts for this question only."""
    check_id: str | None = None
    """The same for a check that was fetched (`CheckWorker`)."""

    @classmethod
    def from_json(cls, asked: Mapping[str, Any]) -> Check:
        """Take a check as halfway shows it; raises InvalidCheckError."""
        try:
            return cls(
                id=_text(asked["id"]),
                group=_text(asked["group"]),
                prepared_at=_text(asked["prepared_at"]),
                attempt=int(asked["attempt"]),
                messages=asked["messages"],
                nonce=asked.get("nonce"),
                check_id=asked.get("check_id"),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidCheckError(f"this is no check of halfway's: {type(error).__name__} at {error}") from None


def read_check(body: bytes) -> Check:
    """Read the body of a check request; raises InvalidCheckError."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidCheckError("the body is not JSON") from None
    if not isinstance(asked, dict) or asked.get("type") != "transaction.check":
        raise InvalidCheckError("the body has no type 'transaction.check'")
    return Check.from_json(asked)


async def answer_check(
    body: bytes,
    decide: Decide,
    *,
    within_s: float = ANSWER_WITHIN_S,
    headers: Headers = (),
    verifier: CheckVerifier | None = None,
) -> tuple[int, bytes]:
    """Return the HTTP status and the JSON body that answer a check request.

    If `decide` raises, or takes longer than `within_s`, the answer is `unknown`: halfway asks again. With a verifier,
    what halfway has not signed is answered 401.
    """
    try:
        check = _verified(body, headers, verifier)
    except (InvalidSignatureError, InvalidCheckError) as error:
        return refused(error)
    return _answered(check, await decided(check, decide, within_s))


def answer_check_sync(
    body: bytes,
    decide: DecideSync,
    *,
    within_s: float | None = ANSWER_WITHIN_S,
    headers: Headers = (),
    verifier: CheckVerifier | None = None,
) -> tuple[int, bytes]:
    """Do what `answer_check` does, without an event loop; the caller answers with CONTENT_TYPE.

    `decide` runs in a thread of its own, without the caller's context variables, 16 at a time in a process: the answer
    is `unknown` if so many have not returned yet. With `within_s=None` it runs in the caller's thread, without a bound.
    """
    try:
        check = _verified(body, headers, verifier)
    except (InvalidSignatureError, InvalidCheckError) as error:
        return refused(error)
    return _answered(check, _decided_sync(check, decide, within_s))


def _decided_sync(check: Check, decide: DecideSync, within_s: float | None) -> Outcome:
    """Return the outcome, `unknown` if `decide` raises or takes too long.

    What goes on after that can write a decision of the barrier later, as the check that halfway repeats would: whoever
    is asked then reads it, and a local transaction that comes after it fails.
    """
    try:
        if within_s is None:
            return _checked(check, decide(check))
        deciding = _deciding.start(lambda: _checked(check, decide(check)))
        if not wait([deciding], within_s).done:
            log.warning(_LATE, check.id, within_s)
            return "unknown"
        if (failed := deciding.exception()) is None:
            return deciding.result()
        log.error(_FAILED, check.id, exc_info=failed)
    except AllBusyError as error:
        log.warning("the check of %s finds no thread, %s: the answer is unknown", check.id, error)
    except Exception:
        log.exception(_FAILED, check.id)
    return "unknown"


async def decided(check: Check, decide: Decide, within_s: float) -> Outcome:
    """Return the outcome that `decide` returns, `unknown` if it raises or takes too long."""
    try:
        async with asyncio.timeout(within_s):
            if inspect.iscoroutinefunction(decide):
                return _checked(check, await decide(check))
            outcome = await asyncio.to_thread(decide, check)
            return _checked(check, await outcome if inspect.isawaitable(outcome) else outcome)
    except TimeoutError:
        log.warning(_LATE, check.id, within_s)
        return "unknown"
    except Exception:
        log.exception(_FAILED, check.id)
        return "unknown"


def _checked(check: Check, outcome: object) -> Outcome:
    if isinstance(outcome, str) and outcome in OUTCOMES:
        return outcome  # type: ignore[return-value]  # it is one of them
    if inspect.iscoroutine(outcome):
        outcome.close()
    log.error("the check of %s returned %r, not commit, rollback or unknown", check.id, outcome)
    return "unknown"


def _answered(check: Check, outcome: Outcome) -> tuple[int, bytes]:
    answer: dict[str, object] = {"outcome": outcome}
    if check.nonce is not None:
        answer["nonce"] = check.nonce
    return HTTPStatus.OK, json.dumps(answer).encode()


def _verified(body: bytes, headers: Headers, verifier: CheckVerifier | None) -> Check:
    if verifier is not None:
        verifier.verify(body, headers)
    return read_check(body)


def refused(error: InvalidSignatureError | InvalidCheckError) -> tuple[int, bytes]:
    """Return the answer to a request that is no check of halfway's."""
    status = HTTPStatus.UNAUTHORIZED if isinstance(error, InvalidSignatureError) else HTTPStatus.BAD_REQUEST
    return status, json.dumps({"error": str(error)}).encode()


def too_large() -> tuple[int, bytes]:
    """Return the answer to a body above MAX_QUESTION_BYTES."""
    detail = f"the body has more than {MAX_QUESTION_BYTES} bytes"
    return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, json.dumps({"error": detail}).encode()


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no string")
    return value
