"""aiohttp's low-level server with limits on connections, TLS handshakes and slow headers.

Bad HTTP is answered with a problem. Certificates are read again when their files change.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, cast

import structlog
from aiohttp import web
from aiohttp.http import WebSocketReader
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import RequestHandler

from halfway.coordinator.tls import TlsFiles, TlsWatch
from halfway.http.console import Console, serves
from halfway.http.responses import BadHttpError, InternalError, Unsent, problem_response
from halfway.http.server.acceptor import HANDSHAKE_S, Acceptor, Balance, open_listeners
from halfway.protocol.errors import ConfigurationError

log = structlog.get_logger(__name__)


class ServerTls(TlsFiles):
    """The certificate of a port and the authorities that it trusts. Each handshake uses the files as last read."""

    def __init__(self, *, certificate: Path, key: Path, client_authorities: Path | None = None) -> None:
        """Read the files; raise ConfigurationError if they cannot be used.

        With `client_authorities` a client may present a certificate of one of them; without one it shows a key.
        """
        self._certificate = certificate
        self._key = key
        self._client_authorities = client_authorities
        super().__init__(certificate, key, client_authorities)
        self.context = self._read()
        """The context of the port. It switches each handshake to the files as last read."""
        self.context.sni_callback = self._hand_over

    def _hand_over(self, handshake: ssl.SSLObject, _name: str, _context: ssl.SSLContext) -> None:
        handshake.context = self.current()

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


IDLE_S: Final = 75.0
"""How long a connection may be idle, or in the middle of its headers, unless a setting says otherwise."""


Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

LINGER_S: Final = 5.0
MAX_CONNECTIONS: Final = 10_000
UNREAD_S: Final = 20.0
"""The system closes a connection whose client acknowledges nothing for this long."""
_HANDSHAKE_SHARE: Final = 4
"""One in this many connections may be in its TLS handshake."""
_CLOSING_S: Final = 0.1
_PIECE: Final = 8 * 1024
"""Bytes that are parsed at a time."""
_MANY_CHUNKS: Final = 64
"""A piece with more chunks takes long: 8 us for each, however small it is."""
MAX_HEAD_BYTES: Final = 32 * 1024
"""The largest head of a request: until it is complete nobody knows whose it is, and it counts nowhere."""
_BAD_REQUEST: Final = 400


class _Connection(RequestHandler):
    """A connection that answers errors below the handler with problems, and ends if the client does not read."""

    def __init__(self, manager: _Server, **options: Any) -> None:
        self._server = manager
        super().__init__(manager, **options)
        self._unsent = manager.unsent
        self.certificate: Mapping[str, Any] | None = None
        """The client's certificate. It is kept here because a lost connection no longer has it."""
        self.caller: str | None = None
        """The group whose request was the last one on this connection, None if it was of no group."""
        self.waiting: asyncio.Task[Any] | None = None
        """The task to cancel if the connection is lost."""
        self._tls: TlsWatch | None = None
        self.arrived: Callable[[bytes], bool] | None = None
        """Called with each piece of WebSocket data; the connection is aborted if it returns False."""
        self._one_at_a_time = manager.one_at_a_time
        self._held = b""
        """What has arrived and waits for its turn to be parsed."""
        self._feeding: asyncio.Task[None] | None = None
        self._head = 0
        """Bytes of a head that is not complete."""
        self._body: StreamReader = EMPTY_PAYLOAD
        """The body behind the last complete head."""

    def data_received(self, data: bytes) -> None:
        """Parse what arrives; from a piece with many chunks on, one piece in a turn of the loop for all connections."""
        if self._tls is not None:
            self._tls.note(len(data))
        if self._held and data:
            self._held += data
        elif self._upgraded or len(data) <= _PIECE:
            self._parse(data)
        else:
            for at in range(0, len(data), _PIECE):
                before = self._chunks
                self._parse(data[at : at + _PIECE])
                if self._chunks - before > _MANY_CHUNKS and at + _PIECE < len(data):
                    self._held = data[at + _PIECE :]
                    self._pause_transport_reading()
                    self._feeding = asyncio.get_running_loop().create_task(self._feed())
                    return

    def _parse(self, piece: bytes) -> None:
        """Parse a piece, and refuse a head that is too long before it is complete."""
        requests = self._request_count
        super().data_received(piece)
        if self._request_count > requests:
            self._head, self._body = 0, self._messages[-1][1]
        elif self._body.is_eof() and not self._upgraded:
            self._head += len(piece)
            if self._head > MAX_HEAD_BYTES:
                self._head = 0
                super().data_received(b"\0")  # no head has it: answered as every request that is not legal

    @property
    def _chunks(self) -> int:
        """How many chunks of bodies were parsed and are not read yet."""
        bodies = [body for _, body in self._messages]
        if self._current_request is not None:
            bodies.append(self._current_request.content)
        return sum(len(getattr(body, "_http_chunk_splits", None) or ()) for body in bodies)

    async def _feed(self) -> None:
        while self._held and self.transport is not None:
            async with self._one_at_a_time:
                piece, self._held = self._held[:_PIECE], self._held[_PIECE:]
                self._parse(piece)
                await asyncio.sleep(0)
        self._held = b""
        if not self._reading_paused and not self._buffer_paused:
            self._resume_transport_reading()

    def _resume_transport_reading(self) -> None:
        if not self._held:
            super()._resume_transport_reading()

    @property
    def _request_in_progress(self) -> bool:
        return self._in_progress

    @_request_in_progress.setter
    def _request_in_progress(self, in_progress: bool) -> None:
        """Keep the server's list of idle connections: aiohttp sets this when a request begins and ends."""
        self._in_progress = in_progress
        if in_progress:
            self._server.idle.pop(self, None)
        elif self.transport is not None:
            self._server.idle[self] = None

    @property
    def idle(self) -> bool:
        """Whether the connection is open and no request is under way."""
        return self.transport is not None and not self._request_in_progress and not self._messages

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.idle[self] = None
        self.certificate = transport.get_extra_info("peercert")
        if transport.get_extra_info("ssl_object") is not None:
            self._tls = TlsWatch(cast("asyncio.Transport", transport), "client")
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock = transport.get_extra_info("socket")
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_S * 1000))

    def set_parser(self, parser: WebSocketReader, data_received_cb: Callable[[], None] | None = None) -> None:
        super().set_parser(cast("WebSocketReader", _WatchedReader(self, parser)), data_received_cb)

    def wait_in(self, task: asyncio.Task[Any] | None) -> None:
        """Note that the request only waits, in a task that is cancelled if the connection is lost; None: no more."""
        self.waiting = task
        if task is not None:
            self._server.waiting[self] = None
        else:
            self._server.waiting.pop(self, None)

    def give_way(self) -> None:
        """Close to make room for another connection, at once: a normal close may wait for the client."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()

    async def start(self) -> None:
        """Serve requests, unless the connection was closed to make room."""
        if self.transport is not None:
            await super().start()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.idle.pop(self, None)
        if self._tls is not None:
            self._tls.stop()
        if self.writing_paused:
            self._unsent.end(self)
        super().connection_lost(exc)
        if self.waiting is not None:
            self.waiting.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.transport is not None:
            self._unsent.begin(self, self.transport, self.caller)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unsent.end(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - it can contain data of the client
    ) -> web.StreamResponse:
        """Answer bad HTTP or an internal error, and close the connection."""
        del request
        if isinstance(exc, ConnectionError):
            raise exc  # the connection was lost while the request arrived, so there is nobody to answer
        if status != _BAD_REQUEST:
            log.error("request_failed", exc_info=exc)
        response = problem_response(BadHttpError() if status == _BAD_REQUEST else InternalError())
        response.force_close()
        return response


class _WatchedReader:
    """Reads a WebSocket, and shows arriving data to the connection first."""

    def __init__(self, connection: _Connection, reader: WebSocketReader) -> None:
        self._connection = connection
        self._reader = reader

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        connection = self._connection
        if connection.arrived is None or connection.arrived(data):
            return self._reader.feed_data(data)
        if connection.transport is not None:
            connection.transport.abort()
        return True, data

    def feed_eof(self) -> None:
        self._reader.feed_eof()


class _Server(web.Server):
    """Creates connections up to the limit. TLS handshakes under way count too."""

    def __init__(
        self,
        handler: Handler,
        console: Console | None,
        *,
        max_connections: int,
        handshake_s: float,
        tls: ServerTls | None,
        unsent: Unsent,
        **options: Any,
    ) -> None:
        super().__init__(handler if console is None else self._dispatch, **options)
        self._handler = handler
        self._console = console
        self.unsent = unsent
        self.one_at_a_time = asyncio.Lock()
        self.acceptor = Acceptor(
            self,
            None if tls is None else tls.context,
            most=max_connections if tls is None else max(1, max_connections // _HANDSHAKE_SHARE),
            demand_room=self.demand_room,
            count=self._count,
            within_s=handshake_s,
        )
        self._options = options
        self._max_connections = max_connections
        self.idle: dict[_Connection, None] = {}
        """The connections without a request, those that have none for the longest time first."""
        self.waiting: dict[_Connection, None] = {}
        """The connections whose request only waits, the oldest such request first."""

    def __call__(self) -> _Connection:
        return _Connection(self, loop=asyncio.get_running_loop(), **self._options)

    def _dispatch(self, request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        """Pass requests for the console's paths to the console, and all others to the handler."""
        if self._console is not None and serves(request.rel_url.raw_path):
            return self._console(request)
        return self._handler(request)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.acceptor.handshake_done(handler, transport)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.acceptor.publish()

    def _count(self) -> int:
        return len(self._connections) + len(self.acceptor)

    def demand_room(self, newcomer: asyncio.Protocol) -> bool:
        """Close a connection if there is one too many; return False if only the newcomer can be closed."""
        if self._count() <= self._max_connections:
            return True
        found = next((each for each in self.idle if each.idle and each is not newcomer), None)
        found = found or next((each for each in self.waiting if each.transport is not None), None)
        if found is not None:
            found.give_way()
        return found is not None


