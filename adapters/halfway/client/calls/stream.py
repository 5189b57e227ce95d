"""The calls of a process, and the WebSocket that carries them to a coordinator (docs/api.md, "The stream")."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Literal, Protocol

import aiohttp

from halfway.client.calls.transport import NoAnswerError, Reply, Transport
from halfway.client.ids import NewIds

log = logging.getLogger(__name__)

Kind = Literal["prepare", "end"]


@dataclass(eq=False, slots=True)
class Call:
    """One attempt of a prepare or an end."""

    kind: Kind
    id: str
    body: bytes
    """A JSON object."""
    deadline: float
    attempt_s: float
    reply: asyncio.Future[Reply]
    """Cancelled if the caller has given up."""
    traceparent: str
    expires: float
    """When its time is over."""
    connection: Stream | None = None
    """Where it was sent."""
    sent_at: float = 0.0
    settled: asyncio.Future[None] | None = None
    """Done when the call has been answered, or never will be; somebody waits for it."""

    def answer(self, reply: Reply) -> None:
        """Give the caller its answer, unless it has given up."""
        if not self.reply.done():
            self.reply.set_result(reply)

    def fail(self, error: Exception) -> None:
        """Tell the caller that there is no answer, unless it has given up."""
        if not self.reply.done():
            self.reply.set_exception(error)

    def settle(self) -> None:
        """Note that nothing of it is under way any more."""
        if self.settled is not None and not self.settled.done():
            self.settled.set_result(None)


def current_span() -> str:
    """Return the span of the caller, as W3C Trace Context writes it; "" unless the service uses OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    span = None if trace is None else trace.get_current_span().get_span_context()
    if span is None or not span.is_valid:
        return ""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def answer_in(item: Any) -> Reply:
    """Return the answer that an item of a batch or of a frame holds; raises NoAnswerError if it is none."""
    try:
        body = item.get("body") or item.get("problem") or {}
        retry_after_s = body.get("retry_after_s")
        return Reply(int(item["status"]), body, None if retry_after_s is None else float(retry_after_s))
    except (AttributeError, LookupError, TypeError, ValueError):
        raise NoAnswerError("the coordinator sent an answer without a status, or that is no object") from None


_SUBPROTOCOL: Final = "halfway.stream.v1"
_HEARTBEAT_S: Final = 2.0
"""After this time without a byte from the coordinator it gets a ping, and half as much time to answer."""
_CLOSE_S: Final = 1.0
_FINISH_S: Final = 30.0
"""How long a connection that takes no more calls waits for answers: longer than a coordinator may take."""
_FRAME_BYTES: Final = 24 * 1024
"""With fewer bytes a frame has fewer than the 25,000 fields that a coordinator accepts. A larger call is sent alone."""
_MAX_CALL_BYTES: Final = 64 * 1024
"""A larger call is a request: on a slow link, other calls and the answers to pings would wait behind it."""
_ENVELOPE_BYTES: Final = 200
"""More than a frame adds to its only call."""
_FATAL: Final = frozenset({1002, 1003, 1007, 1009, 4400})
"""Codes of a close that the same calls would cause again."""


class Queue(Protocol):
    """What a connection takes calls from."""

    def next_call(self, kinds: Collection[Kind], most: int) -> Call | None:
        """Return the next call of these kinds to send if it has at most so many bytes. Its attempt begins."""

    def take_answer(self, call: Call, reply: Reply) -> None:
        """Take the answer to a call."""

    def leave(self, stream: Stream) -> None:
        """Use another connection from now on."""


