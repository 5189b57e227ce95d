"""One attempt of a prepare or an end, on its way to a coordinator and back."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from halfway.client.calls.transport import NoAnswerError, Reply

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
