"""One attempt of a prepare or an end, on its way to a coordinator and back, and the repeats of a call.

A call is repeated until it has a final answer or its deadline passes.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Literal, Protocol

from halfway.client.calls.transport import DeadlinePassedError, NoAnswerError, Reply
from halfway.client.errors import QueueFullError, UnavailableError, error_of

Kind = Literal["prepare", "end"]


class Connection(Protocol):
    """Where a call was sent."""

    url: str
    answered_at: float
    """When it brought an answer last."""

    def give_up(self) -> None:
        """Take no more calls."""


@dataclass(eq=False, slots=True)
class Call:
    """One attempt of a prepare or an end."""

    kind: Kind
    id: str
    body: bytes
    """A JSON object."""
    deadline: float
    attempt_s: float
    reply: asyncio.Future[Reply]
    """Cancelled if the caller has given up."""
    traceparent: str
    expires: float
    """When its time is over."""
    connection: Connection | None = None
    """Where it was sent."""
    sent_at: float = 0.0
    settled: asyncio.Future[None] | None = None
    """Done when the call has been answered, or never will be; somebody waits for it."""

    def answer(self, reply: Reply) -> None:
        """Give the caller its answer, unless it has given up."""
        if not self.reply.done():
            self.reply.set_result(reply)

    def fail(self, error: Exception) -> None:
        """Tell the caller that there is no answer, unless it has given up."""
        if not self.reply.done():
            self.reply.set_exception(error)

    def settle(self) -> None:
        """Note that nothing of it is under way any more."""
        if self.settled is not None and not self.settled.done():
            self.settled.set_result(None)


def current_span() -> str:
    """Return the span of the caller, as W3C Trace Context writes it; "" unless the service uses OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    span = None if trace is None else trace.get_current_span().get_span_context()
    if span is None or not span.is_valid:
        return ""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def answer_in(item: Any) -> Reply:
    """Return the answer that an item of a batch or of a frame holds; raises NoAnswerError if it is none."""
    try:
        body = item.get("body") or item.get("problem") or {}
        retry_after_s = body.get("retry_after_s")
        return Reply(int(item["status"]), body, None if retry_after_s is None else float(retry_after_s))
    except (AttributeError, LookupError, TypeError, ValueError):
        raise NoAnswerError("the coordinator sent an answer without a status, or that is no object") from None


ATTEMPT_S: Final = 3.0
"""How long the first attempt of a call waits for its answer: its connection may have died silently."""
_FIRST_PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 2.0
_SUCCESS: Final = frozenset({HTTPStatus.OK, HTTPStatus.CREATED})
_RETRIABLE: Final = frozenset(
    {
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.INTERNAL_SERVER_ERROR,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)
"""Answers after which the same call is sent again until its deadline. Prepares and ends are idempotent."""
_NOT_CARRIED_OUT: Final = frozenset({HTTPStatus.TOO_MANY_REQUESTS})


async def send_until_final(
    send: Callable[[float], Awaitable[Reply]],
    deadline: float,
    unconfirmed: type[UnavailableError],
    call: str,
    *,
    demand_halfway: bool,
    attempt_s: float,
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> Mapping[str, Any]:
    """Send a call until it has a final answer or its deadline passes, with full jitter between the attempts.

    The first attempt gets `attempt_s`. Each attempt without an answer doubles the time of the next one, because the
    coordinator may be slow.
    With `demand_halfway`, only a refusal by halfway itself is final: a proxy in front of it, for example during a
    change of its configuration, may answer differently later. Raises `unconfirmed` at the deadline, and RefusedError.
    """
    loop = asyncio.get_running_loop()
    pause_s = _FIRST_PAUSE_S
    is_repeat = in_doubt = False
    failure = ""
    while True:
        try:
            reply = await send(attempt_s)
        except QueueFullError as error:
            if not is_repeat:
                raise
            failure, retry_after_s = str(error), 0.0
        except NoAnswerError as error:
            in_doubt = True
            attempt_s *= 2
            is_less_specific = bool(failure) and isinstance(error, DeadlinePassedError)
            failure, retry_after_s = failure if is_less_specific else str(error), 0.0
        else:
            if reply.status in _SUCCESS:
                return reply.body
            if reply.status not in _RETRIABLE and (reply.is_from_halfway or not demand_halfway):
                raise error_of({"status": reply.status, **reply.body}, in_doubt=in_doubt)
            in_doubt = in_doubt or reply.status not in _NOT_CARRIED_OUT
            failure = f"{reply.status} {reply.body.get('error_code', '')}: {reply.body.get('detail', '')}"
            retry_after_s = reply.retry_after_s or 0.0
        is_repeat = True
        wait_s = retry_after_s + random.uniform(0, pause_s)  # noqa: S311 - jitter
        in_time = loop.time() + wait_s < deadline
        if in_time:
            await pause(wait_s)
        if not in_time or loop.time() >= deadline:
            raise unconfirmed(f"{call} has no final answer; the last attempt: {failure}")
        pause_s = min(pause_s * 2, _MAX_PAUSE_S)
