"""Asks a producer service what became of a transaction (docs/protocol.md#scan-and-check-back)."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from ipaddress import ip_address
from secrets import token_urlsafe
from types import TracebackType
from typing import Self

import aiohttp
import structlog
from aiohttp.connector import AddrInfoType
from yarl import URL

from halfway.checkback import question
from halfway.checkback.attempt import Attempt, failed, host_of, reply_of, timed_out, tracing
from halfway.checkback.connections import EXCHANGE, Exchange, LineConnector, Question
from halfway.checkback.destinations import Destinations
from halfway.checkback.dns import DnsResolver
from halfway.checkback.signing import signed_headers
from halfway.checkback.verdict import NotAVerdictError, NotBoundError, is_json, read_verdict
from halfway.domain.records import Group
from halfway.domain.transaction import Outcome
from halfway.service.check_ports import CheckReply, CheckRequest

MAX_EXCERPT_BYTES = 512
_EXCERPT_S = 0.2
"""How long the body of an answer that is no verdict is waited for."""
MAX_REPLY_BYTES = 64 * 1024
CONNECTIONS_PER_ADDRESS = 64
"""Of one group: above what the service lets one group have in flight."""
KEEPALIVE_S = 15.0
_NONCE_BYTES = 16
_WHOLE_BYTES = 64 * 1024
"""Up to this a question is sent in one piece, which costs less."""
_HEADERS: Mapping[str, str] = {
    "content-type": "application/json",
    "accept": "application/json",
    "accept-encoding": "identity",
    "user-agent": "halfway",
}

_log = structlog.get_logger(__name__)


class AddressRefusedError(OSError):
    """The operator does not allow connections to that address."""


class HttpCheckCaller:
    """The port `CheckCaller` over HTTP.

    Nothing but a verdict in time is taken for one: redirects are not followed, compressed bodies not unpacked, cookies
    not kept, and proxies and credentials of the environment not used. Times are seconds, sizes bytes.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 10.0,
        connect_timeout_s: float = 3.0,
        max_connections: int = 1024,
        demand_nonce: bool = False,
        secrets_of: Callable[[str], Sequence[bytes]] | None = None,
        destinations: Destinations | None = None,
        ssl_context: ssl.SSLContext | None = None,
        proxy: str | None = None,
    ) -> None:
        """Open nothing yet. `timeout_s` bounds one whole call, over all its endpoints.

        With `demand_nonce` nothing is a verdict that does not echo the question's nonce.
        `secrets_of` returns what the checks of a group are signed with.
        `ssl_context` replaces the system's certificate authorities; `proxy` is the URL of an HTTP proxy.
        """
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._max_connections = max_connections
        self._demand_nonce = demand_nonce
        self._secrets_of = secrets_of
        self._destinations = destinations or Destinations()
        self._ssl_context = ssl_context
        self._proxy = proxy
        self._resolver = DnsResolver()
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; a call that is still waiting, or comes later, is answered unknown."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
        await self._resolver.close()

    def refusal(self, url: str) -> str | None:
        """Return why the operator's rules refuse an endpoint, None if they do not."""
        return self._destinations.refusal(url)

    async def call(self, group: Group, urls: Sequence[str], request: CheckRequest) -> CheckReply:
        """Call the endpoints in the order given, one at each host and port, until one gives a verdict.

        `unknown`, said so, is one.

        One deadline holds for all of them: each may use an equal share of the time that is left, so that one that
        hangs does not keep the next from being asked. Never raises.
        """
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        attempts: list[Attempt] = []
        try:
            session = self._open()
            urls = self._one_for_each_host(urls)
            for position, url in enumerate(urls):
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    break
                share = deadline - left + left / (len(urls) - position)
                attempts.append(await self._ask(session, url, request, share))
                if attempts[-1].outcome is not None:
                    break
        except Exception as error:  # noqa: BLE001 - whatever goes wrong here must not stop the scan
            _log.warning("check_failed", group=group.name, transaction=request.id, error=type(error).__name__)
            attempts.append(Attempt(detail=f"halfway could not ask: {type(error).__name__}"))
        return reply_of(attempts)

    def _one_for_each_host(self, urls: Sequence[str]) -> Sequence[str]:
        """Return the first permitted URL of each host and port, and every refused one: its refusal is reported."""
        if len(urls) == 1:
            return urls
        chosen: dict[str, str] = {}
        for url in urls:
            chosen.setdefault(url if self.refusal(url) is not None else URL(url).authority, url)
        return tuple(chosen.values())

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise RuntimeError("the caller is closed")
        if self._session is None:
            connector = LineConnector(
                most_kept=self._max_connections // 2,
                limit=self._max_connections,
                limit_per_host=CONNECTIONS_PER_ADDRESS,
                keepalive_timeout=KEEPALIVE_S,
                resolver=self._resolver,
                use_dns_cache=False,  # aiohttp's is shared by all groups, and so are its look-ups under way
                ssl=self._ssl_context or True,
                socket_factory=self._socket,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                request_class=Question,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
                read_bufsize=MAX_REPLY_BYTES,
                proxy=self._proxy,
                # The time of a whole attempt is bounded by its deadline, in `_ask`.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
                trace_configs=[tracing()],
            )
        return self._session

    def _socket(self, address: AddrInfoType) -> socket.socket:
        family, kind, protocol, _, name = address
        exchange = EXCHANGE.get()
        if self._proxy is None:  # whose own address the operator chose
            refusal = self._destinations.refusal(exchange.url, ip_address(str(name[0]).partition("%")[0]))
            if refusal is not None:
                exchange.refusal = refusal
                raise AddressRefusedError(refusal)
        return socket.socket(family, kind, protocol)

    async def _ask(self, session: aiohttp.ClientSession, url: str, request: CheckRequest, deadline: float) -> Attempt:
        """Call one endpoint; again, on a new connection, if a reused one gave no answer or that of another question."""
        host = host_of(url)
        refusal = self.refusal(url)
        if refusal is not None:
            return Attempt(reachable=False, detail=refusal, host=host)
        target = URL(url)
        began = asyncio.get_running_loop().time()
        attempt = await self._post(session, target, request, deadline, fresh=False)
        if attempt.again:
            attempt = await self._post(session, target, request, deadline, fresh=True)
        attempt.host, attempt.duration_s = host, asyncio.get_running_loop().time() - began
        place = f"{target.host}:{target.port}"
        attempt.detail = f"{place}: {attempt.detail}" if attempt.detail else f"{place} answered"
        return attempt

    async def _post(
        self, session: aiohttp.ClientSession, url: URL, request: CheckRequest, deadline: float, *, fresh: bool
    ) -> Attempt:
        attempt = Attempt()
        nonce = token_urlsafe(_NONCE_BYTES)
        body = question.encode(request, nonce)
        secrets = () if self._secrets_of is None else self._secrets_of(request.group)
        headers = {**_HEADERS, **signed_headers(request.check_id, body, secrets)}
        exchange = Exchange(url, request.group, fresh)
        EXCHANGE.set(exchange)
        try:
            async with (
                asyncio.timeout_at(deadline),
                session.post(
                    url,
                    # A stream is sent in pieces: one large bytes object would block the event loop.
                    data=body if len(body) <= _WHOLE_BYTES else BytesIO(body),
                    headers=headers,
                    allow_redirects=False,
                    trace_request_ctx=attempt,
                ) as response,
            ):
                try:
                    attempt.outcome, attempt.remark = await self._verdict(response, exchange, nonce, attempt)
                finally:
                    exchange.end(response)
        except NotAVerdictError as error:
            attempt.detail = str(error)
            attempt.again = exchange.reused and isinstance(error, NotBoundError)
        except TimeoutError:
            timed_out(attempt, exchange)
        except aiohttp.ClientError as error:
            failed(attempt, error, exchange)
        except Exception as error:  # noqa: BLE001 - what one endpoint provokes must not keep the next from being asked
            _log.warning("check_request_failed", host=url.host, error=type(error).__name__)
            attempt.detail = f"the request failed: {type(error).__name__}"
        return attempt

    async def _verdict(
        self, response: aiohttp.ClientResponse, exchange: Exchange, nonce: str, attempt: Attempt
    ) -> tuple[Outcome, str | None]:
        """Return the verdict of the answer to this question.

        An answer that echoes the nonce is bound to it. Any other counts only on a connection that carries no other
        question, if it came after the question and from no cache.
        """
        attempt.status = response.status
        try:
            body = await self._read(response)
        except NotAVerdictError:
            attempt.excerpt = await _beginning(response)
            raise
        attempt.excerpt = _excerpt(body)
        verdict = read_verdict(body, nonce)
        if verdict.bound:
            exchange.prove()
        elif exchange.reused:
            raise NotBoundError("the answer on a kept connection does not echo the nonce")
        elif self._demand_nonce:
            raise NotBoundError("the answer does not echo the nonce (HALFWAY_CHECK_DEMAND_NONCE)")
        elif exchange.has_unsolicited_bytes:
            raise NotBoundError("the answer does not echo the nonce and came before the question was sent whole")
        elif "age" in response.headers:
            raise NotBoundError("the answer does not echo the nonce and comes from a cache")
        return verdict.outcome, verdict.remark

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body of an answer; stop reading if it cannot hold a verdict."""
        if response.status != 200:  # noqa: PLR2004 - the one status that answers
            raise NotAVerdictError(f"status {response.status}, not 200")
        if not is_json(response.content_type):
            raise NotAVerdictError("the content type is not JSON")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise NotAVerdictError("the body is compressed, which was not asked for")
        too_large = NotAVerdictError(f"the body is larger than {MAX_REPLY_BYTES} bytes")
        if (response.content_length or 0) > MAX_REPLY_BYTES:
            raise too_large
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > MAX_REPLY_BYTES:
                raise too_large
        return bytes(body)


async def _beginning(response: aiohttp.ClientResponse) -> str | None:
    """Return the beginning of a body that is no verdict, if it is there or comes at once.

    The connection is not used again, as if nothing of the body had been read.
    """
    if response.content.at_eof():
        return None
    try:
        async with asyncio.timeout(_EXCERPT_S):
            return _excerpt(await response.content.read(MAX_EXCERPT_BYTES))
    except (TimeoutError, aiohttp.ClientError):
        return None
    finally:
        response.close()


def _excerpt(body: bytes) -> str | None:
    return body[:MAX_EXCERPT_BYTES].decode("utf-8", "replace") if body else None
