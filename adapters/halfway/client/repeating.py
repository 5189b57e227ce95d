"""Sending a call until it has a final answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

from halfway.client.errors import QueueFullError, UnavailableError, refused
from halfway.client.transport import DeadlinePassedError, NoAnswerError, Reply

_FIRST_PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 2.0
_ANSWERED: Final = frozenset({HTTPStatus.OK, HTTPStatus.CREATED})
_REPEATED: Final = frozenset(
    {
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.INTERNAL_SERVER_ERROR,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)
"""Answers after which the same call is sent again until its deadline; prepares and ends are idempotent."""
_NOT_CARRIED_OUT: Final = frozenset({HTTPStatus.TOO_MANY_REQUESTS})


async def repeated(
    once: Callable[[], Awaitable[Reply]],
    deadline: float,
    unanswered: type[UnavailableError],
    what: str,
    *,
    demand_halfway: bool,
) -> Mapping[str, Any]:
    """Send a call until it has a final answer or its deadline passes, with full jitter between the attempts.

    With `demand_halfway` only halfway's own refusal is final: what stands before it, such as a proxy that is being
    changed, may answer otherwise a moment later. Raises `unanswered` at the deadline, and RefusedError.
    """
    loop = asyncio.get_running_loop()
    pause_s = _FIRST_PAUSE_S
    sent = in_doubt = False
    failure = ""
    while True:
        try:
            reply = await once()
        except QueueFullError as error:
            if not sent:
                raise
            failure, asked_for_s = str(error), 0.0
        except NoAnswerError as error:
            in_doubt = True
            says_less = bool(failure) and isinstance(error, DeadlinePassedError)
            failure, asked_for_s = failure if says_less else str(error), 0.0
        else:
            if reply.status in _ANSWERED:
                return reply.body
            if reply.status not in _REPEATED and (reply.is_halfways or not demand_halfway):
                raise refused({"status": reply.status, **reply.body}, in_doubt=in_doubt)
            in_doubt = in_doubt or reply.status not in _NOT_CARRIED_OUT
            failure = f"{reply.status} {reply.body.get('error_code', '')}: {reply.body.get('detail', '')}"
            asked_for_s = reply.retry_after_s or 0.0
        sent = True
        wait_s = asked_for_s + random.uniform(0, pause_s)  # noqa: S311 - jitter
        in_time = loop.time() + wait_s < deadline
        if in_time:
            await asyncio.sleep(wait_s)
        if not in_time or loop.time() >= deadline:
            raise unanswered(f"{what} has no final answer; the last attempt: {failure}")
        pause_s = min(pause_s * 2, _MAX_PAUSE_S)
