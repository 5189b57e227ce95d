"""Calls in shared `POST /v1/batch` requests, for as long as no coordinator accepts a stream."""

from __future__ import annotations

import asyncio
from collections import deque
from http import HTTPStatus
from typing import Any, Final

from halfway.client.calls.call import Call, Kind, answer_in
from halfway.client.calls.transport import NoAnswerError, Reply, Transport

_MAX_CALLS: Final = 100
_MAX_BYTES: Final = 1024 * 1024
"""The size limit of one request. A call that is larger is sent alone."""
_MAX_REQUESTS: Final = 4
"""The limit of requests under way. Calls that arrive in the meantime share the next request."""

_REFUSED_TOGETHER: Final = {
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
}
"""The refusals of a body, such as one with too many fields. Each half is sent again, so that no call is refused because
of its neighbours."""


class Batches:
    """Sends calls of one kind, and returns to each its own answer.

    If fewer than `_MAX_REQUESTS` requests are under way, a call is sent in the same turn of the event loop, so a
    single caller never waits for others. Prepares and ends have separate batches, because an end may have to wait
    for its topic and must not delay prepares.
    """

    def __init__(self, transport: Transport, kind: Kind) -> None:
        self._transport = transport
        self._kind = kind
        self.waiting: deque[Call] = deque()
        self.sent: set[Call] = set()
        """The calls whose request is under way, also those whose caller has given up."""
        self._under_way: set[asyncio.Task[None]] = set()
        self._is_scheduled = False

    def add(self, call: Call) -> None:
        """Send a call with all others that are added in this turn of the event loop."""
        self.waiting.append(call)
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send_waiting)

    async def close(self) -> None:
        """Send no more, and cancel the requests under way. The client ends the callers."""
        self.waiting.clear()
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    def _send_waiting(self) -> None:
        self._is_scheduled = False
        while len(self._under_way) < _MAX_REQUESTS and (calls := self._next_calls()):
            self.sent.update(calls)
            task = asyncio.get_running_loop().create_task(self._send(calls))
            self._under_way.add(task)
            task.add_done_callback(self._on_done)

    def _next_calls(self) -> list[Call]:
        calls: list[Call] = []
        size = 0
        while self.waiting and len(calls) < _MAX_CALLS:
            call = self.waiting[0]
            if calls and size + len(call.body) > _MAX_BYTES:
                break
            self.waiting.popleft()
            if not call.reply.done():  # its caller still waits
                calls.append(call)
                size += len(call.body)
        return calls

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._send_waiting()

    async def _send(self, calls: list[Call]) -> None:
        try:
            await self._send_one(calls)
        finally:
            self.sent.difference_update(calls)
            for call in calls:
                call.settle()

    async def _send_one(self, calls: list[Call]) -> None:
        body = b'{"%s":[%s]}' % (self._kind.encode(), b",".join(call.body for call in calls))
        try:
            reply = await self._transport.send(
                "POST",
                "/v1/batch",
                body,
                traces=",".join(call.traceparent for call in calls).rstrip(","),
                deadline=max(call.deadline for call in calls),
                attempt_s=max(call.attempt_s for call in calls),
            )
            if reply.status in _REFUSED_TOGETHER and len(calls) > 1:
                middle = len(calls) // 2
                await self._send_one(calls[:middle])
                await self._send_one(calls[middle:])
                return
            answers = _answers(reply, self._kind, len(calls))
        except NoAnswerError as error:
            for call in calls:
                call.fail(error)
            return
        for call, answer in zip(calls, answers, strict=True):
            call.answer(answer)


def _answers(reply: Reply, kind: str, count: int) -> list[Reply]:
    """Return the answer to each call; a refusal of the whole request is the answer to all of them."""
    listed: Any = reply.body.get(kind)
    if reply.status != HTTPStatus.OK or not isinstance(listed, list) or len(listed) != count:
        status = HTTPStatus.BAD_GATEWAY if reply.status == HTTPStatus.OK else reply.status
        return [Reply(status=status, body=reply.body, retry_after_s=reply.retry_after_s)] * count
    return [answer_in(item) for item in listed]
