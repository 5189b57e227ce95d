"""Accepts connections, and bounds their TLS handshakes.

asyncio's own server reports a connection only after its handshake, allows a minute for it, and never closes one that it
accepts while the server is being closed. Processes that share a port share its connections here, too.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

import structlog

from halfway.coordinator.logging import LogSummary
from halfway.coordinator.tls import bound_receive_buffer

log = structlog.get_logger(__name__)
_not_accepted: Final = LogSummary(log, "warning", "connection_not_accepted")

HANDSHAKE_S: Final = 5.0
"""The time limit of a handshake."""
_SHUTDOWN_S: Final = 1.0
"""How long to wait for a client to confirm that its TLS connection is closed. Until then its descriptor is in use."""
_YIELD_S: Final = 0.01
"""How long to leave a connection to a process that has fewer, and may be busy."""
_ACCEPT_AGAIN_S: Final = 0.5
"""How long to wait if no descriptor is free."""
_BACKLOG: Final = 1024
_MISSING_ADDRESS: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""The machine does not have the address, or its address family."""


class Balance(Protocol):
    """The numbers of connections of the processes that accept from the same sockets."""

    def publish(self, count: int | None) -> None:
        """Show the others how many this process has; None: it accepts none."""

    def is_least(self, count: int) -> bool:
        """Return whether no other process that accepts has fewer connections."""


class Acceptor:
    """Listens, and hands over each connection: at once, or after the handshake if the port uses TLS."""

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        *,
        most: int,
        demand_room: Callable[[asyncio.Protocol], bool],
        count: Callable[[], int] = int,
        within_s: float = HANDSHAKE_S,
    ) -> None:
        """Store the factory of connections. Nothing is opened yet.

        At most `most` handshakes are under way; one more ends the oldest. `demand_room` is called with each new
        connection; if it returns False, the oldest handshake is ended too. `count` returns the number of connections.
        """
        self.balance: Balance | None = None
        """What processes that share the port know of each other."""
        self._count = count
        self._make = make
        self._context = context
        self._most = most
        self._demand_room = demand_room
        self._within_s = within_s
        self._listeners: list[socket.socket] = []
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}
        self._handshakes: dict[asyncio.Protocol, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Protocol] = set()
        """Connections to abort as soon as they are made."""

    def __len__(self) -> int:
        """Return the number of handshakes under way."""
        return len(self._handshakes)

    @property
    def sockets(self) -> Sequence[socket.socket]:
        return self._listeners

    def listen(self, listeners: Sequence[socket.socket]) -> None:
        """Accept the connections of these sockets, which `close` closes."""
        self._listeners += listeners
        self.resume()

    def publish(self) -> None:
        """Show the other processes how many connections this one has."""
        if self.balance is not None:
            self.balance.publish(self._count())

    def resume(self) -> None:
        """Accept connections, as after `listen`."""
        self.publish()
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            if listener not in self._paused:
                loop.add_reader(listener, self._accept, listener)

    def pause(self) -> None:
        """Leave new connections to the other processes that accept from the same sockets, until `resume`."""
        if self.balance is not None:
            self.balance.publish(None)
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener)
            if listener in self._paused:
                self._paused.pop(listener).cancel()

    def handshake_done(self, connection: asyncio.Protocol, transport: asyncio.Transport) -> None:
        """Record that the handshake of a connection is done; abort the connection if it was ended before."""
        self._handshakes.pop(connection, None)
        if connection in self._ending:
            self._ending.remove(connection)
            transport.abort()

    async def close(self) -> None:
        """Accept no more connections. TLS handshakes under way end; accepted plain connections stay."""
        self.pause()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        if tasks := [*self._handshakes.values()]:
            if self._context is not None:
                for task in tasks:
                    task.cancel()
            await asyncio.wait(tasks)

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection per call, so that the event loop can do other work while many connections wait."""
        if self.balance is None or self.balance.is_least(self._count()):
            self._take(listener)
        else:
            self._rest(listener, _YIELD_S, self._take)

    def _rest(self, listener: socket.socket, seconds: float, then: Callable[[socket.socket], None] | None) -> None:
        """Accept nothing for a while, then go on."""
        loop = asyncio.get_running_loop()

        def go_on() -> None:
            del self._paused[listener]
            loop.add_reader(listener, self._accept, listener)
            if then is not None:
                then(listener)

        loop.remove_reader(listener)
        self._paused[listener] = loop.call_later(seconds, go_on)

    def _take(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            _not_accepted.note({"error": str(error)})
            self._rest(listener, _ACCEPT_AGAIN_S, None)
            return
        accepted.setblocking(False)
        if self._context is not None:
            bound_receive_buffer(accepted)
        self._start_handshake(accepted)

    def _start_handshake(self, accepted: socket.socket) -> None:
        connection = self._make()
        task = asyncio.create_task(self._handshake(accepted, connection))
        self._handshakes[connection] = task
        self.publish()

        def close_if_unowned(task: asyncio.Task[None]) -> None:
            if self._handshakes.pop(connection, None) is not None or connection in self._ending or task.cancelled():
                self._ending.discard(connection)
                accepted.close()  # no transport owns it

        task.add_done_callback(close_if_unowned)
        if not self._demand_room(connection) or len(self._handshakes) > self._most:
            self._end(next(iter(self._handshakes)))

    def _end(self, connection: asyncio.Protocol) -> None:
        """End a connection that is not made yet.

        A plain connection is made within two turns of the event loop, and is aborted then. If its task were cancelled
        in between, uvloop would close its handle without calling `connection_lost`.
        """
        task = self._handshakes.pop(connection)
        if self._context is None:
            self._ending.add(connection)
        else:
            task.cancel()

    async def _handshake(self, accepted: socket.socket, connection: asyncio.Protocol) -> None:
        loop = asyncio.get_running_loop()
        timeouts = {"ssl_handshake_timeout": self._within_s, "ssl_shutdown_timeout": _SHUTDOWN_S}
        with suppress(OSError):  # includes TimeoutError and SSLError
            await loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=self._context, **(timeouts if self._context else {})
            )


async def open_listeners(host: str, port: int) -> list[socket.socket]:
    """Listen on each address of a host that this machine has.

    Raises:
        OSError: the machine has none of the addresses, or one is taken or not permitted.
        ValueError: the text is not a legal host name.
    """
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, _, _, _, address in dict.fromkeys(addresses):
            try:
                listeners.append(_open_listener(family, address))
            except OSError as error:
                if error.errno not in _MISSING_ADDRESS:
                    raise
                missing = error
                log.info("address_missing", address=address[0], error=error.strerror)
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    if missing is not None and not listeners:
        raise missing
    return listeners


def _open_listener(family: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
