"""Server-sent events: statistics for many listeners, computed once for all of them (docs/rest.md#events)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from aiohttp import web

from halfway.domain.errors import HalfwayError, OverloadedError, ShuttingDownError
from halfway.domain.principal import Permission
from halfway.rest.handlers.statistics_handlers import shown
from halfway.rest.requests import statistics_models as models
from halfway.rest.requests.validation import parameters
from halfway.rest.responses.answer import ENCODER

if TYPE_CHECKING:
    from halfway.domain.principal import Principal
    from halfway.rest.handlers.calls import Call
    from halfway.service.coordinator import Coordinator

log = structlog.get_logger(__name__)

MAX_LISTENERS: Final = 500
EVERY_S: Final = 1.0
HEARTBEAT_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.5
"""How often a listener's key is looked at, however long figures take to gather."""
_RETRY: Final = b"retry: 2000\n\n"
_HEARTBEAT: Final = b": heartbeat\n\n"


class _Feed:
    """What all listeners of one view, that of a group or of all groups, get."""

    def __init__(self) -> None:
        self.listeners = 0
        self.number = 0
        """Of the last event; 0 before the first."""
        self.event = b""
        self.told: models.StatisticsResponse | None = None
        self.turn = asyncio.Event()
        """Set when statistics were gathered again, changed or not."""
        self.task: asyncio.Task[None] | None = None

    def tell(self, told: models.StatisticsResponse) -> None:
        """Give all listeners their turn, with an event if anything has changed."""
        compared = msgspec.structs.replace(told, at="")
        if compared != self.told:
            self.told = compared
            self.number += 1
            self.event = _event("statistics", told)
        self.wake()

    def wake(self) -> None:
        """Give all listeners their turn."""
        turn, self.turn = self.turn, asyncio.Event()
        turn.set()


class Events:
    """The listeners of this instance."""

    def __init__(self, coordinator: Coordinator) -> None:
        """Start with none; statistics are gathered while somebody listens."""
        self._coordinator = coordinator
        self._feeds: dict[str | None, _Feed] = {}
        self._listeners = 0
        self._stopping = False

    def __len__(self) -> int:
        """Count the listeners."""
        return self._listeners

    def stop(self) -> None:
        """Tell every listener that this instance stops, and let it go."""
        self._stopping = True
        for feed in self._feeds.values():
            feed.wake()

    async def serve(self, call: Call) -> web.StreamResponse:
        """Send events until the client goes, its key does, or this instance stops.

        Raises:
            OverloadedError: there are as many listeners as there may be, or half as many of this group.
            InvalidRequestError: a parameter is wrong.

        """
        most = parameters(models.EventParameters, *call.query).max
        if self._listeners >= MAX_LISTENERS:
            raise OverloadedError(f"{self._listeners} listen to events already: try again later")
        group = call.principal.group
        of_group = self._feeds[group].listeners if group in self._feeds else 0
        if group is not None and of_group >= max(1, MAX_LISTENERS // 2):
            raise OverloadedError(f"{of_group} of group {group!r} listen to events already: others need the rest")
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
                "X-Request-Id": call.id,
            }
        )
        response.force_close()
        self._listeners += 1
        feed = self._joined(call.principal.group)
        try:
            await response.prepare(call.request)
            await response.write(_RETRY)
            why = await self._sent(response, feed, call.principal, most)
            if why is not None:
                await response.write(_event("end", {"error_code": why.code, "detail": why.detail}))
            await response.write_eof()
        finally:
            self._listeners -= 1
            self._left(call.principal.group, feed)
        return response

    async def _sent(
        self, response: web.StreamResponse, feed: _Feed, principal: Principal, most: int | None
    ) -> HalfwayError | None:
        """Send what there is to tell until it is over, or `most` events; return why it is over."""
        loop = asyncio.get_running_loop()
        number, sent, sent_at = 0, 0, loop.time()
        while sent != most:
            turn = feed.turn
            if self._stopping:
                return ShuttingDownError()
            try:
                self._coordinator.authority.require(principal, Permission.READ_STATISTICS, principal.group)
            except HalfwayError as error:
                return error
            if feed.number != number:
                # What a slow client has missed is old: it gets the last one.
                number, sent, sent_at = feed.number, sent + 1, loop.time()
                await response.write(feed.event)
            elif loop.time() - sent_at >= HEARTBEAT_S:
                sent_at = loop.time()
                await response.write(_HEARTBEAT)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(HEARTBEAT_S, _LOOK_EVERY_S)):
                        await turn.wait()
        return None

    # --- one computation for all

    def _joined(self, group: str | None) -> _Feed:
        feed = self._feeds.get(group)
        if feed is None:
            feed = self._feeds[group] = _Feed()
            feed.task = asyncio.create_task(self._feed(feed, group))
        feed.listeners += 1
        return feed

    def _left(self, group: str | None, feed: _Feed) -> None:
        feed.listeners -= 1
        if not feed.listeners:
            if feed.task is not None:
                feed.task.cancel()
            if self._feeds.get(group) is feed:
                del self._feeds[group]

    async def _feed(self, feed: _Feed, group: str | None) -> None:
        """Gather statistics again and again, and tell them."""
        while True:
            try:
                found = await self._coordinator.statistics.get(group)
                feed.tell(shown(found, of_one_group=group is not None))
            except Exception:
                log.exception("statistics_not_gathered")
                feed.wake()
            await asyncio.sleep(EVERY_S)


def _event(name: str, data: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + ENCODER.encode(data) + b"\n\n"
