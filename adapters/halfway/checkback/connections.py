"""Connections that are reused only if they carried nothing except the answer to their last request."""

from __future__ import annotations

import asyncio
import select
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import aiohttp
from aiohttp.client_proto import ResponseHandler

if TYPE_CHECKING:
    from aiohttp.client_reqrep import ConnectionKey
    from aiohttp.http import RawResponseMessage
    from aiohttp.http_parser import HttpParser
    from aiohttp.streams import StreamReader
    from yarl import URL

    from halfway.checkback.dns import LookUp


MAX_RECEIVED_BYTES = 1024 * 1024
"""The largest answer with framing: the largest verdict in chunks of one byte, after the most headers that are read."""
MAX_INTERIM = 16
"""The most interim answers (1xx) to one request."""
_SLICE_BYTES = 16 * 1024
"""Bytes that are parsed at a time, so that at most a few hundred messages exist before they are counted."""


class AnswerTooLargeError(aiohttp.ClientError):
    """The answer is too large."""


@dataclass(slots=True)
class Exchange:
    """One request on one connection."""

    url: URL
    group: str
    fresh: bool
    """Whether the connection must be new."""
    refusal: str | None = None
    """Why the connection or the look-up of the host name was refused."""
    look_up: LookUp | None = None
    """The look-up of the host name that the request waits for."""
    protocol: CheckProtocol | None = None
    reused: bool = False
    """Whether the connection has carried another request before."""

    @property
    def has_unsolicited_bytes(self) -> bool:
        """Whether the connection received bytes that belong to no request."""
        return self.protocol is not None and self.protocol.has_unsolicited_bytes

    def mark_bound(self) -> None:
        """Record that the answer was bound to the request."""
        if self.protocol is not None:
            self.protocol.is_bound = True

    def end(self, response: aiohttp.ClientResponse) -> None:
        """Close the connection, unless a whole answer that is bound to the request has arrived."""
        protocol = self.protocol
        if protocol is None or not protocol.is_bound or protocol.is_unusable or not response.content.at_eof():
            response.close()
            if protocol is not None:
                protocol.close()


EXCHANGE: ContextVar[Exchange] = ContextVar("exchange")
"""The exchange under way; the connector and the request read it, because they run in the calling task."""


