"""The port `Peers` over HTTP: calls that wait for the same owner share one request.

See docs/protocol.md#any-instance-may-be-asked.

Only addresses from owner records are called: a client that may write those may also write all other topics of halfway.
Redirects are not followed, and proxies, cookies and credentials from the environment are not used.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import msgspec
import structlog
from yarl import URL

from halfway.coordinator.cluster.peers import CONTENT_TYPE, AnswerReader, decode_result, encode_call, encode_request
from halfway.coordinator.ports import OwnerHint
from halfway.coordinator.records import (
    CREDENTIAL_HEADER,
    PATH,
    TO_HEADER,
    VERSION,
    VERSION_HEADER,
    DueCall,
    PeerCall,
)
from halfway.protocol.errors import HalfwayError, OverloadedError, PeerLostError, ShardUnavailableError
from halfway.protocol.principal import Principal

log = structlog.get_logger(__name__)

_OK: Final = 200
_ERROR: Final = 500
_CONNECT_S: Final = 2.0
_KEEPALIVE_S: Final = 15.0
_LOG_INTERVAL_S: Final = 30.0
_SILENT_S: Final = 3.0
"""If an owner with the maximum of requests under way is silent for this long, further calls to it are refused."""
_MAX_REFUSAL_BYTES: Final = 4096
KIB: Final = 1024
MIB: Final = 1024 * KIB


class PeerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits on calls, requests and answers, as bytes or counts."""

    max_waiting: int = 10_000
    """Calls that wait for an answer, over all owners."""
    max_waiting_bytes: int = 128 * MIB
    max_waiting_of_one: int = 5_000
    """The same for one owner, so that an owner that hangs leaves places for calls to the others."""
    max_waiting_bytes_of_one: int = 64 * MIB
    max_requests: int = 16
    """Requests under way to one owner; as many again may wait for checks."""
    max_calls: int = 500
    """Calls in one request."""
    max_request_bytes: int = 1 * MIB
    """Bytes of the calls in one request; one call always fits."""
    max_answer_bytes: int = 48 * MIB
    """Bytes of the answer to one call."""


@dataclass(slots=True, eq=False)
class _PendingCall:
    """A call that waits for its answer."""

    call: PeerCall
    body: bytes
    deadline: float
    answer: asyncio.Future[Any]
    sent: bool = False


@dataclass(slots=True, eq=False)
class _OwnerQueue:
    """The calls that wait for one owner, and the number of requests to it that are under way."""

    owner: OwnerHint
    last_heard: float
    """When the owner last sent something, or when the first request under way began."""
    waiting: deque[_PendingCall] = field(default_factory=deque)
    calls: int = 0
    """Calls that wait for an answer, sent or not."""
    calls_bytes: int = 0
    under_way: int = 0
    scheduled: bool = False


