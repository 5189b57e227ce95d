"""The network between one coordinator and the brokers: it can be cut or slow, and lose single requests."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Mapping
from functools import partial

from halfway.embedded.broker import HOST
from tests.chaos.requests import Fate, Frames, Meeting


class Network:
    """A proxy for TCP connections; `ports` maps each listening port to its target port.

    While it is cut, nothing arrives on either side and neither side is notified, as with an unplugged cable: the
    connections stay open, and data sent in the meantime arrives after the repair.
    """

    def __init__(self, ports: Mapping[int, int], chance: random.Random | None = None) -> None:
        self._ports = ports
        self._chance = chance or random.Random()
        self._servers: list[asyncio.Server] = []
        self._ends: set[_End] = set()
        self._cut_off: frozenset[int] = frozenset()
        self._meetings: Counter[Meeting] = Counter()
        """How many more requests each arrangement affects."""
        self.delay_s = 0.0
        self.held = 0
        """How often something had to wait because of a cut."""
        self.met = 0
        """How many requests were affected by the arrangement for their kind."""

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for port, target in self._ports.items():
            self._servers.append(await loop.create_server(partial(_Accepted, self, target), HOST, port))

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        for end in list(self._ends):
            end.abort()
        while self._ends:  # noqa: ASYNC110  transports report their end on the loop
            await asyncio.sleep(0)

    def cut(self, target: int | None = None) -> None:
        """Block all traffic from and to one target port, or all of them."""
        self._cut_off = frozenset(self._ports.values()) if target is None else frozenset({target})
        self.held = 0
        for end in self._ends:
            if end.target in self._cut_off:
                end.pause()

    def mend(self) -> None:
        self._cut_off = frozenset()
        for end in list(self._ends):
            end.resume()

    def reset(self) -> None:
        """Break every connection."""
        for end in list(self._ends):
            end.abort()

    def meet(self, meeting: Meeting) -> None:
        """Arrange the handling of requests of a kind from now on, until `let_go`."""
        self._meetings[meeting] = meeting.times
        self.met = 0

    def let_go(self) -> None:
        """Let every request pass from now on, including held ones."""
        self._meetings.clear()
        for end in list(self._ends):
            end.let_go()

    def met_by(self, frame: bytes) -> Meeting | None:
        """Return the handling of a request; None if it just passes."""
        for meeting, left in self._meetings.items():
            if left and meeting.is_of(frame) and self._chance.random() < meeting.share:
                self._meetings[meeting] -= 1
                self.met += 1
                return meeting
        return None

    def is_cut_off(self, target: int) -> bool:
        return target in self._cut_off

    def joined(self, end: _End) -> None:
        self._ends.add(end)
        if self.is_cut_off(end.target):
            self.held += 1
            end.pause()

    def left(self, end: _End) -> None:
        self._ends.discard(end)


class _End(asyncio.Protocol):
    """One of the two sides of a connection."""

    def __init__(self, network: Network, target: int) -> None:
        self.network = network
        self.target = target
        self.transport: asyncio.Transport | None = None
        self.other: _End | None = None
        self.loses_answer = False
        self._waiting: list[bytes] = []
        self._held: list[bytes] = []
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
        if self.network.is_cut_off(self.target):
            # A transport that was paused when it was made reads nevertheless.
            self.network.held += 1
            self._held.append(data)
            self.pause()
        elif self.loses_answer:
            self.abort()
        else:
            self.pass_on(data)

    def pass_on(self, data: bytes, later_s: float = 0.0) -> None:
        """Send to the other side, never before earlier data."""
        delay_s = self.network.delay_s + later_s
        if delay_s or self._delayed:
            loop = asyncio.get_running_loop()
            # Also if the network has just become fast again.
            self._due = max(self._due, loop.time() + delay_s)
            self._delayed.append(data)
            loop.call_at(self._due, self._pass_on)
        elif self.other is not None:
            self.other.send(data)

    def _pass_on(self) -> None:
        data = self._delayed.popleft()
        if self.other is not None:
            self.other.send(data)

    def let_go(self) -> None:
        """Pass on held data."""

    def send(self, data: bytes) -> None:
        if self.transport is None:
            self._waiting.append(data)
        elif not self.transport.is_closing():
            self.transport.write(data)

    def pause(self) -> None:
        if self.transport is not None and self.transport.is_reading():
            self.transport.pause_reading()

    def resume(self) -> None:
        held, self._held = self._held, []
        for data in held:
            self.data_received(data)
        if self.transport is not None and not self.transport.is_closing() and not self.transport.is_reading():
            self.transport.resume_reading()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class _Accepted(_End):
    """The side of the client, whose requests are read."""

    def __init__(self, network: Network, target: int) -> None:
        super().__init__(network, target)
        self._connecting: asyncio.Task[None] | None = None
        self._frames = Frames()
        self._hanging: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.other = _End(self.network, self.target)
        self.other.other = self
        super().connection_made(transport)
        self._connecting = asyncio.get_running_loop().create_task(self._connect(self.other))

    async def _connect(self, other: _End) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: other, HOST, self.target)
        except OSError:
            self.abort()
        else:
            if self.transport is None or self.transport.is_closing():
                other.abort()

    def pass_on(self, data: bytes, later_s: float = 0.0) -> None:
        for frame in self._frames.feed(data):
            if self._hanging:
                self._hanging.append(frame)
                continue
            meeting = self.network.met_by(frame)
            match None if meeting is None else meeting.fate:
                case Fate.HANG:
                    self._hanging.append(frame)
                case Fate.LOSE:
                    self.abort()
                    return
                case Fate.LOSE_ANSWER:
                    assert self.other is not None
                    self.other.loses_answer = True
                    super().pass_on(frame, later_s)
                case _:
                    super().pass_on(frame, later_s if meeting is None else meeting.seconds)

    def let_go(self) -> None:
        hanging, self._hanging = self._hanging, []
        for frame in hanging:
            super().pass_on(frame)
