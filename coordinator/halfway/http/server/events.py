"""Server-sent events: statistics, computed once for all listeners (docs/rest.md#events)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from aiohttp import web

from halfway.coordinator.requests import Moment
from halfway.http.handlers.statistics import StatisticsResponse, to_response
from halfway.http.requests import operator_models
from halfway.http.requests.validation import parameters
from halfway.http.responses.answer import ENCODER
from halfway.protocol.errors import HalfwayError, OverloadedError, ShuttingDownError
from halfway.protocol.principal import Permission

if TYPE_CHECKING:
    from halfway.coordinator.coordinator import Coordinator
    from halfway.http.handlers.handlers import Call
    from halfway.protocol.principal import Principal

log = structlog.get_logger(__name__)

MAX_LISTENERS: Final = 500
EVERY_S: Final = 1.0
HEARTBEAT_S: Final = 10.0
_KEY_CHECK_S: Final = 0.5
"""How often a listener's key is checked, however long it takes to gather the statistics."""
_RETRY: Final = b"retry: 2000\n\n"
_HEARTBEAT: Final = b": heartbeat\n\n"


class _Feed:
    """The events for all listeners of one view: one group, or all groups."""

    def __init__(self) -> None:
        self.listeners = 0
        self.number = 0
        """The number of the last event; 0 before the first."""
        self.event = b""
        self.published: StatisticsResponse | None = None
        """The statistics of the last event, without their time."""
        self.updated = asyncio.Event()
        """Set when statistics were gathered again, whether they changed or not."""
        self.task: asyncio.Task[None] | None = None

    def publish(self, statistics: StatisticsResponse) -> None:
        """Make an event if the statistics have changed, and wake all listeners."""
        compared = msgspec.structs.replace(statistics, at=Moment())
        if compared != self.published:
            self.published = compared
            self.number += 1
            self.event = _event("statistics", statistics)
        self.wake()

    def wake(self) -> None:
        updated, self.updated = self.updated, asyncio.Event()
        updated.set()


class Events:
    """The listeners of this instance."""

    def __init__(self, coordinator: Coordinator) -> None:
        """Start without listeners. Statistics are gathered only while there are listeners."""
        self._coordinator = coordinator
        self._feeds: dict[str | None, _Feed] = {}
        self._listeners = 0
        self._stopping = False

    def __len__(self) -> int:
        return self._listeners

    def stop(self) -> None:
        """Send every listener the event that this instance stops, and end its connection."""
        self._stopping = True
        for feed in self._feeds.values():
            feed.wake()

    async def serve(self, call: Call) -> web.StreamResponse:
        """Send events until the client disconnects, its key becomes invalid, or this instance stops.

        Raises:
            OverloadedError: the limit of listeners is reached, or half of it by this group.
            InvalidRequestError: a parameter is wrong.

        """
        limit = parameters(operator_models.EventParameters, *call.query).max
        if self._listeners >= MAX_LISTENERS:
            raise OverloadedError(f"{self._listeners} clients listen to events already: try again later")
        group = call.principal.group
        of_group = self._feeds[group].listeners if group in self._feeds else 0
        if group is not None and of_group >= max(1, MAX_LISTENERS // 2):
            raise OverloadedError(
                f"{of_group} clients of group {group!r} listen to events already, and no group may have more than half"
            )
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
        feed = self._join(call.principal.group)
        try:
            await response.prepare(call.request)
            await response.write(_RETRY)
            reason = await self._send(response, feed, call.principal, limit)
            if reason is not None:
                await response.write(_event("end", {"error_code": reason.code, "detail": reason.detail}))
            await response.write_eof()
        finally:
            self._listeners -= 1
            self._leave(call.principal.group, feed)
        return response

    async def _send(
        self, response: web.StreamResponse, feed: _Feed, principal: Principal, limit: int | None
    ) -> HalfwayError | None:
        """Send events and heartbeats; return the reason for the end, None after `limit` events."""
        loop = asyncio.get_running_loop()
        number, sent, sent_at = 0, 0, loop.time()
        while sent != limit:
            updated = feed.updated
            if self._stopping:
                return ShuttingDownError()
            try:
                self._coordinator.authority.require(principal, Permission.READ_STATISTICS, principal.group)
            except HalfwayError as error:
                return error
            if feed.number != number:
                # A slow client skips the events that it missed, and gets the last one.
                number, sent, sent_at = feed.number, sent + 1, loop.time()
                await response.write(feed.event)
            elif loop.time() - sent_at >= HEARTBEAT_S:
                sent_at = loop.time()
                await response.write(_HEARTBEAT)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(HEARTBEAT_S, _KEY_CHECK_S)):
                        await updated.wait()
        return None

    # --- one feed for all listeners of a view

    def _join(self, group: str | None) -> _Feed:
        feed = self._feeds.get(group)
        if feed is None:
            feed = self._feeds[group] = _Feed()
            feed.task = asyncio.create_task(self._run(feed, group))
        feed.listeners += 1
        return feed

    def _leave(self, group: str | None, feed: _Feed) -> None:
        feed.listeners -= 1
        if not feed.listeners:
            if feed.task is not None:
                feed.task.cancel()
            if self._feeds.get(group) is feed:
                del self._feeds[group]

    async def _run(self, feed: _Feed, group: str | None) -> None:
        """Gather statistics periodically, and publish them."""
        while True:
            try:
                statistics = await self._coordinator.statistics.get(group)
                feed.publish(to_response(statistics, of_one_group=group is not None))
            except Exception:
                log.exception("statistics_not_gathered")
                feed.wake()
            await asyncio.sleep(EVERY_S)


def _event(name: str, data: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + ENCODER.encode(data) + b"\n\n"
