"""What stands between a client and a coordinator, and drops, holds or cuts connections, as a firewall may."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from urllib.parse import urlsplit


class Firewall:
    """Forwards connections. `forget` makes those that are open silent, for good; new ones are forwarded."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = ""
        self.accepted = 0
        self.answers = 0
        """How many pieces of answers were passed on."""
        self.used_after = 0
        """How many connections were used after they were forgotten."""
        self.bytes_of_next: Callable[[], float] = lambda: inf
        """Returns after how many bytes, in both directions together, the next connection is cut."""
        self.lets_answers_pass = asyncio.Event()
        self.lets_answers_pass.set()
        self._forgotten: set[asyncio.StreamWriter] = set()

    def forget(self) -> None:
        """Forward nothing any more on the connections that are open now."""
        self._forgotten |= self._writers

    def cut(self) -> None:
        """Abort the connections that are open now."""
        for writer in self._writers:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        left = [self.bytes_of_next()]
        try:
            inside, outside = await asyncio.open_connection(*self._address)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(writer)
        both = (writer, outside)
        ways = [
            asyncio.ensure_future(self._forward(reader, outside, writer, left)),
            asyncio.ensure_future(self._forward(inside, writer, writer, left)),
        ]
        try:
            # A coordinator that closes has said all; a client that closes waits for no answer.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._writers.discard(writer)
            for each in both:
                (each.transport.abort if left[0] <= 0 else each.close)()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        to: asyncio.StreamWriter,
        connection: asyncio.StreamWriter,
        left: list[float],
    ) -> None:
        counted = False
        while data := await reader.read(65536):
            if connection in self._forgotten:
                self.used_after += not counted
                counted = True
                continue
            if to is connection:
                await self.lets_answers_pass.wait()
            passed = data if len(data) < left[0] else data[: int(left[0])]
            left[0] -= len(data)
            to.write(passed)
            await to.drain()
            self.answers += to is connection
            if left[0] <= 0:
                return


@asynccontextmanager
async def firewall_before(url: str) -> AsyncIterator[Firewall]:
    """Run one in front of a coordinator."""
    parts = urlsplit(url)
    firewall = Firewall(parts.hostname or "", parts.port or 0)
    server = await asyncio.start_server(firewall.serve, "127.0.0.1", 0)
    firewall.url = "http://{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield firewall
    finally:
        server.close()
        firewall.lets_answers_pass.set()
        firewall.cut()
        await server.wait_closed()
