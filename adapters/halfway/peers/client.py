"""The port `Peers` over HTTP: what is asked of one owner at one moment goes as one request.

See docs/protocol.md#any-instance-may-be-asked.

Only addresses from owner records are called: anybody who may write those may write all other topics of halfway too.
Redirects are not followed, and proxies, cookies and credentials of the environment not used.
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

from halfway.domain.errors import HalfwayError, OverloadedError, PeerLostError, ShardUnavailableError
from halfway.domain.principal import Principal
from halfway.service.cluster.peer_wire import CONTENT_TYPE, AnswerReader, decode_result, encode_call, encode_request
from halfway.service.peer_calls import (
    CREDENTIAL_HEADER,
    PATH,
    TO_HEADER,
    VERSION,
    VERSION_HEADER,
    DueCall,
    PeerCall,
)
from halfway.service.ports import OwnerHint

log = structlog.get_logger(__name__)

_OK: Final = 200
_ERROR: Final = 500
_CONNECT_S: Final = 2.0
_KEEPALIVE_S: Final = 15.0
_SAY_AGAIN_S: Final = 30.0
_SILENT_S: Final = 3.0
"""Of an owner that says nothing for so long, while it has as many requests as it may, no more is asked."""
_MAX_REFUSAL_BYTES: Final = 4096
KIB: Final = 1024
MIB: Final = 1024 * KIB


class PeerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What is bounded; bytes and counts."""

    max_waiting: int = 10_000
    """Calls that wait for an answer, of all owners together."""
    max_waiting_bytes: int = 128 * MIB
    max_waiting_of_one: int = 5_000
    """The share of one owner: if it hangs, there are places for calls to the others."""
    max_waiting_bytes_of_one: int = 64 * MIB
    max_requests: int = 16
    """Requests under way to one owner, and as many again that wait for checks."""
    max_calls: int = 500
    """Calls in one request."""
    max_request_bytes: int = 1 * MIB
    """Of calls in one request, beyond the first."""
    max_answer_bytes: int = 48 * MIB
    """Of one call's answer."""


@dataclass(slots=True, eq=False)
class _Asked:
    """One call, from when it is asked until it is answered."""

    call: PeerCall
    body: bytes
    deadline: float
    answer: asyncio.Future[Any]
    sent: bool = False


@dataclass(slots=True, eq=False)
class _Line:
    """What waits for one owner, and how many requests to it are under way."""

    owner: OwnerHint
    heard_at: float
    """When it last answered anything, or began to be asked."""
    waiting: deque[_Asked] = field(default_factory=deque)
    calls: int = 0
    """Those that wait for an answer, sent or not."""
    calls_bytes: int = 0
    under_way: int = 0
    scheduled: bool = False


