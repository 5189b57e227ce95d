"""A connection that the callers of a crowd share, one request after the other, and the transaction it carries."""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from bench.wire import WireError, split


class Order:
    """One transaction of the crowd."""

    __slots__ = ("content", "due", "id", "phase")

    def __init__(self, content: int, transaction_id: bytes, due: float, phase: str) -> None:
        self.content = content
        self.id = transaction_id
        self.due = due
        self.phase = phase


class Callers(Protocol):
    """Who shares the pool, and hears what happens to each connection."""

    def connected(self, connection: Connection) -> None:
        """Hear that a connection is there."""

    def lost(self, connection: Connection, error: Exception | None) -> None:
        """Hear that the other side closed a connection."""

    def broken(self, connection: Connection, what: str) -> None:
        """Hear that what came is no answer."""

    def answered(self, connection: Connection, status: int, answer: bytes) -> None:
        """Take an answer."""


class Connection(asyncio.Protocol):
    """A connection of the pool: at most one request at a time."""

    def __init__(self, callers: Callers) -> None:
        """Wait to be connected."""
        self._callers = callers
        self._received = b""
        self.transport: asyncio.Transport | None = None
        self.order: Order | None = None
        self.ending = False
        self.asked = 0
        """How many requests it has carried: a time-out is of one of them."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._callers.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.transport is not None:
            self.transport = None
            self._callers.lost(self, exc)

    def ask(self, order: Order, request: bytes, *, ending: bool) -> None:
        """Send a request for a transaction; its answer goes to the callers."""
        self.order, self.ending = order, ending
        self.asked += 1
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(request)

    def close(self) -> None:
        """End it at once; the callers do not hear of it."""
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
