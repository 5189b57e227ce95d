"""The port for other instances: one path, protected by a credential. A call is never forwarded again."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPMethod, HTTPStatus
from typing import Final

import structlog
from aiohttp import WSCloseCode, WSMsgType, web

from halfway.coordinator.cluster.forward import PeerHandler
from halfway.coordinator.logging import LogSummary
from halfway.coordinator.records import (
    CREDENTIAL_HEADER,
    MAX_ANSWER_BYTES,
    REFUSAL_HEADER,
    SUPPORTED_VERSIONS,
    TO_HEADER,
    VERSION_HEADER,
    CallFrame,
    decode_call,
    decode_calls,
    encode_answer,
    encode_message,
)
from halfway.protocol.errors import HalfwayError, PeerLostError, ShardUnavailableError

log = structlog.get_logger(__name__)

_ALIVE_S: Final = 1.0
"""An instance is silent for at most this long, so that others notice if it hangs."""
_CLOSE_S: Final = 1.0
"""How long a stop waits for instances that do not read their answers, or do not answer its close frames."""
_MESSAGE_BYTES: Final = 1024 * 1024
"""Bytes of the answers in one message, which may end with an answer that is larger."""


class _RefusedError(Exception):
    def __init__(self, status: HTTPStatus, code: str) -> None:
        super().__init__(f"{status.value} {code}")
        self.status = status
        self.code = code


@dataclass(slots=True, eq=False)
class _Connection:
    """A connection of another instance."""

    socket: web.WebSocketResponse
    answers: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    taken: int = 0
    """The number of the last call that was read; numbers grow."""


class PeerPort:
    """The handler of connections from other instances."""

    def __init__(
        self,
        answering: PeerHandler,
        *,
        credentials: Sequence[str],
        incarnation: Callable[[], str | None],
        max_body_bytes: int,
        longest_s: float,
        max_calls: int = 10_000,
    ) -> None:
        """Take the accepted credentials, and the incarnation of this instance.

        `longest_s` limits the duration of one call, `max_calls` the number of calls under way.
        """
        self._answering = answering
        self._credentials = [credential.encode() for credential in credentials]
        self._incarnation = incarnation
        self._max_body_bytes = max_body_bytes
        self._longest_s = longest_s
        self._max_calls = max_calls
        self._calls: set[asyncio.Task[bytes]] = set()
        self._connections: set[_Connection] = set()
        self._stopping = False
        self._refused = LogSummary(log, "info", "peer_refused")

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer the calls of a connection, each as soon as it is done, until the other instance closes it."""
        socket = web.WebSocketResponse(max_msg_size=self._max_body_bytes, compress=False)
        try:
            self._admit(request, socket)
        except _RefusedError as refused:
            self._refused.note({"reason": refused.code}, remote=request.remote)
            response = web.Response(status=refused.status, headers={REFUSAL_HEADER: refused.code})
            response.force_close()
            return response
        incarnation = self._incarnation()
        await socket.prepare(request)
        connection = _Connection(socket)
        self._connections.add(connection)
        writing = asyncio.create_task(_write(socket, connection.answers))
        try:
            async for message in socket:
                if message.type is not WSMsgType.BINARY or connection.answers.qsize() > self._max_calls:
                    break
                for frame in decode_calls(message.data):
                    connection.taken = frame.number
                    self._begin(frame, incarnation, connection.answers)
        except ValueError:
            self._refused.note({"reason": "malformed"}, remote=request.remote)
        finally:
            self._connections.discard(connection)
            writing.cancel()  # the calls under way are finished nevertheless
        return socket

    async def drain(self, deadline: float) -> None:
        """Refuse new calls, answer those under way until the deadline, and close the connections.

        The other side is told up to which call they were read, so that it knows that the later ones were not done.
        """
        self._stopping = True
        loop = asyncio.get_running_loop()
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=max(0.0, deadline - loop.time()))
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min(deadline, loop.time() + _CLOSE_S)):
                await asyncio.gather(*(self._close(connection) for connection in self._connections))

    async def _close(self, connection: _Connection) -> None:
        await connection.answers.join()
        taken = str(connection.taken).encode()
        with suppress(ConnectionError):
            await connection.socket.close(code=WSCloseCode.GOING_AWAY, message=taken)

    def _admit(self, request: web.BaseRequest, socket: web.WebSocketResponse) -> None:
        """Validate the headers of a request. The credential comes first, so that a caller without it learns nothing."""
        presented = request.headers.get(CREDENTIAL_HEADER, "").encode(errors="surrogateescape")
        matches = [hmac.compare_digest(presented, credential) for credential in self._credentials]
        if not any(matches):
            raise _RefusedError(HTTPStatus.UNAUTHORIZED, "wrong_credential")
        if request.method != HTTPMethod.GET or not socket.can_prepare(request):
            raise _RefusedError(HTTPStatus.UPGRADE_REQUIRED, "upgrade_required")
        version = request.headers.get(VERSION_HEADER, "")
        if not version.isascii() or not version.isdigit() or int(version[:6]) not in SUPPORTED_VERSIONS:
            raise _RefusedError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "unknown_version")
        self._require_owner(request.headers.get(TO_HEADER))

    def _require_owner(self, incarnation: str | None) -> None:
        if self._stopping:
            raise _RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "shutting_down")
        if incarnation != self._incarnation():
            # The call is for a former incarnation, or for an instance of another cluster that had this address.
            raise _RefusedError(HTTPStatus.MISDIRECTED_REQUEST, "another_incarnation")
        if len(self._calls) >= self._max_calls:
            raise _RefusedError(HTTPStatus.TOO_MANY_REQUESTS, "overloaded")

    def _begin(self, frame: CallFrame, incarnation: str | None, answers: asyncio.Queue[bytes]) -> None:
        try:
            self._require_owner(incarnation)
        except _RefusedError as refused:
            error = ShardUnavailableError(f"the owner of the shard could not be called ({refused}): try again")
            answers.put_nowait(encode_answer(frame.number, error))
            return

        def done(task: asyncio.Task[bytes]) -> None:
            self._calls.discard(task)
            if not task.cancelled():
                answers.put_nowait(task.result())

        task = asyncio.create_task(self._answer(frame))
        self._calls.add(task)
        task.add_done_callback(done)

    async def _answer(self, frame: CallFrame) -> bytes:
        timeout_s = min(max(0, frame.within_ms) / 1000, self._longest_s)
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            answer = await self._answering.answer(decode_call(frame.call), deadline=deadline, principal=frame.caller)
            encoded = encode_answer(frame.number, answer)
        except HalfwayError as error:
            return encode_answer(frame.number, error)
        except TimeoutError:
            return encode_answer(frame.number, PeerLostError("not in time"))
        except Exception:
            log.exception("peer_call_failed")
            return encode_answer(frame.number, HalfwayError("something went wrong at the owner: see its log"))
        if len(encoded) > MAX_ANSWER_BYTES:  # the connection of all callers would be closed
            log.warning("peer_answer_too_large", bytes=len(encoded), at_most=MAX_ANSWER_BYTES)
            return encode_answer(frame.number, PeerLostError(f"its answer has more than {MAX_ANSWER_BYTES} bytes"))
        return encoded


async def _write(socket: web.WebSocketResponse, answers: asyncio.Queue[bytes]) -> None:
    """Send answers as they come, and an empty message if there is none for a while."""
    with suppress(ConnectionError):
        while True:
            frames: list[bytes] = []
            size = 0
            with suppress(TimeoutError):
                async with asyncio.timeout(_ALIVE_S):
                    frames.append(await answers.get())
            await asyncio.sleep(0)  # until all answers of this turn of the event loop are there
            while not answers.empty() and size < _MESSAGE_BYTES:
                frames.append(answers.get_nowait())
                size += len(frames[-1])
            await socket.send_bytes(encode_message(frames))
            for _ in frames:
                answers.task_done()
