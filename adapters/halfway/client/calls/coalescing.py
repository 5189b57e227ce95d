"""Sends the calls of many callers in shared `POST /v1/batch` requests, again until each has a final answer."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Literal

from halfway.client.calls.transport import DeadlinePassedError, NoAnswerError, Reply, Transport
from halfway.client.errors import QueueFullError, UnavailableError, error_of

_MAX_ITEMS: Final = 100
_MAX_BYTES: Final = 1024 * 1024
"""The size limit of one request. An item that is larger is sent alone."""
_MAX_REQUESTS: Final = 4
"""The limit of requests under way. Items that arrive in the meantime share the next request."""


@dataclass(eq=False, slots=True)
class _Item:
    body: bytes
    deadline: float
    attempt_s: float
    reply: asyncio.Future[Reply]
    traceparent: str


def _traceparent() -> str:
    """Return the span of the caller, as W3C Trace Context writes it; "" unless the service uses OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    span = None if trace is None else trace.get_current_span().get_span_context()
    if span is None or not span.is_valid:
        return ""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


class Coalescer:
    """Sends items of one kind, prepares or ends, and returns to each its own answer.

    If fewer than `_MAX_REQUESTS` requests are under way, an item is sent in the same turn of the event loop, so a
    single caller never waits for others. Prepares and ends have separate coalescers, because an end may have to wait
    for its topic and must not delay prepares.
    """

    def __init__(self, transport: Transport, kind: Literal["prepare", "end"], *, max_waiting: int) -> None:
        self._transport = transport
        self._kind = kind
        self._max_waiting = max_waiting
        self._waiting: deque[_Item] = deque()
        self._under_way: set[asyncio.Task[None]] = set()
        self._is_scheduled = False

    async def submit(self, body: bytes, *, deadline: float, attempt_s: float) -> Reply:
        """Send one item, a JSON object, and return its answer. Its request gets `attempt_s` after it was sent.

        Raises QueueFullError if too many wait, and NoAnswerError if no coordinator answered or the deadline passed.
        """
        if len(self._waiting) >= self._max_waiting:
            raise QueueFullError(f"{self._max_waiting} calls of this client already wait for halfway")
        loop = asyncio.get_running_loop()
        item = _Item(body, deadline, attempt_s, loop.create_future(), _traceparent())
        self._waiting.append(item)
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._send_waiting)
        try:
            async with asyncio.timeout_at(deadline):
                return await item.reply
        except TimeoutError:
            raise DeadlinePassedError("the deadline passed before an answer came") from None

    @property
    def under_way(self) -> frozenset[asyncio.Task[None]]:
        """The requests under way. An item whose caller has given up may be in one of them."""
        return frozenset(self._under_way)

    async def close(self) -> None:
        """Send no more, and cancel the requests under way. The client ends the callers."""
        self._waiting.clear()
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    def _send_waiting(self) -> None:
        self._is_scheduled = False
        while len(self._under_way) < _MAX_REQUESTS and (items := self._next_items()):
            task = asyncio.get_running_loop().create_task(self._send(items))
            self._under_way.add(task)
            task.add_done_callback(self._on_done)

    def _next_items(self) -> list[_Item]:
        items: list[_Item] = []
        size = 0
        while self._waiting and len(items) < _MAX_ITEMS:
            item = self._waiting[0]
            if items and size + len(item.body) > _MAX_BYTES:
                break
            self._waiting.popleft()
            if not item.reply.done():  # its caller still waits
                items.append(item)
                size += len(item.body)
        return items

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._send_waiting()

    async def _send(self, items: list[_Item]) -> None:
        body = b'{"%s":[%s]}' % (self._kind.encode(), b",".join(item.body for item in items))
        try:
            reply = await self._transport.send(
                "POST",
                "/v1/batch",
                body,
                traces=",".join(item.traceparent for item in items).rstrip(","),
                deadline=max(item.deadline for item in items),
                attempt_s=max(item.attempt_s for item in items),
            )
        except NoAnswerError as error:
            for item in items:
                if not item.reply.done():
                    item.reply.set_exception(error)
            return
        if reply.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE and len(items) > 1:
            middle = len(items) // 2
            await self._send(items[:middle])
            await self._send(items[middle:])
            return
        for item, answer in zip(items, _answers(reply, self._kind, len(items)), strict=True):
            if not item.reply.done():
                item.reply.set_result(answer)


def _answers(reply: Reply, kind: str, count: int) -> list[Reply]:
    """Return the answer to each item; a refusal of the whole request is the answer to all of them."""
    listed: Any = reply.body.get(kind)
    if reply.status != HTTPStatus.OK or not isinstance(listed, list) or len(listed) != count:
        status = HTTPStatus.BAD_GATEWAY if reply.status == HTTPStatus.OK else reply.status
        return [Reply(status=status, body=reply.body, retry_after_s=reply.retry_after_s)] * count
    return [_answer(item) for item in listed]


def _answer(item: Mapping[str, Any]) -> Reply:
    body = item.get("body") or item.get("problem") or {}
    return Reply(status=item["status"], body=body, retry_after_s=body.get("retry_after_s"))


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
            await asyncio.sleep(wait_s)
        if not in_time or loop.time() >= deadline:
            raise unconfirmed(f"{call} has no final answer; the last attempt: {failure}")
        pause_s = min(pause_s * 2, _MAX_PAUSE_S)
