"""Accepts the connections of a port: handshakes are bounded in time and number, and none is left open at the end.

asyncio's own server tells of a connection only once its handshake is done, lets one take a minute, and never closes a
connection that it accepts while it is closed.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    import ssl

log = structlog.get_logger(__name__)

HANDSHAKE_S: Final = 5.0
"""A handshake may take this long."""
_SHUTDOWN_S: Final = 1.0
"""How long a client may take to answer that its connection is closed; its descriptor is held meanwhile."""
_NOT_ACCEPTED_S: Final = 0.5
"""To wait if no descriptor is free."""
_MISSING: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""The machine does not have an address, or its family."""


class Acceptor:
    """Listens, and hands a connection over at once, or of a port that speaks TLS, once its handshake is done."""

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        *,
        most: int,
        demand_room: Callable[[asyncio.Protocol], bool],
        within_s: float = HANDSHAKE_S,
    ) -> None:
        """Keep the factory of connections; nothing is opened.

        At most `most` handshakes are under way: for one too many, the oldest is ended. `demand_room` is called with
        each newcomer; if it returns False, the oldest handshake is ended too.
        """
        self._make = make
        self._context = context
        self._most = most
        self._demand_room = demand_room
        self._within_s = within_s
        self._listeners: list[socket.socket] = []
        self._again: dict[socket.socket, asyncio.TimerHandle] = {}
        self._under_way: dict[asyncio.Protocol, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Protocol] = set()
        """Connections to end as soon as they are made."""

    def __len__(self) -> int:
        """Return how many handshakes are under way."""
        return len(self._under_way)

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """The sockets that it listens on."""
        return self._listeners

    async def listen(self, host: str, port: int, backlog: int) -> None:
        """Listen on every address of a host that this machine has.

        Raises:
            OSError: it has none of them, or one is taken or not permitted.

        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        missing: OSError | None = None
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                try:
                    self._listeners.append(_listening(family, address, backlog))
                except OSError as error:
                    if error.errno not in _MISSING:
                        raise
                    missing = error
                    log.info("address_missing", address=address[0], error=error.strerror)
        except BaseException:
            await self.close()
            raise
        if missing is not None and not self._listeners:
            raise missing
        for listener in self._listeners:
            loop.add_reader(listener, self._accept, listener)

    def made(self, connection: asyncio.Protocol, transport: asyncio.Transport) -> None:
        """Record that the handshake of a connection is done; abort the connection if it was ended before."""
        self._under_way.pop(connection, None)
        if connection in self._ending:
            self._ending.remove(connection)
            transport.abort()

    async def close(self) -> None:
        """Accept no more connections. TLS handshakes that are under way end; accepted plain connections stay."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener)
            if listener in self._again:
                self._again.pop(listener).cancel()
            listener.close()
        self._listeners.clear()
        if tasks := [*self._under_way.values()]:
            if self._context is not None:
                for task in tasks:
                    task.cancel()
            await asyncio.wait(tasks)

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection: while many wait, others get their turn too."""
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            log.warning("connection_not_accepted", error=str(error))
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            self._again[listener] = loop.call_later(_NOT_ACCEPTED_S, loop.add_reader, listener, self._accept, listener)
            return
        accepted.setblocking(False)
        self._begin(accepted)

    def _begin(self, accepted: socket.socket) -> None:
        connection = self._make()
        task = asyncio.create_task(self._shake(accepted, connection))
        self._under_way[connection] = task

        def done(task: asyncio.Task[None]) -> None:
            if self._under_way.pop(connection, None) is not None or connection in self._ending or task.cancelled():
                self._ending.discard(connection)
                accepted.close()  # no transport owns it

        task.add_done_callback(done)
        if not self._demand_room(connection) or len(self._under_way) > self._most:
            self._end(next(iter(self._under_way)))

    def _end(self, connection: asyncio.Protocol) -> None:
        """End a connection that is not made yet.

        A plain connection is made within two turns of the loop, and is aborted then: if its task were cancelled in
        between, uvloop would close its handle without calling `connection_lost`.
        """
        task = self._under_way.pop(connection)
        if self._context is None:
            self._ending.add(connection)
        else:
            task.cancel()

    async def _shake(self, accepted: socket.socket, connection: asyncio.Protocol) -> None:
        loop = asyncio.get_running_loop()
        bounds = {"ssl_handshake_timeout": self._within_s, "ssl_shutdown_timeout": _SHUTDOWN_S}
        with suppress(OSError):  # TimeoutError and SSLError are of its kind
            await loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=self._context, **(bounds if self._context else {})
            )


def _listening(family: int, address: tuple[object, ...], backlog: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(backlog)
    except BaseException:
        made.close()
        raise
    return made
