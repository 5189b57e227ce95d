"""aiohttp's low-level server with bounds: on connections, on headers that stall, and with problems for bad HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from halfway.rest.calls import refusal
from halfway.rest.errors import BadHttpError, InternalError
from halfway.rest.problems import CONTENT_TYPE

log = structlog.get_logger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

IDLE_S: Final = 75.0
"""A connection may be idle, or in the middle of its headers, for this long."""
LINGER_S: Final = 5.0
MAX_CONNECTIONS: Final = 10_000
_BAD_REQUEST: Final = 400


class _Connection(RequestHandler):
    """A connection whose errors below the handler are problem documents too."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - it can hold what the client sent
    ) -> web.StreamResponse:
        """Answer what is not HTTP, or a fault of ours, and close the connection."""
        del request
        if isinstance(exc, ConnectionError):
            raise exc  # it was lost while the request came: no fault of ours, and nobody to be answered
        if status != _BAD_REQUEST:
            log.error("request_failed", exc_info=exc)
        told = refusal(BadHttpError() if status == _BAD_REQUEST else InternalError())
        response = web.Response(status=told.status, body=told.body, content_type=CONTENT_TYPE)
        response.force_close()
        return response


class _Server(web.Server):
    """Makes connections, no more than there may be."""

    def __init__(self, handler: Handler, *, max_connections: int, **options: Any) -> None:
        super().__init__(handler, **options)
        self._options = options
        self._max_connections = max_connections

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=asyncio.get_running_loop(), **self._options)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > self._max_connections:
            transport.abort()


class HttpServer:
    """One listening port. `stop` closes it and every connection; finishing requests first is the caller's part."""

    def __init__(self, handler: Handler, *, max_connections: int = MAX_CONNECTIONS) -> None:
        """Keep the handler; nothing is opened."""
        self._handler = handler
        self._max_connections = max_connections
        self._runner: web.ServerRunner | None = None
        self._site: web.TCPSite | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port, a free one for 0; OSError where it is taken or not ours to take."""
        server = _Server(
            self._handler,
            max_connections=self._max_connections,
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
        """Take no more connections; those that are open stay."""
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
