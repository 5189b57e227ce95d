"""The network between one coordinator and the brokers: it can be cut, and it can be slow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from functools import partial

from halfway.embedded.ports import HOST


class Network:
    """A proxy of TCP connections; `ports` maps each port that it listens on to the one that it passes on to.

    While it is cut, nothing arrives on either side and nobody is told, as with a cable pulled out: the connections
    stay open, and what was sent meanwhile arrives when it is mended.
    """

    def __init__(self, ports: Mapping[int, int]) -> None:
        self._ports = ports
        self._servers: list[asyncio.Server] = []
        self._ends: set[_End] = set()
        self.is_cut = False
        self.delay_s = 0.0
        self.held = 0
        """How often something had to wait because of a cut."""

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for port, target in self._ports.items():
            self._servers.append(await loop.create_server(partial(_Accepted, self, target), HOST, port))

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        for end in list(self._ends):
            end.abort()
        while self._ends:  # noqa: ASYNC110  transports tell their end on the loop
            await asyncio.sleep(0)

    def cut(self) -> None:
        self.is_cut = True
        self.held = 0
        for end in self._ends:
            end.pause()

    def mend(self) -> None:
        self.is_cut = False
        for end in list(self._ends):
            end.resume()

    def reset(self) -> None:
        """Break every connection."""
        for end in list(self._ends):
            end.abort()

    def joined(self, end: _End) -> None:
        self._ends.add(end)
        if self.is_cut:
            self.held += 1
            end.pause()

    def left(self, end: _End) -> None:
        self._ends.discard(end)


class _End(asyncio.Protocol):
    """One of the two sides of a connection."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.transport: asyncio.Transport | None = None
        self.other: _End | None = None
        self._waiting: list[bytes] = []
        self._delayed: deque[bytes] = deque()
        self._due = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's is none by its type
        self.network.joined(self)
        for data in self._waiting:
            self.send(data)
        self._waiting.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        self.network.left(self)
        if self.other is not None:
            self.other.abort()

    def data_received(self, data: bytes) -> None:
        if self.network.is_cut:
            self.network.held += 1
        if self.network.delay_s or self._delayed:
            loop = asyncio.get_running_loop()
            # Never before what came before it, also when the network has just become quick again.
            self._due = max(self._due, loop.time() + self.network.delay_s)
            self._delayed.append(data)
            loop.call_at(self._due, self._pass_on)
        elif self.other is not None:
            self.other.send(data)

    def _pass_on(self) -> None:
        data = self._delayed.popleft()
        if self.other is not None:
            self.other.send(data)

    def send(self, data: bytes) -> None:
        if self.transport is None:
            self._waiting.append(data)
        elif not self.transport.is_closing():
            self.transport.write(data)

    def pause(self) -> None:
        if self.transport is not None and self.transport.is_reading():
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.transport is not None and not self.transport.is_closing() and not self.transport.is_reading():
            self.transport.resume_reading()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class _Accepted(_End):
    """The side of the one who connects."""

    def __init__(self, network: Network, target: int) -> None:
        super().__init__(network)
        self._target = target
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.other = _End(self.network)
        self.other.other = self
        super().connection_made(transport)
        self._connecting = asyncio.get_running_loop().create_task(self._connect(self.other))

    async def _connect(self, other: _End) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: other, HOST, self._target)
        except OSError:
            self.abort()
        else:
            if self.transport is None or self.transport.is_closing():
                other.abort()
