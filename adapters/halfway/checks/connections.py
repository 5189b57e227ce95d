"""Connections to check endpoints, and the look-ups of their names.

A connection is reused only if it carried nothing except the answer to its last request. Look-ups have their own
threads, so that a name server that hangs delays only the checks of one group.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections import Counter
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from itertools import chain
from typing import Any, Final, TypeAlias, cast

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.http import RawResponseMessage
from aiohttp.http_parser import HttpParser
from aiohttp.streams import StreamReader
from yarl import URL

from halfway.coordinator.tls import TlsWatch

MAX_RECEIVED_BYTES = 1024 * 1024
"""The largest answer with framing: the largest verdict, and the most headers that are read."""
MAX_CHUNKS = 256
"""The most chunks of an answer: each takes 8 us, however small it is."""
MAX_INTERIM = 16
"""The most interim answers (1xx) to one request."""
_SLICE_BYTES = 4 * 1024
"""Bytes that are parsed at a time, so that at most a few hundred messages or chunks exist before they are counted."""


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
        self._chunks = 0
        self._refused = False
        self._tls: TlsWatch | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._open.add(self)
        if self.is_encrypted():
            self._tls = TlsWatch(cast("asyncio.Transport", transport), "check endpoint")
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Fail an incomplete answer: aiohttp forgets its body if the framing is broken."""
        self._open.discard(self)
        if self._tls is not None:
            self._tls.stop()
        super().connection_lost(exc)
        answer = self._answer
        if answer is not None and not answer.is_eof() and answer.exception() is None:
            answer.set_exception(aiohttp.ClientPayloadError("the answer ended early"))

    def close(self) -> None:
        """Close the connection, with TLS at once: a normal close waits up to 30 s for the endpoint to close as well."""
        if self.is_encrypted():
            self.abort()
        else:
            super().close()

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
        self._received = self._interim = self._chunks = 0
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
        if self._tls is not None:
            self._tls.note(len(data))
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
        before = _unread_chunks(self._answer)
        super().data_received(data)
        self._chunks += max(0, _unread_chunks(self._answer) - before)
        if self._chunks > MAX_CHUNKS:
            self._refuse()
        elif self._parser is not None and self._answer is not None and self._answer.is_eof():
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


def _unread_chunks(answer: StreamReader | None) -> int:
    return len((answer and answer._http_chunk_splits) or ())  # noqa: SLF001 - aiohttp tells nobody


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


LOOKUP_THREADS: Final = 256
"""A look-up that hangs occupies its thread for seconds. The event loop's own pool has as few as 5 threads."""
LOOKUPS_PER_GROUP: Final = 16
"""The most look-ups of one group at a time, abandoned ones included; more than a group may have endpoints."""
MAX_ADDRESSES: Final = 8
"""The most addresses of a name in each family: a check tries them all, and those that are left again after each."""
CACHE_S: Final = 10.0
"""How long an answer is cached."""

_Query: TypeAlias = tuple[str, str, int, int]
"""A group, and the host, port and address family that it looks up."""


class LookUp:
    """One look-up on a thread, shared by all checks of its group that need the name in the meantime."""

    def __init__(self) -> None:
        """Create a look-up that waits for a thread."""
        self.has_begun = False
        """Whether it runs on a thread."""
        self.waiting = 0
        """How many checks wait for it."""
        self.done = asyncio.get_running_loop().create_future()
        self.job: Future[list[ResolveResult]] = Future()

    def run(self, host: str, port: int, family: int) -> list[ResolveResult]:
        """Look the name up; called on a thread."""
        self.has_begun = True
        return _look_up(host, port, family)


class DnsResolver(AbstractResolver):
    """Runs `getaddrinfo` on a bounded pool of its own; each group may use only a part of the pool.

    Groups share no look-ups and no answers, so a group that has used up its part fails only its own checks.
    """

    def __init__(self, threads: int = LOOKUP_THREADS) -> None:
        """Create the pool; threads start on demand."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="halfway-dns")
        self._under_way: dict[_Query, LookUp] = {}
        self._count_by_group: Counter[str] = Counter()
        self._cache: dict[_Query, tuple[float, list[ResolveResult]]] = {}
        """Cached answers and when they expire, the oldest first."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of a host for the exchange under way; OSError if there are none."""
        exchange = EXCHANGE.get()
        name = (exchange.group, host, port, int(family))
        cached = self._cache.get(name)
        if cached is not None and asyncio.get_running_loop().time() < cached[0]:
            cached[1].append(cached[1].pop(0))  # round robin over the addresses
            return list(cached[1])
        if name not in self._under_way and self._count_by_group[exchange.group] >= LOOKUPS_PER_GROUP:
            exchange.refusal = (
                f"{LOOKUPS_PER_GROUP} look-ups of this group are under way already: the name servers of its endpoints "
                "do not answer"
            )
            raise OSError(exchange.refusal)
        exchange.look_up = look_up = self._under_way.get(name) or self._begin(name)
        look_up.waiting += 1
        try:
            await asyncio.shield(look_up.done)
        finally:
            look_up.waiting -= 1
            if not look_up.waiting:
                look_up.job.cancel()  # if it has no thread yet
        exchange.look_up = None
        try:
            return list(look_up.job.result())
        except UnicodeError:
            raise OSError("this cannot be a host name") from None
        except CancelledError:
            raise OSError("halfway is stopped") from None

    def _begin(self, name: _Query) -> LookUp:
        group, host, port, family = name
        loop = asyncio.get_running_loop()
        look_up = LookUp()

        def on_done(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, name, look_up)

        look_up.job = self._pool.submit(look_up.run, host, port, family)
        self._under_way[name] = look_up
        self._count_by_group[group] += 1
        look_up.job.add_done_callback(on_done)
        return look_up

    def _end(self, name: _Query, look_up: LookUp) -> None:
        """Free the group's place, cache the answer, and wake the waiting checks."""
        if self._under_way.get(name) is look_up:
            del self._under_way[name]
        self._count_by_group[name[0]] -= 1
        if not self._count_by_group[name[0]]:
            del self._count_by_group[name[0]]
        if not look_up.job.cancelled() and look_up.job.exception() is None:
            self._store(name, look_up.job.result())
        look_up.done.set_result(None)

    def _store(self, name: _Query, addresses: list[ResolveResult]) -> None:
        now = asyncio.get_running_loop().time()
        while self._cache and (oldest := next(iter(self._cache.items())))[1][0] <= now:
            del self._cache[oldest[0]]
        self._cache.pop(name, None)
        if addresses:
            self._cache[name] = now + CACHE_S, list(addresses)

    async def close(self) -> None:
        """Cancel waiting look-ups; those under way end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str, port: int, family: int) -> list[ResolveResult]:
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family)
    families = {family: [each for each in found if each[0] == family][:MAX_ADDRESSES] for family, *_ in found}
    return [
        ResolveResult(
            hostname=host,
            # The scope of a link-local IPv6 address must be cached, and only getnameinfo writes it.
            host=socket.getnameinfo(address, numeric)[0],
            port=port,
            family=family_found,
            proto=protocol,
            flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
        )
        for family_found, _, protocol, _, address in chain.from_iterable(families.values())
    ]
