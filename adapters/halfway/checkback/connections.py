"""Kept connections on which nothing but the answer to the question that was just sent may come."""

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


MAX_RECEIVED_BYTES = 1024 * 1024
"""Of one answer, framing included: the largest verdict, in chunks of one byte, behind as many headers as are read."""
MAX_INTERIM = 16
"""Interim answers (1xx) to one question."""
_SLICE_BYTES = 16 * 1024
"""What is parsed at once, so that no more than some hundred messages are made before they are counted."""


class TooMuchError(aiohttp.ClientError):
    """More came than an answer may have."""


@dataclass(slots=True)
class Turn:
    """One question on one connection."""

    group: str
    fresh: bool
    """Whether a connection that has carried another question will not do."""
    line: Line | None = None
    reused: bool = False
    """Whether the connection has carried another question before."""

    @property
    def is_out_of_turn(self) -> bool:
        """Whether anything came on the connection that answers no question."""
        return self.line is not None and self.line.out_of_turn

    def prove(self) -> None:
        """Say that the answer was bound to the question."""
        if self.line is not None:
            self.line.proven = True

    def end(self, response: aiohttp.ClientResponse) -> None:
        """Close the connection unless the whole of an answer came that was bound to the question."""
        if self.line is None or not self.line.proven or self.line.is_spoilt or not response.content.at_eof():
            response.close()
            if self.line is not None:
                self.line.close()


TURN: ContextVar[Turn] = ContextVar("turn")
"""Whose turn it is: the connector and the request see it, as they run in the task that asks."""


class Line(ResponseHandler):
    """One connection to an endpoint: notes what comes on it when nothing may."""

    def __init__(self, loop: asyncio.AbstractEventLoop, open_lines: set[Line], most_kept: int) -> None:
        super().__init__(loop)
        self._open = open_lines
        self._most_kept = most_kept
        self._poll = select.poll()
        self._asked = False
        """Whether a question was sent whole."""
        self._answer: StreamReader | None = None
        """The body of the answer to it, from when its head has come."""
        self.used = False
        """Whether a question was sent on it."""
        self.proven = False
        """Whether the last answer was bound to its question: only then may another question follow."""
        self.out_of_turn = False
        """Whether something came that answers no question: before one was sent whole, or after an answer's end."""
        self._received = 0
        self._interim = 0
        self._refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._open.add(self)
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def connection_lost(self, exc: BaseException | None) -> None:
        """End an answer that is not whole: aiohttp forgets its body if the framing is what is wrong with it."""
        self._open.discard(self)
        super().connection_lost(exc)
        answer = self._answer
        if answer is not None and not answer.is_eof() and answer.exception() is None:
            answer.set_exception(aiohttp.ClientPayloadError("the answer ended early"))

    @property
    def should_close(self) -> bool:
        """Whether aiohttp must not keep it: it is spoilt, or enough are open."""
        return self.is_spoilt or len(self._open) > self._most_kept

    @property
    def is_spoilt(self) -> bool:
        """Whether anything is left to read that was received, or anything was out of turn."""
        return super().should_close or self.out_of_turn

    def set_response_params(self, **params: Any) -> None:
        """Begin a question: aiohttp calls this before it writes the head."""
        self.used, self.proven, self._asked, self._answer = True, False, False, None
        self._received = self._interim = 0
        super().set_response_params(**params)

    def start_timeout(self) -> None:
        """Note that the question was sent whole: aiohttp calls this after the last byte."""
        self._asked = True
        super().start_timeout()

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Take the head of a message; there is one for each question, beside a few interim ones."""
        if self._refused:
            return
        message, body = data
        if message.code >= HTTPStatus.OK or message.code == HTTPStatus.SWITCHING_PROTOCOLS:
            self.out_of_turn = self.out_of_turn or self._answer is not None
            self._answer = body
        else:
            self._interim += 1
            if self._interim > MAX_INTERIM:
                self._refuse()
                return
        super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        """Take bytes, no more than an answer may have."""
        self._received += len(data)
        if self._received > MAX_RECEIVED_BYTES:
            self._refuse()
        for at in range(0, len(data) or 1, _SLICE_BYTES):
            if self._refused:
                return
            self._take(data[at : at + _SLICE_BYTES])

    def _refuse(self) -> None:
        """End the connection and fail the caller that waits for its answer: too much came."""
        self.out_of_turn = self._refused = True
        error = TooMuchError()
        self.set_exception(error)
        if self._answer is not None and not self._answer.is_eof():
            self._answer.set_exception(error)
        if self.transport is not None:
            self.transport.abort()

    def _take(self, data: bytes) -> None:
        """Take a part: it is out of turn before the question was sent whole, and after the end of its answer."""
        if data and (not self._asked or self._parser is None):
            self.out_of_turn = True
            if self._asked:
                self.close()
                return
        super().data_received(data)
        if self._parser is not None and self._answer is not None and self._answer.is_eof():
            self._look_behind(self._parser)

    def _look_behind(self, parser: HttpParser[Any]) -> None:
        """Note whether another message has begun, and parse no more: what comes now is out of turn."""
        self._parser = None
        try:
            begun = parser.feed_eof() is not None
        except Exception:  # noqa: BLE001 - it is the parser's word for a message that does not end
            begun = True
        self.out_of_turn = self.out_of_turn or begun

    def has_something_to_read(self) -> bool:
        """Whether anything, the end of the connection too, has arrived that was not read yet."""
        return bool(self._poll.poll(0))

    def is_encrypted(self) -> bool:
        """Whether the other side may send bytes that are no answer, such as session tickets."""
        return self.transport is not None and self.transport.get_extra_info("ssl_object") is not None


class Question(aiohttp.ClientRequest):
    """A request whose connection is shared with questions of the same group only."""

    @property
    def connection_key(self) -> ConnectionKey:
        return super().connection_key._replace(proxy_headers_hash=hash(TURN.get().group))


class LineConnector(aiohttp.TCPConnector):
    """Hands out a kept connection only if nothing has come on it since an answer that was bound to its question."""

    def __init__(self, *, most_kept: int, **options: Any) -> None:
        """Keep connections open for further questions while no more than `most_kept` are open."""
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
        turn = TURN.get()
        while True:
            connection = await super().connect(req, traces, timeout)
            turn.line = line = cast("Line", connection.protocol)
            turn.reused = line.used
            if not line.used:
                line.out_of_turn = line.out_of_turn or (not line.is_encrypted() and line.has_something_to_read())
                return connection
            if line.proven and not turn.fresh and not line.is_spoilt and not line.has_something_to_read():
                return connection
            connection.close()