class CheckProtocol(ResponseHandler):
    """The protocol of one connection to an endpoint; it detects bytes that belong to no request."""

    def __init__(self, loop: asyncio.AbstractEventLoop, open_connections: set[CheckProtocol], max_kept: int) -> None:
        super().__init__(loop)
        self._open = open_connections
        self._max_kept = max_kept
        self._poll = select.poll()
        self._request_sent = False
        """Whether a whole request was sent."""
        self._answer: StreamReader | None = None
        """The body of the answer, once its head has arrived."""
        self.used = False
        """Whether the connection has carried a request."""
        self.is_bound = False
        """Whether the last answer was bound to its request; only then may another request follow."""
        self.has_unsolicited_bytes = False
        """Whether bytes arrived before a request was sent, or after the end of an answer."""
        self._received = 0
        self._interim = 0
        self._refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._open.add(self)
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Fail an incomplete answer: aiohttp forgets its body if the framing is broken."""
        self._open.discard(self)
        super().connection_lost(exc)
        answer = self._answer
        if answer is not None and not answer.is_eof() and answer.exception() is None:
            answer.set_exception(aiohttp.ClientPayloadError("the answer ended early"))

    @property
    def should_close(self) -> bool:
        """Whether aiohttp must close it after the answer: it is unusable, or enough connections are open."""
        return self.is_unusable or len(self._open) > self._max_kept

    @property
    def is_unusable(self) -> bool:
        """Whether received bytes are unread or belong to no request."""
        return super().should_close or self.has_unsolicited_bytes

    def set_response_params(self, **params: Any) -> None:
        """Begin a request: aiohttp calls this before it writes the head."""
        self.used, self.is_bound, self._request_sent, self._answer = True, False, False, None
        self._received = self._interim = 0
        super().set_response_params(**params)

    def start_timeout(self) -> None:
        """Record that the whole request was sent: aiohttp calls this after the last byte."""
        self._request_sent = True
        super().start_timeout()

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Handle the head of a message: one for each request, and a few interim ones."""
        if self._refused:
            return
        message, body = data
        if message.code >= HTTPStatus.OK or message.code == HTTPStatus.SWITCHING_PROTOCOLS:
            self.has_unsolicited_bytes = self.has_unsolicited_bytes or self._answer is not None
            self._answer = body
        else:
            self._interim += 1
            if self._interim > MAX_INTERIM:
                self._refuse()
                return
        super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        """Take received bytes, up to the bound of one answer."""
        self._received += len(data)
        if self._received > MAX_RECEIVED_BYTES:
            self._refuse()
        for at in range(0, len(data) or 1, _SLICE_BYTES):
            if self._refused:
                return
            self._parse(data[at : at + _SLICE_BYTES])

    def _refuse(self) -> None:
        """Abort the connection and fail the waiting caller, because the answer is too large."""
        self.has_unsolicited_bytes = self._refused = True
        error = AnswerTooLargeError()
        self.set_exception(error)
        if self._answer is not None and not self._answer.is_eof():
            self._answer.set_exception(error)
        if self.transport is not None:
            self.transport.abort()

    def _parse(self, data: bytes) -> None:
        """Parse a part. Bytes before the whole request was sent, or after the end of the answer, are unsolicited."""
        if data and (not self._request_sent or self._parser is None):
            self.has_unsolicited_bytes = True
            if self._request_sent:
                self.close()
                return
        super().data_received(data)
        if self._parser is not None and self._answer is not None and self._answer.is_eof():
            self._end_parsing(self._parser)

    def _end_parsing(self, parser: HttpParser[Any]) -> None:
        """Record whether another message has begun, and stop parsing: further bytes belong to no request."""
        self._parser = None
        try:
            has_more = parser.feed_eof() is not None
        except Exception:  # noqa: BLE001 - the parser raises it for an incomplete message
            has_more = True
        self.has_unsolicited_bytes = self.has_unsolicited_bytes or has_more

    def has_unread_data(self) -> bool:
        """Return whether unread bytes or the end of the connection have arrived."""
        return bool(self._poll.poll(0))

    def is_encrypted(self) -> bool:
        """Return whether the peer may send bytes that are not an answer, such as session tickets."""
        return self.transport is not None and self.transport.get_extra_info("ssl_object") is not None


class GroupRequest(aiohttp.ClientRequest):
    """A request that shares its connection only with requests of the same group."""

    @property
    def connection_key(self) -> ConnectionKey:
        return super().connection_key._replace(proxy_headers_hash=hash(EXCHANGE.get().group))


class CheckConnector(aiohttp.TCPConnector):
    """Reuses a connection only if nothing has arrived on it since an answer that was bound to its request."""

    def __init__(self, *, max_kept: int, **options: Any) -> None:
        """Keep connections for further requests while at most `max_kept` are open."""
        super().__init__(**options)
        open_connections: set[CheckProtocol] = set()
        self._factory = cast(
            "partial[ResponseHandler]",
            partial(CheckProtocol, loop=self._loop, open_connections=open_connections, max_kept=max_kept),
        )

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Any],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's name
    ) -> aiohttp.connector.Connection:
        exchange = EXCHANGE.get()
        while True:
            connection = await super().connect(req, traces, timeout)
            exchange.protocol = protocol = cast("CheckProtocol", connection.protocol)
            exchange.reused = protocol.used
            if not protocol.used:
                protocol.has_unsolicited_bytes = protocol.has_unsolicited_bytes or (
                    not protocol.is_encrypted() and protocol.has_unread_data()
                )
                return connection
            if protocol.is_bound and not exchange.fresh and not protocol.is_unusable and not protocol.has_unread_data():
                return connection
            connection.close()
