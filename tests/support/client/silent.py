"""What stands between a client and a coordinator, and drops old connections without a word, as a firewall may."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class Firewall:
    """Forwards connections. `forget` makes those that are open silent, for good; new ones are forwarded."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._forwarded: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = ""
        self.accepted = 0
        self.used_after = 0
        """How many connections were used after they were forgotten."""
        self._forgotten: set[asyncio.StreamWriter] = set()

    def forget(self) -> None:
        """Forward nothing any more on the connections that are open now."""
        self._forgotten |= self._writers

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        inside, outside = await asyncio.open_connection(*self._address)
        self._writers.add(writer)
        try:
            await asyncio.gather(self._forward(reader, outside, writer), self._forward(inside, writer, writer))
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            for each in (writer, outside):
                each.close()

    async def _forward(
        self, reader: asyncio.StreamReader, to: asyncio.StreamWriter, connection: asyncio.StreamWriter
    ) -> None:
        counted = False
        while data := await reader.read(65536):
            if connection in self._forgotten:
                self.used_after += not counted
                counted = True
                continue
            to.write(data)
            await to.drain()
        to.close()


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
        await server.wait_closed()
