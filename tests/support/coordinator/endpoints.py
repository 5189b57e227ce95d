"""Producer services as halfway sees them: endpoints that are asked what became of a transaction."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from halfway.embedded.broker import HOST, pick_port
from tests.support.waiting import until_true

Json = dict[str, Any]
PeerHandler = Callable[[Json], object]
"""From the body of a check to an outcome, a whole response, or an awaitable of one of them."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One check that arrived, and when (milliseconds since the epoch)."""

    at_ms: float
    headers: dict[str, str] = field(repr=False)
    body: Json

    @property
    def id(self) -> str:
        return str(self.body["id"])

    @property
    def attempt(self) -> int:
        return int(self.body["attempt"])


_TAKEN: set[int] = set()
"""Ports that were given out here: not each is listened at right away, and two must not get the same."""


def _own_port() -> int:
    port = pick_port(_TAKEN)
    _TAKEN.add(port)
    return port


class CheckEndpoint:
    """An HTTP server that writes down what it is asked and answers what it is told to answer."""

    def __init__(self, answer: PeerHandler | str = "unknown", port: int = 0) -> None:
        self.port = port or _own_port()
        self.asked: list[Asked] = []
        self.waiting = 0
        self._answer: PeerHandler | str = answer
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/check"

    def answer(self, answer: PeerHandler | str) -> None:
        """Answer this from now on."""
        self._answer = answer

    def asked_about(self, transaction_id: str) -> list[Asked]:
        return [asked for asked in self.asked if asked.id == transaction_id]

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/check", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, self.port).start()

    async def stop(self) -> None:
        """Go away as a service does that is stopped; start() brings it back on the same port."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(Asked(at_ms=time.time() * 1000, headers=dict(request.headers), body=body))
        self.waiting += 1
        try:
            said = self._answer if isinstance(self._answer, str) else self._answer(body)
            if isinstance(said, Awaitable):
                said = await said
        finally:
            self.waiting -= 1
        if isinstance(said, web.StreamResponse):
            return said
        return web.json_response({"outcome": said})

    async def until_asked(self, times: int = 1, *, about: str | None = None) -> list[Asked]:
        """Wait until it has been asked so often, and give what it was asked."""

        def seen() -> list[Asked]:
            return self.asked if about is None else self.asked_about(about)

        await until_true(lambda: len(seen()) >= times, what=f"asked {times} times, but {seen()}")
        return seen()


Serve = Callable[["RawConversation"], Awaitable[None]]


@dataclass(kw_only=True)
class RawConversation:
    """One connection to a raw endpoint: the request as it was read, and a writer for whatever bytes."""

    request: bytes
    check: Json
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    sent: int = 0

    async def send(self, data: bytes) -> None:
        """Send bytes; ConnectionError if the other side has gone."""
        self.writer.write(data)
        await self.writer.drain()
        self.sent += len(data)

    async def until_closed(self) -> None:
        """Return once the other side has closed the connection."""
        with suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


class RawEndpoint:
    """A TCP server for answers that no HTTP library would send."""

    def __init__(self, serve: Serve) -> None:
        self.port = _own_port()
        self.conversations: list[RawConversation] = []
        self.finished: list[RawConversation] = []
        self._serve = serve
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/check"

    def serve(self, serve: Serve) -> None:
        """Converse so from the next request on."""
        self._serve = serve

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, HOST, self.port)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                conversation = RawConversation(
                    request=head + body, check=json.loads(body), reader=reader, writer=writer
                )
                self.conversations.append(conversation)
                try:
                    await self._serve(conversation)
                finally:
                    self.finished.append(conversation)
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            with suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()


def http_response(body: bytes, *, status: str = "200 OK", headers: str = "Content-Type: application/json") -> bytes:
    """Give a whole HTTP/1.1 response that closes its connection."""
    lines = f"HTTP/1.1 {status}\r\n{headers}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return lines.encode() + body


class Endpoints:
    """Makes endpoints that run until the test is over."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def check(self, answer: PeerHandler | str = "unknown", *, port: int = 0) -> CheckEndpoint:
        """Run an endpoint that gives proper answers, `unknown` until it is told another."""
        endpoint = CheckEndpoint(answer, port)
        self._stack.push_async_callback(endpoint.stop)
        await endpoint.start()
        return endpoint

    async def raw(self, serve: Serve) -> RawEndpoint:
        """Run an endpoint that sends whatever bytes."""
        endpoint = RawEndpoint(serve)
        self._stack.push_async_callback(endpoint.stop)
        await endpoint.start()
        return endpoint