@contextmanager
def cancelled_when_lost(request: web.BaseRequest) -> Iterator[None]:
    """Cancel the current task if the request's connection is lost; raise ConnectionResetError if it already is."""
    connection = request.protocol
    if request.transport is None:
        raise ConnectionResetError
    if not isinstance(connection, _Connection):
        yield
        return
    connection.wait_in(asyncio.current_task())
    try:
        yield
    finally:
        connection.wait_in(None)


def note_caller(request: web.BaseRequest, caller: str | None) -> None:
    """Note whose request it is: what its connection does not send counts for this group."""
    if isinstance(request.protocol, _Connection):
        request.protocol.caller = caller


@contextmanager
def call_on_data(request: web.BaseRequest, arrived: Callable[[bytes], bool]) -> Iterator[None]:
    """Call `arrived` with the data on the request's WebSocket; abort the connection if it returns False."""
    connection = request.protocol
    if not isinstance(connection, _Connection):
        yield
        return
    connection.arrived = arrived
    try:
        yield
    finally:
        connection.arrived = None


class HttpServer:
    """One listening port. `stop` closes it and every connection; finish the requests first."""

    def __init__(
        self,
        handler: Handler,
        *,
        console: Console | None = None,
        max_connections: int = MAX_CONNECTIONS,
        unsent: Unsent | None = None,
        handshake_s: float = HANDSHAKE_S,
        idle_s: float = IDLE_S,
    ) -> None:
        """Store the handler, and the console that answers at its own path. Nothing is opened yet.

        If there is one connection too many, the oldest idle connection is closed; otherwise the oldest that only waits
        for an event; otherwise the new one. A TLS handshake under way counts as a connection. It ends after
        `handshake_s`, or sooner if it is the oldest and a quarter of all connections are in their handshake.
        """
        self._handler = handler
        self._console = console
        self._unsent = unsent or Unsent()
        self._max_connections = max_connections
        self._handshake_s = handshake_s
        self._idle_s = idle_s
        self._server: _Server | None = None
        self.port = 0

    async def start(self, host: str, port: int, tls: ServerTls | None = None) -> int:
        """Listen and return the port; 0 chooses a free one. Raise OSError if it is taken or not permitted."""
        return self.serve(await open_listeners(host, port), tls)

    def serve(
        self, listeners: Sequence[socket.socket], tls: ServerTls | None = None, balance: Balance | None = None
    ) -> int:
        """Accept the connections of these sockets, and return their port."""
        server = _Server(
            self._handler,
            self._console,
            max_connections=self._max_connections,
            handshake_s=self._handshake_s,
            tls=tls,
            unsent=self._unsent,
            access_log=None,
            keepalive_timeout=self._idle_s,
            lingering_time=LINGER_S,
            auto_decompress=False,
            tcp_keepalive=True,
        )
        server.acceptor.balance = balance
        server.acceptor.listen(listeners)
        self._server = server
        self.port = int(listeners[0].getsockname()[1])
        return self.port

    def accept(self, accepts: bool) -> None:  # noqa: FBT001 - a state
        """Accept new connections, or leave them to the other processes that share the port."""
        if self._server is not None:
            acceptor = self._server.acceptor
            acceptor.resume() if accepts else acceptor.pause()

    async def close_port(self) -> None:
        """Accept no more connections. Open connections stay open."""
        if self._server is not None:
            await self._server.acceptor.close()

    async def stop(self) -> None:
        """Close the port and every connection."""
        await self.close_port()
        if self._server is not None:
            server, self._server = self._server, None
            await asyncio.sleep(0)  # start the requests that have arrived before their connections are closed
            server.pre_shutdown()
            await server.shutdown(_CLOSING_S)
