"""aiohttp's low-level server with bounds: on connections, on headers that stall, and with problems for bad HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, Final

import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from halfway.rest.handlers.calls import refusal
from halfway.rest.responses.errors import BadHttpError, InternalError
from halfway.rest.responses.problems import CONTENT_TYPE
from halfway.rest.responses.unsent import Unsent

log = structlog.get_logger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

IDLE_S: Final = 75.0
"""A connection may be idle, or in the middle of its headers, for this long."""
LINGER_S: Final = 5.0
MAX_CONNECTIONS: Final = 10_000
UNREAD_S: Final = 20.0
"""The system closes a connection whose client acknowledges nothing for this long."""
_LOOKED_AT: Final = 256
"""Connections to look at for an idle one if there are too many."""
_BAD_REQUEST: Final = 400


class _Connection(RequestHandler):
    """A connection that answers errors below the handler with problem documents, and ends if nobody reads it."""

    def __init__(self, manager: _Server, **options: Any) -> None:
        super().__init__(manager, **options)
        self._unsent = manager.unsent
        self.waiting: asyncio.Task[Any] | None = None
        """The task to cancel if the connection is lost."""

    @property
    def idle(self) -> bool:
        """Whether it is open and no request is under way."""
        return self.transport is not None and not self._request_in_progress and not self._messages

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock = transport.get_extra_info("socket")
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_S * 1000))

    async def start(self) -> None:
        """Serve requests, unless the connection was one too many."""
        if self.transport is not None:
            await super().start()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._unsent.end(self)
        super().connection_lost(exc)
        if self.waiting is not None:
            self.waiting.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.transport is not None:
            self._unsent.begin(self, self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unsent.end(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - it can hold what the client sent
    ) -> web.StreamResponse:
        """Answer bad HTTP or an internal error, and close the connection."""
        del request
        if isinstance(exc, ConnectionError):
            raise exc  # the connection was lost while the request arrived: nobody to answer
        if status != _BAD_REQUEST:
            log.error("request_failed", exc_info=exc)
        told = refusal(BadHttpError() if status == _BAD_REQUEST else InternalError())
        response = web.Response(status=told.status, body=told.body, content_type=CONTENT_TYPE)
        response.force_close()
        return response


class _Server(web.Server):
    """Makes connections, up to the limit."""

    def __init__(self, handler: Handler, *, max_connections: int, unsent: Unsent, **options: Any) -> None:
        super().__init__(handler, **options)
        self.unsent = unsent
        self._options = options
        self._max_connections = max_connections

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=asyncio.get_running_loop(), **self._options)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self._connections) > self._max_connections:
            eldest = [one for one in islice(self._connections, _LOOKED_AT) if isinstance(one, _Connection)]
            idle = next((one for one in eldest if one.idle and one is not handler), None)
            idle = idle or next((one for one in eldest if one.waiting is not None), None)
            if idle is None:
                transport.abort()
            else:
                idle.force_close()


@contextmanager
def cancelled_when_lost(request: web.BaseRequest) -> Iterator[None]:
    """Cancel the current task if the request's connection is lost; ConnectionResetError if it is already."""
    connection = request.protocol
    if request.transport is None:
        raise ConnectionResetError
    if not isinstance(connection, _Connection):
        yield
        return
    connection.waiting = asyncio.current_task()
    try:
        yield
    finally:
        connection.waiting = None


class HttpServer:
    """One listening port. `stop` closes it and every connection; the caller finishes requests first."""

    def __init__(
        self, handler: Handler, *, max_connections: int = MAX_CONNECTIONS, unsent: Unsent | None = None
    ) -> None:
        """Keep the handler; nothing is opened.

        For a connection too many, the oldest idle connection is closed instead, else the oldest one that only waits for
        an event, else the new one itself.
        """
        self._handler = handler
        self._unsent = unsent or Unsent()
        self._max_connections = max_connections
        self._runner: web.ServerRunner | None = None
        self._site: web.TCPSite | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port, a free one for 0; OSError if it is taken or not permitted."""
        server = _Server(
            self._handler,
            max_connections=self._max_connections,
            unsent=self._unsent,
            access_log=None,
            keepalive_timeout=IDLE_S,
            lingering_time=LINGER_S,
            auto_decompress=False,
            tcp_keepalive=True,
        )
        runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port, backlog=1024, reuse_address=True)
            await site.start()
        except BaseException:
            await runner.cleanup()
            raise
        self._runner, self._site = runner, site
        self.port = _bound(runner, port)
        return self.port

    async def close_port(self) -> None:
        """Accept no more connections; open ones stay."""
        if self._site is not None:
            site, self._site = self._site, None
            await site.stop()

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._runner is not None:
            runner, self._runner, self._site = self._runner, None, None
            await runner.cleanup()


def _bound(runner: web.ServerRunner, port: int) -> int:
    for address in runner.addresses:
        if isinstance(address, tuple):
            return int(address[1])
    return port
