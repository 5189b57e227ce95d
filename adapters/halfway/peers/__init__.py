"""The port `Peers` over HTTP: a WebSocket to each owner carries all calls to it, each with its own answer.

See docs/protocol.md#forwarding.

Only addresses from owner records are called: a client that may write those may also write all other topics of halfway.
Redirects are not followed, and proxies, cookies and credentials from the environment are not used.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count
from typing import Any, Final, Self

import aiohttp
import msgspec
import structlog
from aiohttp import WSMsgType
from yarl import URL

from halfway.coordinator.logging import LogSummary
from halfway.coordinator.ports import OwnerHint
from halfway.coordinator.records import (
    CREDENTIAL_HEADER,
    MAX_ANSWER_BYTES,
    PATH,
    REFUSAL_HEADER,
    TO_HEADER,
    VERSION,
    VERSION_HEADER,
    EndCall,
    PeerCall,
    PrepareCall,
    decode_answers,
    decode_result,
    encode_call,
    encode_message,
)
from halfway.coordinator.tls import Trust
from halfway.protocol.errors import HalfwayError, OverloadedError, PeerLostError, ShardUnavailableError
from halfway.protocol.principal import Principal

log = structlog.get_logger(__name__)
_not_reached: Final = LogSummary(log, "warning", "owner_not_reached")
_refuses: Final = LogSummary(log, "warning", "owner_refuses")

_CONNECT_S: Final = 2.0
_HANDSHAKE_S: Final = 5.0
_IDLE_S: Final = 30.0
"""A connection without a call for this long is closed."""
_LOST_S: Final = 15.0
"""An owner is silent for at most a second. One that is silent for this long, or the network to it, is gone."""
_SILENT_S: Final = 3.0
"""If an owner is silent for this long with many calls waiting, further calls to it are refused."""
_MANY: Final = 16
_CLOSE_S: Final = 1.0
KIB: Final = 1024
MIB: Final = 1024 * KIB


class PeerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits on calls, messages and answers, as bytes or counts."""

    max_waiting: int = 10_000
    """Calls that wait for an answer, over all owners."""
    max_waiting_bytes: int = 128 * MIB
    max_waiting_of_one: int = 5_000
    """The same for one owner, so that an owner that hangs leaves places for calls to the others."""
    max_waiting_bytes_of_one: int = 64 * MIB
    max_calls: int = 500
    """Calls in one message."""
    max_message_bytes: int = 1 * MIB
    """Bytes of the calls in one message, which may end with a call that is larger."""
    max_answer_bytes: int = MAX_ANSWER_BYTES + MIB
    """Bytes of one message with answers, which may end with an answer that is large."""


@dataclass(slots=True, eq=False)
class _PendingCall:
    """A call that waits for its answer."""

    number: int
    call: PeerCall
    body: bytes
    answer: asyncio.Future[Any]
    sent: bool = False


@dataclass(slots=True, eq=False)
class _Link:
    """A connection to an owner, open or being opened, with the calls that wait there."""

    key: tuple[str, str, bool]
    owner: OwnerHint
    last_heard: float
    """When the owner last sent something, or when the connection was begun."""
    unsent: asyncio.Queue[_PendingCall] = field(default_factory=asyncio.Queue)
    calls: dict[int, _PendingCall] = field(default_factory=dict)
    """The calls that wait for an answer by their numbers, sent or not."""
    calls_bytes: int = 0
    taken: int | None = None
    """The number of the last call that the owner has read, if it says so when it closes; later ones are not done."""


