"""The port for other instances: one path, protected by a credential. A call is never forwarded again."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from aiohttp import web

from halfway.coordinator.cluster.peers import CONTENT_TYPE, CallFrame, decode_call, decode_request, encode_answer
from halfway.coordinator.records import (
    CREDENTIAL_HEADER,
    PATH,
    SUPPORTED_VERSIONS,
    TO_HEADER,
    VERSION_HEADER,
    EndCall,
    PrepareCall,
    ResumeCall,
)
from halfway.http.responses.problems import RareLog
from halfway.protocol.errors import EndUnconfirmedError, HalfwayError, KafkaUnavailableError, OutcomeUnknownError

if TYPE_CHECKING:
    from halfway.coordinator.cluster.peers import PeerHandler

log = structlog.get_logger(__name__)

__all__ = ["PATH", "PeerPort"]

_BODY_S: Final = 10.0
"""The time limit for reading a body."""


class _RefusedError(Exception):
    """The whole request is refused before any of its calls is started."""

    def __init__(self, status: HTTPStatus, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


class PeerPort:
    """The handler of requests from other instances."""

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
        self._bytes = 0
        self._calls: set[asyncio.Task[bytes]] = set()
        self._stopping = False
        self._refused = RareLog(__name__, "peer_refused")

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer the calls of one request, each as soon as it is done."""
        try:
            self._admit(request)
            calls = await self._read(request)
        except _RefusedError as refused:
            self._refused.note(refused.code, remote=request.remote)
            body = msgspec.json.encode({"error_code": refused.code})
            response = web.Response(status=refused.status, body=body, content_type="application/json")
            response.force_close()
            return response
        unsent: list[bytes] = []
        unanswered = len(calls)
        answered = asyncio.Event()

        def finished(task: asyncio.Task[bytes]) -> None:
            nonlocal unanswered
            unanswered -= 1
            self._calls.discard(task)
            if not task.cancelled():
                unsent.append(task.result())
            answered.set()

        tasks = [asyncio.create_task(self._answer(index, frame)) for index, frame in enumerate(calls)]
        self._calls.update(tasks)
        for task in tasks:
            task.add_done_callback(finished)
        answers = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
        await answers.prepare(request)
        try:
            while unanswered or unsent:
                await answered.wait()
                answered.clear()
                data, unsent[:] = b"".join(unsent), []
                await answers.write(data)
            await answers.write_eof()
        except ConnectionError:
            log.info("peer_gone", remote=request.remote, unanswered=unanswered)  # its calls are finished nevertheless
        return answers

    async def drain(self, deadline: float) -> None:
        """Refuse new calls, and return once the calls under way are answered, or at the deadline."""
        self._stopping = True
        if self._calls:
            timeout = max(0.0, deadline - asyncio.get_running_loop().time())
            await asyncio.wait(set(self._calls), timeout=timeout)

    def _admit(self, request: web.BaseRequest) -> None:
        """Validate the headers of a request. The credential comes first, so that a caller without it learns nothing."""
        presented = request.headers.get(CREDENTIAL_HEADER, "").encode(errors="surrogateescape")
        matches = [hmac.compare_digest(presented, credential) for credential in self._credentials]
        if not any(matches):
            raise _RefusedError(HTTPStatus.UNAUTHORIZED, "wrong_credential")
        if request.method != "POST":
            raise _RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "method_not_allowed")
        version = request.headers.get(VERSION_HEADER, "")
        if not version.isascii() or not version.isdigit() or int(version[:6]) not in SUPPORTED_VERSIONS:
            raise _RefusedError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "unknown_version")
        if self._stopping:
            raise _RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "shutting_down")
        if request.headers.get(TO_HEADER) != self._incarnation():
            # The request is for a former incarnation, or for an instance of another cluster that had this address.
            raise _RefusedError(HTTPStatus.MISDIRECTED_REQUEST, "another_incarnation")

    async def _read(self, request: web.BaseRequest) -> list[CallFrame]:
        length = request.content_length
        if length is None or length > self._max_body_bytes:
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_too_large")
        if len(self._calls) >= self._max_calls or self._bytes + length > 4 * self._max_body_bytes:
            raise _RefusedError(HTTPStatus.TOO_MANY_REQUESTS, "overloaded")
        self._bytes += length
        try:
            async with asyncio.timeout(_BODY_S):
                return decode_request(await request.content.read(-1))
        except TimeoutError:
            raise _RefusedError(HTTPStatus.REQUEST_TIMEOUT, "body_timeout") from None
        except (ValueError, web.RequestPayloadError):
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "malformed") from None
        finally:
            self._bytes -= length

    async def _answer(self, index: int, frame: CallFrame) -> bytes:
        timeout_s = min(max(0, frame.within_ms) / 1000, self._longest_s)
        deadline = asyncio.get_running_loop().time() + timeout_s
        call = None
        try:
            call = decode_call(frame.call)
            answer = await self._answering.answer(call, deadline=deadline, principal=frame.caller)
            return encode_answer(index, answer)
        except HalfwayError as error:
            return encode_answer(index, error)
        except TimeoutError:
            return encode_answer(index, _late(call))
        except Exception:
            log.exception("peer_call_failed")
            return encode_answer(index, HalfwayError("something went wrong at the owner: see its log"))


def _late(call: object) -> HalfwayError:
    """Return the error of a call that was not done in time, and may still be done."""
    if isinstance(call, PrepareCall):
        return OutcomeUnknownError("the owner did not confirm it in time")
    if isinstance(call, (EndCall, ResumeCall)):
        return EndUnconfirmedError("the owner did not confirm it in time: send the same again, it is never done twice")
    return KafkaUnavailableError("not done in time: try again")
