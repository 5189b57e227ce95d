"""Reused connections that may carry nothing but the answer to the last question."""

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
"""Of one answer, framing included: the largest verdict, in chunks of one byte, behind as many headers as are read."""
MAX_INTERIM = 16
"""Interim answers (1xx) to one question."""
_SLICE_BYTES = 16 * 1024
"""How much is parsed at a time, so that only a few hundred messages exist before they are counted."""


class TooMuchError(aiohttp.ClientError):
    """The answer is larger than an answer may be."""


@dataclass(slots=True)
class Exchange:
    """One question on one connection."""

    url: URL
    group: str
    fresh: bool
    """Whether the connection must be a new one."""
    refusal: str | None = None
    """Why the connection to an address of the host, or the look-up of its name, was refused."""
    look_up: LookUp | None = None
    """The look-up of the host's name that is waited for."""
    line: Line | None = None
    reused: bool = False
    """Whether the connection has carried another question before."""

    @property
    def has_unsolicited_bytes(self) -> bool:
        """Whether the connection received anything that answers no question."""
        return self.line is not None and self.line.has_unsolicited_bytes

    def prove(self) -> None:
        """Record that the answer was bound to the question."""
        if self.line is not None:
            self.line.proven = True

    def end(self, response: aiohttp.ClientResponse) -> None:
        """Close the connection unless a whole answer, bound to the question, has arrived."""
        if self.line is None or not self.line.proven or self.line.is_spoilt or not response.content.at_eof():
            response.close()
            if self.line is not None:
                self.line.close()


EXCHANGE: ContextVar[Exchange] = ContextVar("exchange")
"""The exchange under way: the connector and the request see it, as they run in the task that asks."""


class Line(ResponseHandler):
    """One connection to an endpoint, which notices bytes that no question asked for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, open_lines: set[Line], most_kept: int) -> None:
        super().__init__(loop)
        self._open = open_lines
        self._most_kept = most_kept
        self._poll = select.poll()
        self._asked = False
        """Whether a whole question was sent."""
        self._answer: StreamReader | None = None
        """The body of its answer, once the head has arrived."""
        self.used = False
        """Whether the connection has carried a question."""
        self.proven = False
        """Whether the last answer was bound to its question: only then may another question follow."""
        self.has_unsolicited_bytes = False
        """Whether bytes arrived that answer no question: before a question was sent, or after an answer's end."""
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
        """Whether aiohttp must close it after the answer: it is spoilt, or enough connections are open."""
        return self.is_spoilt or len(self._open) > self._most_kept

    @property
    def is_spoilt(self) -> bool:
        """Whether received bytes are unread, or answer no question."""
        return super().should_close or self.has_unsolicited_bytes

    def set_response_params(self, **params: Any) -> None:
        """Begin a question: aiohttp calls this before it writes the head."""
        self.used, self.proven, self._asked, self._answer = True, False, False, None
        self._received = self._interim = 0
        super().set_response_params(**params)

    def start_timeout(self) -> None:
        """Record that the whole question was sent: aiohttp calls this after the last byte."""
        self._asked = True
        super().start_timeout()

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Take the head of a message: one for each question, and a few interim ones."""
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
            self._take(data[at : at + _SLICE_BYTES])

    def _refuse(self) -> None:
        """Abort the connection and fail the waiting caller: the answer is too large."""
        self.has_unsolicited_bytes = self._refused = True
        error = TooMuchError()
        self.set_exception(error)
        if self._answer is not None and not self._answer.is_eof():
            self._answer.set_exception(error)
        if self.transport is not None:
            self.transport.abort()

    def _take(self, data: bytes) -> None:
        """Take a part; before the whole question was sent, and after the answer's end, it answers no question."""
        if data and (not self._asked or self._parser is None):
            self.has_unsolicited_bytes = True
            if self._asked:
                self.close()
                return
        super().data_received(data)
        if self._parser is not None and self._answer is not None and self._answer.is_eof():
            self._look_behind(self._parser)

    def _look_behind(self, parser: HttpParser[Any]) -> None:
        """Record whether another message has begun, and parse no more: further bytes answer no question."""
        self._parser = None
        try:
            begun = parser.feed_eof() is not None
        except Exception:  # noqa: BLE001 - it is the parser's word for a message that does not end
            begun = True
        self.has_unsolicited_bytes = self.has_unsolicited_bytes or begun

    def has_something_to_read(self) -> bool:
        """Whether unread bytes, or the end of the connection, have arrived."""
        return bool(self._poll.poll(0))

    def is_encrypted(self) -> bool:
        """Whether the other side may send bytes that are no answer, such as session tickets."""
        return self.transport is not None and self.transport.get_extra_info("ssl_object") is not None


class Question(aiohttp.ClientRequest):
    """A request whose connection is shared with questions of the same group only."""

    @property
    def connection_key(self) -> ConnectionKey:
        return super().connection_key._replace(proxy_headers_hash=hash(EXCHANGE.get().group))


class LineConnector(aiohttp.TCPConnector):
    """Reuses a connection only if nothing has arrived on it since an answer that was bound to its question."""

    def __init__(self, *, most_kept: int, **options: Any) -> None:
        """Keep connections for further questions while at most `most_kept` are open."""
        super().__init__(**options)
        open_lines: set[Line] = set()
        self._factory = cast(
            "partial[ResponseHandler]", partial(Line, loop=self._loop, open_lines=open_lines, most_kept=most_kept)
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
            exchange.line = line = cast("Line", connection.protocol)
            exchange.reused = line.used
            if not line.used:
                line.has_unsolicited_bytes = line.has_unsolicited_bytes or (
                    not line.is_encrypted() and line.has_something_to_read()
                )
                return connection
            if line.proven and not exchange.fresh and not line.is_spoilt and not line.has_something_to_read():
                return connection
            connection.close()