class HttpPeers:
    """Asks owners. Of each it is asked by a request as soon as there is a free place, with whatever waits then.

    Answers come one by one as they are done, so that a call which takes long holds up none that shares its request.
    """

    def __init__(
        self, credential: str, *, limits: PeerLimits | None = None, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        """Open nothing yet. `credential` is shown to owners; `ssl_context` replaces the system's authorities."""
        self._credential = credential
        self._limits = limits or PeerLimits()
        self._ssl_context = ssl_context
        self._session: aiohttp.ClientSession | None = None
        self._lines: dict[tuple[str, str, bool], _Line] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: set[_Asked] = set()
        self._bytes = 0
        self._said: dict[str, float] = {}
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; what waits for an answer is lost."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for asked in self._asked:  # also what no request had taken yet, or one that was cancelled before it began
            if not asked.answer.done():
                asked.answer.set_exception(_no_answer(asked, "this instance stops"))
        if self._session is not None:
            await self._session.close()

    async def ask(self, owner: OwnerHint, call: PeerCall, *, deadline: float, principal: Principal) -> Any:
        """Have a call done by an owner; errors as `service.ports.Peers` tells."""
        loop = asyncio.get_running_loop()
        within_ms = int((deadline - loop.time()) * 1000)
        if self._closed or within_ms <= 0:
            raise ShardUnavailableError("no time was left to ask the owner of the shard: try again")
        body = encode_call(call, within_ms=within_ms, principal=principal)
        limits = self._limits
        if len(self._asked) >= limits.max_waiting or self._bytes + len(body) > limits.max_waiting_bytes:
            raise OverloadedError(f"{len(self._asked)} calls wait for other instances already: try again later")
        asked = _Asked(call=call, body=body, deadline=deadline, answer=loop.create_future())
        line = self._queue(owner, asked)
        self._asked.add(asked)
        self._bytes += len(body)
        line.calls += 1
        line.calls_bytes += len(body)
        try:
            async with asyncio.timeout_at(deadline):
                return await asked.answer
        except TimeoutError:
            raise _no_answer(asked, "not in time") from None
        finally:
            self._asked.discard(asked)
            self._bytes -= len(body)
            line.calls -= 1
            line.calls_bytes -= len(body)

    # --- the line of an owner

    def _queue(self, owner: OwnerHint, asked: _Asked) -> _Line:
        # What waits for a check keeps its request open for long: it must not take the places of the others.
        waits = isinstance(asked.call, DueCall)
        key = (owner.incarnation, owner.url, waits)
        now = asyncio.get_running_loop().time()
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(owner, now)
        if line.under_way >= self._limits.max_requests and now - line.heard_at > _SILENT_S and not waits:
            # It hangs: who asks on would take the places here of those whom others can serve.
            raise ShardUnavailableError("the owner of the shard does not answer now: try again")
        size = line.calls_bytes + len(asked.body)
        if line.calls >= self._limits.max_waiting_of_one or size > self._limits.max_waiting_bytes_of_one:
            raise OverloadedError(f"{line.calls} calls wait for the owner of the shard already: try again later")
        line.waiting.append(asked)
        self._schedule(key, line)
        return line

    def _schedule(self, key: tuple[str, str, bool], line: _Line) -> None:
        """Send what waits at the next turn of the loop, together with what comes until then."""
        if not line.scheduled and line.under_way < self._limits.max_requests:
            line.scheduled = True
            asyncio.get_running_loop().call_soon(self._send, key, line)

    def _send(self, key: tuple[str, str, bool], line: _Line) -> None:
        line.scheduled = False
        while line.waiting and line.under_way < self._limits.max_requests and not self._closed:
            batch = self._next(line)
            if not batch:
                break
            if not line.under_way:
                line.heard_at = asyncio.get_running_loop().time()
            line.under_way += 1
            task = asyncio.create_task(self._request(line, batch))
            self._tasks.add(task)
            task.add_done_callback(lambda task: self._done(key, line, task))
        self._forget(key, line)

    def _next(self, line: _Line) -> list[_Asked]:
        """Take what goes with one request; what nobody waits for any more is left out."""
        batch: list[_Asked] = []
        size = 0
        while line.waiting and len(batch) < self._limits.max_calls:
            asked = line.waiting[0]
            if not asked.answer.done():
                size += len(asked.body)
                if batch and size > self._limits.max_request_bytes:
                    break
                batch.append(asked)
            line.waiting.popleft()
        return batch

    def _done(self, key: tuple[str, str, bool], line: _Line, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        line.under_way -= 1
        if line.waiting:
            self._schedule(key, line)
        self._forget(key, line)

    def _forget(self, key: tuple[str, str, bool], line: _Line) -> None:
        if not line.waiting and not line.under_way and self._lines.get(key) is line:
            del self._lines[key]

    # --- one request

    async def _request(self, line: _Line, batch: list[_Asked]) -> None:
        """Send calls and hand out their answers; a call without an answer is told whether it may have been done."""
        owner, detail = line.owner, "the connection was closed"
        try:
            async with asyncio.timeout_at(max(asked.deadline for asked in batch)):
                await self._exchange(line, batch)
        except aiohttp.ConnectionTimeoutError:
            detail = f"{_place(owner)}: no connection in time"
            _not_sent(batch)
            self._say("owner_not_reached", owner, error="ConnectionTimeoutError")
        except TimeoutError:
            detail = "not in time"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # Not the error's own text, which can hold parts of the answer.
            detail = f"{_place(owner)}: {type(error).__name__}"
            if isinstance(error, aiohttp.ClientConnectorError):
                _not_sent(batch)
            self._say("owner_not_reached", owner, error=type(error).__name__)
        except _RefusedError as refused:
            detail = f"{_place(owner)}: {refused}"
            _not_sent(batch)
            self._say("owner_refuses", owner, reason=str(refused))
        finally:
            for asked in batch:
                if not asked.answer.done():
                    asked.answer.set_exception(_no_answer(asked, detail))

    async def _exchange(self, line: _Line, batch: list[_Asked]) -> None:
        owner = line.owner
        body = encode_request([asked.body for asked in batch])
        headers = {
            "Content-Type": CONTENT_TYPE,
            VERSION_HEADER: str(VERSION),
            TO_HEADER: owner.incarnation,
            CREDENTIAL_HEADER: self._credential,
        }
        for asked in batch:
            asked.sent = True
        url = URL(owner.url.rstrip("/") + PATH)
        async with self._open().post(url, data=body, headers=headers, allow_redirects=False) as response:
            if response.status != _OK:
                code = await _refusal(response)
                if response.status >= _ERROR and not code:
                    # A proxy's, which may have passed the request on before it lost the owner.
                    raise ValueError(f"status {response.status}")
                raise _RefusedError(f"status {response.status} {code}".rstrip())
            reader = AnswerReader(self._limits.max_answer_bytes)
            left = len(batch)
            async for chunk in response.content.iter_any():
                line.heard_at = asyncio.get_running_loop().time()
                for frame in reader.feed(chunk):
                    if not 0 <= frame.index < len(batch):
                        raise ValueError("an answer to nothing")
                    _answer_call(batch[frame.index], frame)
                    left -= 1
                if left <= 0:
                    break

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=0,  # bounded by the requests under way
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

    def _say(self, event: str, owner: OwnerHint, **fields: str) -> None:
        """Log what goes on for long once in a while only."""
        now = asyncio.get_running_loop().time()
        key = f"{event} {owner.url}"
        if now - self._said.get(key, -_SAY_AGAIN_S) >= _SAY_AGAIN_S:
            if len(self._said) > self._limits.max_requests * KIB:
                self._said.clear()
            self._said[key] = now
            log.warning(event, owner=_place(owner), incarnation=owner.incarnation, **fields)


class _RefusedError(Exception):
    """The whole request was refused: none of its calls was done."""


def _not_sent(batch: list[_Asked]) -> None:
    for asked in batch:
        asked.sent = False


def _answer_call(asked: _Asked, frame: Any) -> None:
    if asked.answer.done():
        return
    try:
        asked.answer.set_result(decode_result(asked.call, frame))
    except HalfwayError as error:
        asked.answer.set_exception(error)
    except ValueError:
        # Of a newer release, perhaps: whatever it says, it was done or may have been.
        asked.answer.set_exception(PeerLostError("its answer cannot be read by this release"))


def _no_answer(asked: _Asked, detail: str) -> HalfwayError:
    if asked.sent:
        return PeerLostError(detail)
    return ShardUnavailableError(f"the owner of the shard could not be asked ({detail}): try again")


async def _refusal(response: aiohttp.ClientResponse) -> str:
    """Return the code that a refusal names, if it is short and one of ours."""
    body = await response.content.read(_MAX_REFUSAL_BYTES)
    response.close()
    try:
        code = msgspec.json.decode(body, type=dict[str, Any]).get("error_code")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return code[:40] if isinstance(code, str) and code.isidentifier() else ""


def _place(owner: OwnerHint) -> str:
    url = URL(owner.url)
    return f"{url.host}:{url.port}"
