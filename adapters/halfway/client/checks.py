"""Answering halfway's question what became of a transaction: over HTTP, or by fetching the questions."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from halfway.client.client import Halfway, Outcome
from halfway.client.errors import HalfwayError, RefusedError

log = logging.getLogger(__name__)

Decide = Callable[["Check"], Outcome | Awaitable[Outcome]]
"""Says what became of a transaction; a function that blocks belongs into a thread (`asyncio.to_thread`)."""

_ANSWER_WITHIN_S: Final = 1.0
_PAUSE_S: Final = 1.0
_OUTCOMES: Final = frozenset({"commit", "rollback", "unknown"})


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
    check_id: str | None = None
    """Echoed with the answer, so that it counts for this question only."""


def read_check(body: bytes) -> Check:
    """Read the body of a check request; raises InvalidCheckError."""
    try:
        asked = json.loads(body)
        if asked["type"] != "transaction.check":
            raise InvalidCheckError(f"type is {asked['type']!r}, not 'transaction.check'")
        return _check(asked)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, InvalidCheckError):
            raise
        raise InvalidCheckError(f"the body is no check of halfway's: {type(error).__name__}") from None


async def answer_check(body: bytes, decide: Decide, *, within_s: float = _ANSWER_WITHIN_S) -> tuple[int, bytes]:
    """Return the HTTP status and the JSON body that answer a check request.

    If `decide` raises, or takes longer than `within_s`, the answer is `unknown`: halfway asks again.
    """
    try:
        check = read_check(body)
    except InvalidCheckError as error:
        return HTTPStatus.BAD_REQUEST, json.dumps({"error": str(error)}).encode()
    answer: dict[str, object] = {"outcome": await _decided(check, decide, within_s)}
    if check.check_id is not None:
        answer["check_id"] = check.check_id
    return HTTPStatus.OK, json.dumps(answer).encode()


class CheckWorker:
    """Fetches a group's checks and ends their transactions, for a service that cannot be called."""

    def __init__(self, client: Halfway, decide: Decide, *, side_by_side: int = 16, wait_s: float = 20.0) -> None:
        """Answer at most `side_by_side` checks at the same time; one poll waits for `wait_s`."""
        self._client = client
        self._decide = decide
        self._side_by_side = side_by_side
        self._wait_s = wait_s

    async def run(self) -> None:
        """Go on until it is cancelled; what fails is logged and asked again by halfway."""
        while True:
            try:
                checks = await self._client.fetch_checks(wait_s=self._wait_s, max_checks=self._side_by_side)
            except HalfwayError as error:
                log.warning("halfway gave no checks: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            await asyncio.gather(*map(self._answer, checks))

    async def _answer(self, asked: Mapping[str, Any]) -> None:
        try:
            check = _check(asked)
            outcome = await _decided(check, self._decide, None)
            await self._client.end(check.id, outcome, check_id=check.check_id)
        except RefusedError as error:
            log.info("the check was settled by another: %s", error)
        except (HalfwayError, KeyError, TypeError) as error:
            log.warning("a check was not answered: %s", error)


def _check(asked: Mapping[str, Any]) -> Check:
    return Check(
        id=str(asked["id"]),
        group=str(asked["group"]),
        prepared_at=str(asked["prepared_at"]),
        attempt=int(asked["attempt"]),
        messages=asked["messages"],
        check_id=asked.get("check_id"),
    )


async def _decided(check: Check, decide: Decide, within_s: float | None) -> Outcome:
    try:
        async with asyncio.timeout(within_s):
            decided = decide(check)
            outcome = await decided if inspect.isawaitable(decided) else decided
    except TimeoutError:
        log.warning("the check of %s took longer than %s s", check.id, within_s)
        return "unknown"
    except Exception:
        log.exception("the check of %s failed", check.id)
        return "unknown"
    if outcome not in _OUTCOMES:
        log.error("the check of %s returned %r, not commit, rollback or unknown", check.id, outcome)
        return "unknown"
    return outcome
