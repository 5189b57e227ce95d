"""What stands between a service, halfway and its database, and stops a request or an answer at a named place."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

from tests.support.client.serving import serving

PLACES = tuple(f"{when} the {step}" for step in ("prepare", "commit", "end") for when in ("before", "after"))
"""Before each step of an order, and after it took effect and before the service hears of it."""
_HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


@dataclass(kw_only=True)
class Gate:
    """Stops what comes to its place first: it is cut at once, or held until it is released or cut."""

    place: str
    cuts: bool
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    _done: asyncio.Event = field(default_factory=asyncio.Event)

    async def passes(self) -> bool:
        """Return whether it may go on; if not, its connection is cut."""
        self.reached.set()
        if not self.cuts:
            await self._done.wait()
        return not self.cuts

    def release(self) -> None:
        self._done.set()

    def cut(self) -> None:
        self.cuts = True
        self._done.set()


class Crossings:
    """All places. At most one of them has a gate."""

    def __init__(self) -> None:
        self._gate: Gate | None = None
        self.halfway_url = ""
        self.database_port = 0

    def gate(self, place: str, *, cuts: bool = False) -> Gate:
        """Stop the next one that comes to a place."""
        assert place in PLACES
        self._gate = Gate(place=place, cuts=cuts)
        return self._gate

    async def passes(self, place: str) -> bool:
        gate = self._gate
        if gate is None or gate.place != place or gate.reached.is_set():
            return True
        return await gate.passes()


@asynccontextmanager
async def crossings(coordinator_url: str, postgresql_socket: Path) -> AsyncIterator[Crossings]:
    """Run one proxy in front of a coordinator, and one in front of PostgreSQL."""
    places = Crossings()

    async def forward(request: web.Request) -> web.Response:
        body = await request.read()
        step = _step(request.path, body)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        if step and not await places.passes(f"before the {step}"):
            return _cut(request)
        async with session.request(
            request.method, coordinator_url + request.raw_path, data=body, headers=headers, allow_redirects=False
        ) as answer:
            content = await answer.read()
        if step and not await places.passes(f"after the {step}"):
            return _cut(request)
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
        return web.Response(status=answer.status, body=content, headers=kept)

    links: set[asyncio.Task[None]] = set()

    async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            server = await asyncio.open_unix_connection(postgresql_socket)
            await _DatabaseLink(places, (reader, writer), server).run()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(link(reader, writer))
        links.add(task)
        task.add_done_callback(links.discard)
        task.add_done_callback(lambda _: writer.close())  # also if it is cancelled before it begins

    database = await asyncio.start_server(connected, "127.0.0.1", 0)
    places.database_port = database.sockets[0].getsockname()[1]
    async with aiohttp.ClientSession(auto_decompress=False) as session, serving(forward) as places.halfway_url:
        try:
            yield places
        finally:
            database.close()
            for task in list(links):
                task.cancel()
            await asyncio.gather(*links, return_exceptions=True)


def _step(path: str, body: bytes) -> str | None:
    """Return which step of an order a request is, alone or in a batch."""
    if path == "/v1/transactions":
        return "prepare"
    if path.endswith("/end"):
        return "end"
    if path == "/v1/batch":
        return next((step for step, items in json.loads(body).items() if items), None)
    return None


def _cut(request: web.Request) -> web.Response:
    if request.transport is not None:  # else the service is dead
        request.transport.abort()
    return web.Response()


class _DatabaseLink:
    """One connection to PostgreSQL; the commit of a transaction that inserts an order is a step."""

    def __init__(
        self,
        places: Crossings,
        service: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._places = places
        self._service = service
        self._server = server
        self._has_order = False
        self._commits = False

    async def run(self) -> None:
        """Forward both ways until either side ends or a gate cuts."""
        ways = [asyncio.create_task(self._forward_requests()), asyncio.create_task(self._forward_answers())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for _, writer in (self._service, self._server):  # before anything that may be cancelled
                writer.transport.abort()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _forward_requests(self) -> None:
        while data := await self._service[0].read(65_536):
            self._has_order |= b"INSERT INTO orders" in data
            if self._has_order and b"COMMIT" in data:
                if not await self._places.passes("before the commit"):
                    return
                self._commits = True
            await _send(self._server[1], data)

    async def _forward_answers(self) -> None:
        while data := await self._server[0].read(65_536):
            if self._commits and not await self._places.passes("after the commit"):
                return
            self._commits = False
            await _send(self._service[1], data)


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()
