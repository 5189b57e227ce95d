"""Sends the calls of many callers in shared `POST /v1/batch` requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Literal

from halfway.client.calls.transport import DeadlinePassedError, NoAnswerError, Reply, Transport
from halfway.client.errors import QueueFullError

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


class Coalescer:
    """Sends items of one kind, prepares or ends, and returns to each its own answer.

    If fewer than `_MAX_REQUESTS` requests are under way, an item is sent in the same turn of the event loop, so a
    single caller never waits for others. Prepares and ends have separate coalescers, because an end may have to wait
    for its topic and must not delay prepares.
    """

    def __init__(self, transport: Transport, kind: Literal["prepare", "end"], *, max_waiting: int) -> None:
        """Limit the number of waiting items to `max_waiting`."""
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
        item = _Item(body, deadline, attempt_s, loop.create_future())
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
