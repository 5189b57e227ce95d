"""A minimal client of the stream (docs/api.md), for tests and benchmarks: one connection, answers by callback."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Self

import aiohttp
import msgspec

from tests.support.canary import refuse_leaks

SUBPROTOCOL: Final = "halfway.stream.v1"


class StreamLostError(Exception):
    """The connection was lost or closed before an answer came: the operation may have been done."""


class Answer(msgspec.Struct, frozen=True, gc=False):
    """The answer to an operation, with the raw body or problem."""

    n: int
    status: int
    body: msgspec.Raw = msgspec.Raw()
    problem: msgspec.Raw = msgspec.Raw()

    @property
    def document(self) -> Any:
        """The body or the problem, parsed; None if there is neither."""
        raw = bytes(self.body) or bytes(self.problem)
        return msgspec.json.decode(raw) if raw else None


class _Frame(msgspec.Struct, frozen=True):
    hello: dict[str, Any] | None = None
    answers: list[Answer] = []
    checks: list[dict[str, Any]] = []
    ended: dict[str, Any] | None = None
    closing: dict[str, Any] | None = None
    problem: dict[str, Any] | None = None


_FRAME: Final = msgspec.json.Decoder(_Frame)

OnAnswer = Callable[[Answer | None], None]
"""Called with the answer to an operation, None if the connection was lost before it."""


class StreamClient:
    """One connection. The operations of one turn of the event loop share a frame, within the server's limits."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse[Any], hello: Mapping[str, Any]) -> None:
        """Take over a connection whose first frame was read."""
        self._socket = socket
        self.hello = hello
        self.checks: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.ended: list[dict[str, Any]] = []
        self.problem: dict[str, Any] | None = None
        """Why the server closes the connection."""
        self.closing = asyncio.Event()
        """Set once the server is about to close."""
        self.closed = asyncio.Event()
        self._max_in_flight: int = hello["max_in_flight"]
        self._max_in_frame: int = hello["max_frame_operations"]
        self._ending = False
        self._next = 0
        self._waiting: dict[int, OnAnswer] = {}
        self._queued: deque[tuple[str, bytes, OnAnswer]] = deque()
        self._work = asyncio.Event()
        self._writing = asyncio.create_task(self._write())
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(
        cls, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str] | None = None, **options: Any
    ) -> Self:
        """Connect to the coordinator at a URL such as `http://127.0.0.1:8080`."""
        socket = await session.ws_connect(
            f"{url}/v1/stream",
            protocols=(SUBPROTOCOL,),
            headers=headers,
            compress=0,
            max_msg_size=0,
            decode_text=False,
            **options,
        )
        try:
            message = await socket.receive()
            frame = _FRAME.decode(message.data) if message.type is aiohttp.WSMsgType.TEXT else _Frame()
        except BaseException:
            await socket.close()
            raise
        if frame.hello is None:
            await socket.close()
            raise ConnectionError("the server's first frame is not hello")
        return cls(socket, frame.hello)

    @property
    def close_code(self) -> int | None:
        """The code with which the connection was closed."""
        return self._socket.close_code

    @property
    def in_flight(self) -> int:
        """The number of operations without an answer."""
        return len(self._waiting)

    # --- operations

    def send(self, kind: str, fields: bytes, on_answer: OnAnswer) -> None:
        """Send an operation; `fields` is the JSON object of its fields without `n`."""
        if self.closed.is_set():
            on_answer(None)
            return
        self._queued.append((kind, fields, on_answer))
        self._work.set()

    async def call(self, kind: str, fields: Mapping[str, Any]) -> Answer:
        """Send an operation and return its answer; StreamLostError if there is none."""
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def on_answer(answer: Answer | None) -> None:
            if answered.done():
                return
            if answer is None:
                answered.set_exception(StreamLostError(f"closed with {self.close_code}"))
            else:
                answered.set_result(answer)

        self.send(kind, msgspec.json.encode(fields), on_answer)
        return await answered

    async def prepare(self, group: str, *messages: Mapping[str, Any], **fields: Any) -> Answer:
        """Prepare a transaction."""
        return await self.call("prepare", {"group": group, "messages": messages, **fields})

    async def end(self, transaction_id: str, outcome: str, **fields: Any) -> Answer:
        """End a transaction."""
        return await self.call("end", {"id": transaction_id, "outcome": outcome, **fields})

    async def subscribe(self, group: str, most: int) -> Answer:
        """Subscribe to the checks of a group, which are put into `checks`, at most `most` at a time."""
        return await self.call("checks", {"group": group, "max": most})

    async def close(self) -> None:
        """Close the connection; operations without an answer raise StreamLostError."""
        self._ending = True
        await self._socket.close()
        await self._end()

    async def abort(self) -> None:
        """Abort the connection."""
        self._ending = True
        response = self._socket._response
        if response.connection is not None and response.connection.transport is not None:
            response.connection.transport.abort()
        await self._end()

    # --- the connection

    async def _write(self) -> None:
        with suppress(ConnectionError):
            while True:
                await self._work.wait()
                self._work.clear()
                while self._queued and len(self._waiting) < self._max_in_flight:
                    await self._socket.send_frame(self._frame(), aiohttp.WSMsgType.TEXT)

    def _frame(self) -> bytes:
        items: dict[str, list[bytes]] = {}
        for _ in range(min(len(self._queued), self._max_in_flight - len(self._waiting), self._max_in_frame)):
            kind, fields, on_answer = self._queued.popleft()
            self._next += 1
            self._waiting[self._next] = on_answer
            items.setdefault(kind, []).append(b'{"n":%d,%b' % (self._next, fields[1:]))
        members = [b'"%b":[%b]' % (kind.encode(), b",".join(operations)) for kind, operations in items.items()]
        return b"{%b}" % b",".join(members)

    async def _read(self) -> None:
        try:
            while (message := await self._socket.receive()).type is aiohttp.WSMsgType.TEXT:
                self._handle(_FRAME.decode(message.data))
        finally:
            self._fail_waiting()
            self._writing.cancel()
            if not self._ending:
                await self._socket.close()

    def _handle(self, frame: _Frame) -> None:
        for answer in frame.answers:
            self._waiting.pop(answer.n)(answer)
        if self._queued:
            self._work.set()
        for check in frame.checks:
            self.checks.put_nowait(check)
        if frame.ended is not None:
            self.ended.append(frame.ended)
        if frame.closing is not None:
            self.closing.set()
        self.problem = frame.problem or self.problem

    def _fail_waiting(self) -> None:
        self.closed.set()
        waiting = [on_answer for _, _, on_answer in self._queued] + list(self._waiting.values())
        self._queued.clear()
        self._waiting.clear()
        for on_answer in waiting:
            on_answer(None)

    async def _end(self) -> None:
        for task in (self._reading, self._writing):
            task.cancel()
        await asyncio.wait([self._reading, self._writing])
        self._fail_waiting()
        await self._socket.close()


class CheckedStream(StreamClient):
    """A client that no problem may tell a payload or a secret."""

    async def call(self, kind: str, fields: Mapping[str, Any]) -> Answer:
        answer = await super().call(kind, fields)
        refuse_leaks(bytes(answer.problem))
        return answer