class HttpPeers:
    """Calls the owners of other shards.

    One request per owner carries every call that is waiting; the next one is sent as soon as a connection is free.
    Answers arrive one by one, so that a slow call does not delay the others in its request.
    """

    def __init__(
        self, credential: str, *, limits: PeerLimits | None = None, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        """Keep the settings; no connection is opened yet.

        `credential` is sent to owners. `ssl_context` replaces the system's certificate authorities.
        """
        self._credential = credential
        self._limits = limits or PeerLimits()
        self._ssl_context = ssl_context
        self._session: aiohttp.ClientSession | None = None
        self._queues: dict[tuple[str, str, bool], _OwnerQueue] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending: set[_PendingCall] = set()
        self._bytes = 0
        self._last_logged: dict[str, float] = {}
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; waiting calls fail."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for call in self._pending:  # also calls that no request has taken, or one that was cancelled before it began
            if not call.answer.done():
                call.answer.set_exception(_no_answer(call, "this instance is stopping"))
        if self._session is not None:
            await self._session.close()

    async def ask(self, owner: OwnerHint, call: PeerCall, *, deadline: float, principal: Principal) -> Any:
        """Send a call to an owner and return its answer; see `service.ports.Peers` for the errors."""
        loop = asyncio.get_running_loop()
        within_ms = int((deadline - loop.time()) * 1000)
        if self._closed or within_ms <= 0:
            raise ShardUnavailableError("no time was left to call the owner of the shard: try again")
        body = encode_call(call, within_ms=within_ms, principal=principal)
        limits = self._limits
        if len(self._pending) >= limits.max_waiting or self._bytes + len(body) > limits.max_waiting_bytes:
            raise OverloadedError(f"{len(self._pending)} calls already wait for other instances: try again later")
        pending = _PendingCall(call=call, body=body, deadline=deadline, answer=loop.create_future())
        queue = self._enqueue(owner, pending)
        self._pending.add(pending)
        self._bytes += len(body)
        queue.calls += 1
        queue.calls_bytes += len(body)
        try:
            async with asyncio.timeout_at(deadline):
                return await pending.answer
        except TimeoutError:
            raise _no_answer(pending, "not in time") from None
        finally:
            self._pending.discard(pending)
            self._bytes -= len(body)
            queue.calls -= 1
            queue.calls_bytes -= len(body)

    async def reaches(self, owner: OwnerHint) -> bool:
        url = URL(owner.url)
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(url.host, url.port)
        except (OSError, TimeoutError, ValueError):  # ValueError: the name is not a legal host
            return False
        writer.close()
        return True

    # --- the queue of an owner

    def _enqueue(self, owner: OwnerHint, pending: _PendingCall) -> _OwnerQueue:
        # A call that waits for a check keeps its request open for long: it must not take the places of other calls.
        waits = isinstance(pending.call, DueCall)
        key = (owner.incarnation, owner.url, waits)
        now = asyncio.get_running_loop().time()
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _OwnerQueue(owner, now)
        if queue.under_way >= self._limits.max_requests and now - queue.last_heard > _SILENT_S and not waits:
            # The owner hangs: more calls to it would take the places of calls that other owners can answer.
            raise ShardUnavailableError("the owner of the shard does not answer now: try again")
        size = queue.calls_bytes + len(pending.body)
        if queue.calls >= self._limits.max_waiting_of_one or size > self._limits.max_waiting_bytes_of_one:
            raise OverloadedError(f"{queue.calls} calls already wait for the owner of the shard: try again later")
        queue.waiting.append(pending)
        self._schedule(key, queue)
        return queue

    def _schedule(self, key: tuple[str, str, bool], queue: _OwnerQueue) -> None:
        """Send the waiting calls in the next turn of the loop, together with calls that arrive until then."""
        if not queue.scheduled and queue.under_way < self._limits.max_requests:
            queue.scheduled = True
            asyncio.get_running_loop().call_soon(self._send, key, queue)

    def _send(self, key: tuple[str, str, bool], queue: _OwnerQueue) -> None:
        queue.scheduled = False
        while queue.waiting and queue.under_way < self._limits.max_requests and not self._closed:
            batch = self._next(queue)
            if not batch:
                break
            if not queue.under_way:
                queue.last_heard = asyncio.get_running_loop().time()
            queue.under_way += 1
            task = asyncio.create_task(self._request(queue, batch))
            self._tasks.add(task)
            task.add_done_callback(lambda task: self._on_done(key, queue, task))
        self._drop_if_idle(key, queue)

    def _next(self, queue: _OwnerQueue) -> list[_PendingCall]:
        """Take the calls of one request; calls that no caller waits for any more are left out."""
        batch: list[_PendingCall] = []
        size = 0
        while queue.waiting and len(batch) < self._limits.max_calls:
            call = queue.waiting[0]
            if not call.answer.done():
                size += len(call.body)
                if batch and size > self._limits.max_request_bytes:
                    break
                batch.append(call)
            queue.waiting.popleft()
        return batch

    def _on_done(self, key: tuple[str, str, bool], queue: _OwnerQueue, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        queue.under_way -= 1
        if queue.waiting:
            self._schedule(key, queue)
        self._drop_if_idle(key, queue)

    def _drop_if_idle(self, key: tuple[str, str, bool], queue: _OwnerQueue) -> None:
        if not queue.waiting and not queue.under_way and self._queues.get(key) is queue:
            del self._queues[key]

    # --- one request

    async def _request(self, queue: _OwnerQueue, batch: list[_PendingCall]) -> None:
        """Send calls and return their answers; the error of a call without an answer reports whether it may be done."""
        owner, detail = queue.owner, "the connection was closed"
        try:
            async with asyncio.timeout_at(max(call.deadline for call in batch)):
                await self._exchange(queue, batch)
        except aiohttp.ConnectionTimeoutError:
            detail = f"{_address(owner)}: no connection in time"
            _mark_unsent(batch)
            self._log_rarely("owner_not_reached", owner, error="ConnectionTimeoutError")
        except TimeoutError:
            detail = "not in time"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # The error's own text can contain parts of the answer.
            detail = f"{_address(owner)}: {type(error).__name__}"
            if isinstance(error, aiohttp.ClientConnectorError):
                _mark_unsent(batch)
            self._log_rarely("owner_not_reached", owner, error=type(error).__name__)
        except _RefusedError as refused:
            detail = f"{_address(owner)}: {refused}"
            _mark_unsent(batch)
            self._log_rarely("owner_refuses", owner, reason=str(refused))
        finally:
            for call in batch:
                if not call.answer.done():
                    call.answer.set_exception(_no_answer(call, detail))

    async def _exchange(self, queue: _OwnerQueue, batch: list[_PendingCall]) -> None:
        owner = queue.owner
        body = encode_request([call.body for call in batch])
        headers = {
            "Content-Type": CONTENT_TYPE,
            VERSION_HEADER: str(VERSION),
            TO_HEADER: owner.incarnation,
            CREDENTIAL_HEADER: self._credential,
        }
        for call in batch:
            call.sent = True
        url = URL(owner.url.rstrip("/") + PATH)
        async with self._open().post(url, data=body, headers=headers, allow_redirects=False) as response:
            if response.status != _OK:
                code = await _refusal(response)
                if response.status >= _ERROR and not code:
                    # A proxy's answer; it may have forwarded the request before it lost the owner.
                    raise ValueError(f"status {response.status}")
                raise _RefusedError(f"status {response.status} {code}".rstrip())
            reader = AnswerReader(self._limits.max_answer_bytes)
            left = len(batch)
            async for chunk in response.content.iter_any():
                queue.last_heard = asyncio.get_running_loop().time()
                for frame in reader.feed(chunk):
                    if not 0 <= frame.index < len(batch):
                        raise ValueError("an answer to no call")
                    _answer_call(batch[frame.index], frame)
                    left -= 1
                if left <= 0:
                    break

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=0,  # the requests under way are bounded
                keepalive_timeout=_KEEPALIVE_S,
                ssl=self._ssl_context or True,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            )
        return self._session

    def _log_rarely(self, event: str, owner: OwnerHint, **fields: str) -> None:
        """Log a repeated event only once in a while."""
        now = asyncio.get_running_loop().time()
        key = f"{event} {owner.url}"
        if now - self._last_logged.get(key, -_LOG_INTERVAL_S) >= _LOG_INTERVAL_S:
            if len(self._last_logged) > self._limits.max_requests * KIB:
                self._last_logged.clear()
            self._last_logged[key] = now
            log.warning(event, owner=_address(owner), incarnation=owner.incarnation, **fields)


class _RefusedError(Exception):
    """The owner refused the whole request: none of its calls was done."""


def _mark_unsent(batch: list[_PendingCall]) -> None:
    for call in batch:
        call.sent = False


def _answer_call(pending: _PendingCall, frame: Any) -> None:
    if pending.answer.done():
        return
    try:
        pending.answer.set_result(decode_result(pending.call, frame))
    except HalfwayError as error:
        pending.answer.set_exception(error)
    except ValueError:
        # Perhaps the owner has a newer release: the call was done or may have been.
        pending.answer.set_exception(PeerLostError("this release cannot read its answer"))


def _no_answer(pending: _PendingCall, detail: str) -> HalfwayError:
    if pending.sent:
        return PeerLostError(detail)
    return ShardUnavailableError(f"the owner of the shard could not be called ({detail}): try again")


async def _refusal(response: aiohttp.ClientResponse) -> str:
    """Return the error code in a refusal if it is short and has our form, else an empty string."""
    body = await response.content.read(_MAX_REFUSAL_BYTES)
    response.close()
    try:
        code = msgspec.json.decode(body, type=dict[str, Any]).get("error_code")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return code[:40] if isinstance(code, str) and code.isidentifier() else ""


def _address(owner: OwnerHint) -> str:
    url = URL(owner.url)
    return f"{url.host}:{url.port}"
