"""Accepts the connections of a port, bounds TLS handshakes in time and number, and leaves none open at the end.

asyncio's own server reports a connection only after its handshake, allows a minute for it, and never closes a
connection that it accepts while the server is being closed. Certificates are read again when their files change.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

from halfway.protocol.errors import ConfigurationError

if TYPE_CHECKING:
    import ssl
    from pathlib import Path


log = structlog.get_logger(__name__)

HANDSHAKE_S: Final = 5.0
"""The time limit of a handshake."""
_SHUTDOWN_S: Final = 1.0
"""How long to wait for a client to confirm that its TLS connection is closed. Until then its descriptor is in use."""
_ACCEPT_AGAIN_S: Final = 0.5
"""How long to wait if no descriptor is free."""
_MISSING_ADDRESS: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""The machine does not have the address, or its address family."""


class Acceptor:
    """Listens, and hands over each connection: at once, or after the handshake if the port uses TLS."""

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        *,
        most: int,
        demand_room: Callable[[asyncio.Protocol], bool],
        within_s: float = HANDSHAKE_S,
    ) -> None:
        """Store the factory of connections. Nothing is opened yet.

        At most `most` handshakes are under way; one more ends the oldest. `demand_room` is called with each new
        connection; if it returns False, the oldest handshake is ended too.
        """
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

    async def listen(self, host: str, port: int, backlog: int) -> None:
        """Listen on each address of a host that this machine has.

        Raises:
            OSError: the machine has none of the addresses, or one is taken or not permitted.

        """
        loop = asyncio.get_running_loop()
        addresses = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        missing: OSError | None = None
        try:
            for family, _, _, _, address in dict.fromkeys(addresses):
                try:
                    self._listeners.append(_open_listener(family, address, backlog))
                except OSError as error:
                    if error.errno not in _MISSING_ADDRESS:
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

    def handshake_done(self, connection: asyncio.Protocol, transport: asyncio.Transport) -> None:
        """Record that the handshake of a connection is done; abort the connection if it was ended before."""
        self._handshakes.pop(connection, None)
        if connection in self._ending:
            self._ending.remove(connection)
            transport.abort()

    async def close(self) -> None:
        """Accept no more connections. TLS handshakes under way end; accepted plain connections stay."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener)
            if listener in self._paused:
                self._paused.pop(listener).cancel()
            listener.close()
        self._listeners.clear()
        if tasks := [*self._handshakes.values()]:
            if self._context is not None:
                for task in tasks:
                    task.cancel()
            await asyncio.wait(tasks)

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection per call, so that the event loop can do other work while many connections wait."""
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            log.warning("connection_not_accepted", error=str(error))
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            self._paused[listener] = loop.call_later(_ACCEPT_AGAIN_S, loop.add_reader, listener, self._accept, listener)
            return
        accepted.setblocking(False)
        self._start_handshake(accepted)

    def _start_handshake(self, accepted: socket.socket) -> None:
        connection = self._make()
        task = asyncio.create_task(self._handshake(accepted, connection))
        self._handshakes[connection] = task

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


def _open_listener(family: int, address: tuple[object, ...], backlog: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


_POLL_S: Final = 2.0


class ServerTls:
    """The certificate of a port and the authorities that it trusts. Each handshake uses the files as last read."""

    def __init__(self, *, certificate: Path, key: Path, client_authorities: Path | None = None) -> None:
        """Read the files; raise ConfigurationError if they cannot be used.

        With `client_authorities` a client may present a certificate of one of them; without one it shows a key.
        """
        self._certificate = certificate
        self._key = key
        self._client_authorities = client_authorities
        self._versions = self._file_versions()
        self._current = self._read()
        self.context = self._read()
        """The context of the port. It switches each handshake to the files as last read."""
        self.context.sni_callback = self._hand_over

    def _hand_over(self, handshake: ssl.SSLObject, _name: str, _context: ssl.SSLContext) -> None:
        handshake.context = self._current

    def _read(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self._client_authorities)
            # Without a password, OpenSSL would prompt for the password of an encrypted key and block.
            context.load_cert_chain(self._certificate, self._key, password="")
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"cannot use the certificate {str(self._certificate)!r}, its key, or the client authorities: {error}"
            ) from None
        context.verify_mode = ssl.CERT_NONE if self._client_authorities is None else ssl.CERT_OPTIONAL
        # A resumed session would not be verified against the authorities that are trusted now. TLS 1.2 resumes sessions
        # without tickets too, which Python cannot switch off.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        if self._client_authorities is not None:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context

    def _file_versions(self) -> list[tuple[int, int]]:
        files = (self._certificate, self._key, self._client_authorities)
        return [(file.stat().st_mtime_ns, file.stat().st_ino) for file in files if file is not None]

    async def watch(self) -> None:
        """Read the files again whenever they change. If they cannot be used, keep the previous ones."""
        while True:
            await asyncio.sleep(_POLL_S)
            self.reload_if_changed()

    def reload_if_changed(self) -> None:
        """Read the files again if they have changed."""
        try:
            versions = self._file_versions()
            if versions == self._versions:
                return
            self._current = self._read()
        except (OSError, ConfigurationError) as error:
            log.warning("certificate_not_read", certificate=str(self._certificate), error=str(error))
            return
        self._versions = versions
        log.info("certificate_read", certificate=str(self._certificate))


IDLE_S: Final = 75.0
"""How long a connection may be idle, or in the middle of its headers, unless a setting says otherwise."""
