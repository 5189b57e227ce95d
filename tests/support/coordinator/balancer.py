"""A load balancer as operators run them: a process of its own that looks at `/health/ready`, and passes connections on.

It is of TCP: a connection stays with its server until one of the two closes it. A new one goes to the next server that
was ready when it was looked at last, and to another if that one refuses it.
"""

import asyncio
import json
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from halfway.embedded.broker import HOST, pick_port
from halfway.embedded.process import SupervisedProcess
from tests.support.waiting import GENEROUS_S

_LOOK_S = 0.25
_PIECE = 64 * 1024


class Server(NamedTuple):
    """Where an instance listens."""

    port: int
    health_port: int


class Rounds(NamedTuple):
    """What a balancer has seen: how often it looked at all servers, and how often none of them was ready."""

    looked: int
    without_any: int


class Balancer:
    """The process, and what it has seen so far."""

    def __init__(self, servers: Sequence[Server], directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = pick_port()
        self._figures_port = pick_port({self.port})
        self._log = directory / "balancer.log"
        ports = [str(port) for server in servers for port in server]
        module = "tests.support.coordinator.balancer"
        self._process = SupervisedProcess(
            [sys.executable, "-m", module, str(self.port), str(self._figures_port), *ports],
            cwd=Path(__file__).resolve().parents[3],
            log_path=self._log,
        )

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def wait_until_ready(self) -> None:
        """Return once it has looked at all servers for the first time."""
        deadline = time.monotonic() + GENEROUS_S
        while time.monotonic() < deadline:
            with suppress(OSError):
                if self.rounds().looked > 0:
                    return
            assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.1)
        raise AssertionError("the balancer does not begin: " + self._log.read_text())

    def rounds(self) -> Rounds:
        with urllib.request.urlopen(f"http://{HOST}:{self._figures_port}", timeout=GENEROUS_S) as answer:
            return Rounds(*json.load(answer))

    def close(self) -> None:
        self._process.kill()


class _Serving:
    """The work of the process."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self._ready: list[Server] = []
        self._next = 0
        self.looked = 0
        self.without_any = 0

    async def look(self) -> None:
        """Look at all servers again and again. A server that answers slowly is waited for: no time is judged here."""
        while True:
            found = await asyncio.gather(*map(_is_ready, self._servers))
            self._ready = [server for server, ready in zip(self._servers, found, strict=True) if ready]
            self.looked += 1
            self.without_any += not self._ready
            await asyncio.sleep(_LOOK_S)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in self._servers:
            if not self._ready:
                break
            self._next += 1
            try:
                server = await asyncio.open_connection(HOST, self._ready[self._next % len(self._ready)].port)
            except OSError:
                continue
            await asyncio.gather(_pass_on(reader, server[1]), _pass_on(server[0], writer))
            return
        writer.close()

    async def tell(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = json.dumps([self.looked, self.without_any])
        writer.write(f"HTTP/1.0 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()


async def _is_ready(server: Server) -> bool:
    try:
        reader, writer = await asyncio.open_connection(HOST, server.health_port)
        writer.write(b"GET /health/ready HTTP/1.0\r\n\r\n")
        status = (await reader.readline()).split()
        writer.close()
    except OSError:
        return False
    return status[1:2] == [b"200"]


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
    writer.close()


async def _main(port: int, figures_port: int, *ports: int) -> None:
    serving = _Serving([Server(*pair) for pair in zip(ports[::2], ports[1::2], strict=True)])
    servers: list[Any] = [
        await asyncio.start_server(serving.serve, HOST, port),
        await asyncio.start_server(serving.tell, HOST, figures_port),
    ]
    try:
        await serving.look()
    finally:
        for server in servers:
            server.close()


if __name__ == "__main__":
    asyncio.run(_main(*map(int, sys.argv[1:])))
