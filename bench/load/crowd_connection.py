"""A connection that the callers of a crowd share for one request at a time, and its current transaction."""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from bench.load.wire import WireError, split


class Order:
    """One transaction of the crowd."""

    __slots__ = ("content", "due", "id", "phase")

    def __init__(self, content: int, transaction_id: bytes, due: float, phase: str) -> None:
        self.content = content
        self.id = transaction_id
        self.due = due
        self.phase = phase


class Callers(Protocol):
    """The owner of the pool, which is notified about each connection."""

    def connected(self, connection: Connection) -> None:
        """Handle a new connection."""

    def lost(self, connection: Connection, error: Exception | None) -> None:
        """Handle a connection that the peer closed."""

    def broken(self, connection: Connection, what: str) -> None:
        """Handle bytes that are not an answer."""

    def answered(self, connection: Connection, status: int, answer: bytes) -> None:
        """Handle an answer."""


class Connection(asyncio.Protocol):
    """A connection of the pool, with at most one request at a time."""

    def __init__(self, callers: Callers) -> None:
        """Start without a transport."""
        self._callers = callers
        self._received = b""
        self.transport: asyncio.Transport | None = None
        self.order: Order | None = None
        self.ending = False
        self.requests = 0
        """The number of requests so far, which identifies the request of a time-out."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._callers.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.transport is not None:
            self.transport = None
            self._callers.lost(self, exc)

    def send(self, order: Order, request: bytes, *, ending: bool) -> None:
        """Send a request of a transaction; `callers` get its answer."""
        self.order, self.ending = order, ending
        self.requests += 1
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(request)

    def close(self) -> None:
        """Abort the connection without notifying `callers`."""
        transport, self.transport = self.transport, None
        if transport is not None:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._received:
            data = self._received + data
        try:
            answer = split(data)
        except WireError as error:
            self._callers.broken(self, str(error))
            return
        if answer is None:
            self._received = data
            return
        status, _, self._received = answer
        self._callers.answered(self, status, data)