class HttpPeers:
    """Calls the owners of other shards.

    One message carries every call of one moment. Answers arrive one by one, so that a slow call does not delay others.
    """

    def __init__(self, *credentials: str, limits: PeerLimits | None = None, trust: Trust | None = None) -> None:
        """Keep the settings; no connection is opened yet.

        An owner is shown the first credential, and the next one if it does not take that. `trust` gives each new
        connection the context that verifies the owner, instead of the system's authorities.
        """
        self._credentials = credentials
        self._limits = limits or PeerLimits()
        self._trust = trust or (lambda: True)
        self._session: aiohttp.ClientSession | None = None
        self._links: dict[tuple[str, str, bool], _Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = count(1)
        self._waiting = 0
        self._bytes = 0
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; waiting calls fail."""
        self._closed = True
        for link in self._links.values():
            _fail(link, "this instance is stopping")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def ask(self, owner: OwnerHint, call: PeerCall, *, deadline: float, principal: Principal) -> Any:
        """Send a call to an owner and return its answer; see `service.ports.Peers` for the errors."""
        loop = asyncio.get_running_loop()
        within_ms = int((deadline - loop.time()) * 1000)
        if self._closed or within_ms <= 0:
            raise ShardUnavailableError("no time was left to call the owner of the shard: try again")
        number = next(self._numbers)
        body = encode_call(number, call, within_ms=within_ms, principal=principal)
        size, limits = len(body), self._limits
        if self._waiting >= limits.max_waiting or self._bytes + size > limits.max_waiting_bytes:
            raise OverloadedError(f"{self._waiting} calls already wait for other instances: try again later")
        pending = _PendingCall(number, call, body, loop.create_future())
        link = self._link_for(owner, pending)
        self._waiting += 1
        self._bytes += size
        link.calls[number] = pending
        link.calls_bytes += size
        link.unsent.put_nowait(pending)
        try:
            async with asyncio.timeout_at(deadline):
                return await pending.answer
        except TimeoutError:
            raise _no_answer(link, pending, "not in time") from None
        finally:
            if not pending.sent:
                pending.body = b""  # nobody waits for it any more, and it may stay in the queue of a silent owner
            self._waiting -= 1
            self._bytes -= size
            link.calls.pop(number, None)
            link.calls_bytes -= size

    async def reaches(self, owner: OwnerHint) -> bool:
        url = URL(owner.url)
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(url.host, url.port)
        except (OSError, TimeoutError, ValueError):  # ValueError: the name is not a legal host
            return False
        writer.close()
        return True

    def _link_for(self, owner: OwnerHint, pending: _PendingCall) -> _Link:
        """Return the connection for a call, or begin one; refuse a call that finds no place there."""
        # The answers to other calls can be large, so these two have a connection of their own.
        is_small = isinstance(pending.call, (EndCall, PrepareCall))
        key = (owner.incarnation, owner.url, is_small)
        now = asyncio.get_running_loop().time()
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = _Link(key, owner, now)
            task = asyncio.create_task(self._run(link))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif len(link.calls) >= _MANY and now - link.last_heard > _SILENT_S:
            # The owner hangs: more calls to it would take the places of calls that other owners can answer.
            raise ShardUnavailableError("the owner of the shard does not answer now: try again")
        size = link.calls_bytes + len(pending.body)
        if len(link.calls) >= self._limits.max_waiting_of_one or size > self._limits.max_waiting_bytes_of_one:
            raise OverloadedError(f"{len(link.calls)} calls already wait for the owner of the shard: try again later")
        return link

    # --- one connection

    async def _run(self, link: _Link) -> None:
        """Open a connection, use it until it ends, and fail the calls that have no answer then."""
        owner, socket, detail = link.owner, None, "the connection was closed"
        kind = {"owner": owner.url, "incarnation": owner.incarnation}
        try:
            kind["owner"] = _address(owner)
            async with asyncio.timeout(_HANDSHAKE_S):
                socket = await self._connect(owner)
            link.last_heard = asyncio.get_running_loop().time()
            both = {asyncio.create_task(work(link, socket)) for work in (self._read, self._write)}
            try:
                for task in (await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED))[0]:
                    task.result()
            finally:
                self._forget(link)
                for task in both:
                    task.cancel()
                await asyncio.gather(*both, return_exceptions=True)
        except _RefusedError as refused:
            detail = str(refused)  # callers do not learn the addresses of instances
            _refuses.note(kind | {"reason": str(refused)})
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            # The error's own text can contain parts of an answer.
            detail = type(error).__name__
            _not_reached.note(kind | {"error": type(error).__name__})
        finally:
            self._forget(link)
            _fail(link, detail)
            if socket is not None:
                await socket.close()

    def _forget(self, link: _Link) -> None:
        """Use a connection for no further call."""
        if self._links.get(link.key) is link:
            del self._links[link.key]

    async def _connect(self, owner: OwnerHint) -> aiohttp.ClientWebSocketResponse:
        *others, last = self._credentials
        for credential in others:
            try:
                return await self._connect_with(owner, credential)
            except _RefusedError as refused:
                if refused.status != HTTPStatus.UNAUTHORIZED:
                    raise
        return await self._connect_with(owner, last)

    async def _connect_with(self, owner: OwnerHint, credential: str) -> aiohttp.ClientWebSocketResponse:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                middlewares=(_accepted_only,),
            )
        headers = {VERSION_HEADER: str(VERSION), TO_HEADER: owner.incarnation, CREDENTIAL_HEADER: credential}
        url = URL(owner.url.rstrip("/") + PATH)
        return await self._session.ws_connect(
            url,
            headers=headers,
            ssl=self._trust(),
            timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
            max_msg_size=self._limits.max_answer_bytes,
        )

    async def _write(self, link: _Link, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Send the calls; return if there has been none for a while."""
        while True:
            try:
                async with asyncio.timeout(_IDLE_S):
                    call = await link.unsent.get()
            except TimeoutError:
                if link.calls:
                    continue
                self._forget(link)
                return
            await asyncio.sleep(0)  # until all calls of this turn of the event loop are there
            bodies: list[bytes] = []
            left = self._limits.max_message_bytes
            while True:
                if not call.answer.done():  # else no caller waits for it any more
                    call.sent = True
                    bodies.append(call.body)
                    left -= len(call.body)
                if link.unsent.empty() or left <= 0 or len(bodies) >= self._limits.max_calls:
                    break
                call = link.unsent.get_nowait()
            await socket.send_bytes(encode_message(bodies))

    async def _read(self, link: _Link, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Pass the answers on; return at the end of the connection."""
        loop = asyncio.get_running_loop()
        while True:
            message = await socket.receive(_LOST_S)
            if message.type is not WSMsgType.BINARY:
                if message.type is WSMsgType.CLOSE and (taken := message.extra or "").isdecimal():
                    link.taken = int(taken)
                return
            link.last_heard = loop.time()
            for frame in decode_answers(message.data):
                pending = link.calls.get(frame.number)
                if pending is not None and not pending.answer.done():
                    _answer_call(pending, frame)


class _RefusedError(Exception):
    """The owner, or what answers at its address, refuses the connection."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"status {status} {reason if reason.isidentifier() else ''}".rstrip())
        self.status = status


async def _accepted_only(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Raise an error for any answer but the acceptance: a redirect would be followed, with the credential."""
    response = await handler(request)
    if response.status != HTTPStatus.SWITCHING_PROTOCOLS:
        reason = response.headers.get(REFUSAL_HEADER, "")[:40]
        response.close()
        raise _RefusedError(response.status, reason)
    return response


def _answer_call(pending: _PendingCall, frame: Any) -> None:
    try:
        pending.answer.set_result(decode_result(pending.call, frame))
    except HalfwayError as error:
        pending.answer.set_exception(error)
    except ValueError:
        # Perhaps the owner has a newer release: the call was done or may have been.
        pending.answer.set_exception(PeerLostError("this release cannot read its answer"))


def _fail(link: _Link, detail: str) -> None:
    """Report for each call without an answer whether it may be done."""
    for pending in link.calls.values():
        if not pending.answer.done():
            pending.answer.set_exception(_no_answer(link, pending, detail))


def _no_answer(link: _Link, pending: _PendingCall, detail: str) -> HalfwayError:
    if pending.sent and (link.taken is None or pending.number <= link.taken):
        return PeerLostError(detail)
    return ShardUnavailableError(f"the owner of the shard could not be called ({detail}): try again")


def _address(owner: OwnerHint) -> str:
    url = URL(owner.url)
    return f"{url.host}:{url.port}"