class RefusedStreamError(Exception):
    """The server does not accept a stream: an older coordinator, a proxy that does not upgrade, or a refusal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the stream was answered {status}")
        self.is_temporary = status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR


class Stream:
    """A connection. It takes calls until the coordinator stops, or until it is given up."""

    def __init__(
        self, url: str, socket: aiohttp.ClientWebSocketResponse, first: Mapping[str, Any], ids: NewIds
    ) -> None:
        """Take over a connection whose first frame was read."""
        hello = first["hello"]
        self.url = url
        self.sent: dict[int, Call] = {}
        """The calls without an answer, also those whose caller has given up."""
        self._in_flight: Counter[Kind] = Counter()
        """How many of them are of each kind."""
        self.answered_at = 0.0
        self.takes_calls = True
        self._ids = ids
        self._ids.learn_shards(first)
        self.is_refused = False
        """Whether the coordinator has closed it because of what it was sent."""
        self._socket = socket
        self._max_calls = int(hello["max_frame_operations"])
        self._max_sent = int(hello["max_in_flight"]) - 1
        """With one more the coordinator would read no more, and so answer no ping."""
        self._max_bytes = int(hello["max_frame_bytes"])
        self._has_spans = bool(hello.get("traceparent"))
        self._number = 0
        self._work = asyncio.Event()
        self._work.set()
        self._is_over = False

    @classmethod
    async def connect(cls, transport: Transport, url: str, timeout_s: float) -> Stream:
        """Open a connection; raises RefusedStreamError, and ClientError or OSError if there is no answer."""
        async with asyncio.timeout(timeout_s):
            try:
                socket = await transport.upgrade(url, "/v1/stream", _SUBPROTOCOL, heartbeat_s=_HEARTBEAT_S)
            except aiohttp.WSServerHandshakeError as error:
                raise RefusedStreamError(error.status) from None
            try:
                return cls(url, socket, _frame_in(await socket.receive()), transport.ids)
            except (NoAnswerError, LookupError, TypeError, ValueError):
                await _close(socket)
                raise RefusedStreamError(HTTPStatus.SWITCHING_PROTOCOLS) from None  # by another server than halfway
            except BaseException:
                await _close(socket)
                raise

    def accepts(self, call: Call) -> bool:
        return len(call.body) <= _MAX_CALL_BYTES and len(call.body) + _ENVELOPE_BYTES < self._max_bytes

    def wake(self) -> None:
        """Send the calls that wait."""
        self._work.set()

    def give_up(self) -> None:
        """Take no more calls. The connection is closed when all have been answered, or after `_FINISH_S`."""
        if self.takes_calls:
            self.takes_calls = False
            asyncio.get_running_loop().call_later(_FINISH_S, self._end)
            self._work.set()

    async def run(self, queue: Queue) -> None:
        """Send the calls of a queue and hand out their answers, until the connection is closed or lost.

        Calls without an answer fail with NoAnswerError then: they may have been carried out.
        """
        loop = asyncio.get_running_loop()
        tasks = loop.create_task(self._read(queue)), loop.create_task(self._write(queue))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.takes_calls = False
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                log.debug("the stream to %s has ended: %r", self.url, ended)
            self.is_refused = self._socket.close_code in _FATAL
            lost = NoAnswerError(f"{self.url}: the connection was lost before the answer came")
            for call in self.sent.values():
                call.fail(lost)
                call.settle()
            self.sent.clear()
            await _close(self._socket)

    async def _read(self, queue: Queue) -> None:
        loop = asyncio.get_running_loop()
        while True:
            frame = _frame_in(await self._socket.receive())
            for item in frame.get("answers", ()):
                call, reply = self.sent[item["n"]], answer_in(item)
                del self.sent[item["n"]]
                self._in_flight[call.kind] -= 1
                self.answered_at = loop.time()
                call.settle()
                queue.take_answer(call, reply)
            if "shards" in frame and self.takes_calls:
                self._ids.learn_shards(frame)
            if "closing" in frame:
                queue.leave(self)
            if "problem" in frame:
                log.warning("the coordinator at %s closes the stream: %s", self.url, frame["problem"])
            self._work.set()

    async def _write(self, queue: Queue) -> None:
        while not self._is_over and (self.takes_calls or self.sent):
            await self._work.wait()
            self._work.clear()
            while self.takes_calls and (frame := self._next_frame(queue)):
                await self._socket.send_frame(frame, aiohttp.WSMsgType.TEXT)

    def _next_frame(self, queue: Queue) -> bytes:
        """Return a frame with the calls that wait, as far as the coordinator takes more; empty if there are none.

        Each kind takes at most half of what may be in flight: an end that waits for its topic must not delay prepares.
        """
        parts: dict[str, list[bytes]] = {}
        room, most = min(self._max_calls, self._max_sent - len(self.sent)), self._max_bytes
        now = asyncio.get_running_loop().time()
        left = _FRAME_BYTES
        while room > 0 and left > 0 and (call := queue.next_call(self._kinds(), most)) is not None:
            self._number += 1
            self._in_flight[call.kind] += 1
            self.sent[self._number] = call
            call.connection, call.sent_at = self, now
            span = b'"traceparent":"%b",' % call.traceparent.encode() if call.traceparent and self._has_spans else b""
            parts.setdefault(call.kind, []).append(b'{"n":%d,%b%b' % (self._number, span, call.body[1:]))
            room -= 1
            left -= len(call.body)
            most = left
        lists = [b'"%b":[%b]' % (kind.encode(), b",".join(calls)) for kind, calls in parts.items()]
        return b"{%b}" % b",".join(lists) if lists else b""

    def _kinds(self) -> Collection[Kind]:
        most = max(1, self._max_sent // 2)
        return [kind for kind in ("end", "prepare") if self._in_flight[kind] < most]

    def _end(self) -> None:
        self._is_over = True
        self._work.set()


async def _close(socket: aiohttp.ClientWebSocketResponse) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_S):
            await socket.close()


def _frame_in(message: aiohttp.WSMessage) -> Mapping[str, Any]:
    """Return a frame of the coordinator; raises NoAnswerError if the connection has ended, or if it is no frame."""
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise NoAnswerError(f"the connection was closed: {message.type.name} {message.data}")
    try:
        frame = json.loads(message.data)
    except (ValueError, RecursionError) as error:
        raise NoAnswerError(f"the coordinator sent no JSON: {error}") from None
    if not isinstance(frame, dict):
        raise NoAnswerError("the coordinator sent a frame that is no object")
    return frame
