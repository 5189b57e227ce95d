"""Answers that clients do not read: counted, bounded, and ended if the client stops reading."""

from __future__ import annotations

import asyncio
from typing import Final

from halfway.rest.responses.rare_log import RareLog
from halfway.service.fairness import Shares

MAX_BYTES: Final = 256 * 1024 * 1024
LOOK_EVERY_S: Final = 1.0
SLOW_LOOKS: Final = 5
"""A client that reads less than `MIN_BYTES` in this many looks is taken for one that does not read."""
MIN_BYTES: Final = 80 * 1024


class _Waiting:
    """What one connection has not sent yet."""

    def __init__(self, transport: asyncio.Transport, caller: str | None) -> None:
        self.transport = transport
        self.caller = caller
        self.size = transport.get_write_buffer_size()
        self.looks = 0
        self.size_before = self.size


class Unsent:
    """The answers held for clients that read too slowly.

    A connection is watched from the moment its buffer is full until everything is sent. A group that reads its answers
    is not refused because of others that do not (`Shares`).
    """

    def __init__(self, *, max_bytes: int = MAX_BYTES, look_every_s: float = LOOK_EVERY_S) -> None:
        """Begin with nothing."""
        self._held = Shares(max_bytes)
        self._look_every_s = look_every_s
        self._waiting: dict[object, _Waiting] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._not_read = RareLog(__name__, "answer_not_read")

    @property
    def bytes(self) -> int:
        """What all connections have not sent yet."""
        return self._held.total

    def has_room(self, caller: str | None, size: int = 1) -> bool:
        """Return whether an answer of this size may be held for a caller."""
        return size <= self._held.room(caller)

    def begin(self, connection: object, transport: asyncio.Transport, caller: str | None = None) -> None:
        """Count the bytes that the connection of a caller could not send."""
        self._waiting[connection] = waiting = _Waiting(transport, caller)
        self._held.take(caller, waiting.size)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._look_every_s, self._look)

    def end(self, connection: object) -> None:
        """Stop counting a connection, which has sent everything or is lost."""
        waiting = self._waiting.pop(connection, None)
        if waiting is not None:
            self._held.leave(waiting.caller, waiting.size)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        for connection, waiting in list(self._waiting.items()):
            size = waiting.transport.get_write_buffer_size()
            self._held.leave(waiting.caller, waiting.size)
            self._held.take(waiting.caller, size)
            waiting.size = size
            waiting.size_before = max(waiting.size_before, size)  # more was written in the meantime
            waiting.looks += 1
            if waiting.size_before - size >= MIN_BYTES:
                waiting.looks, waiting.size_before = 0, size
            elif waiting.looks >= SLOW_LOOKS:
                self._not_read.note("client_does_not_read", unsent_bytes=size)
                self.end(connection)
                waiting.transport.abort()
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(self._look_every_s, self._look)
