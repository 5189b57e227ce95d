"""Asks a producer service what became of a transaction (docs/protocol.md#scan-and-check-back)."""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from ipaddress import ip_address
from types import SimpleNamespace, TracebackType
from typing import Self

import aiohttp
import structlog
from aiohttp.connector import AddrInfoType
from yarl import URL

from halfway.checkback import question
from halfway.checkback.connections import TURN, LineConnector, Question, TooMuchError, Turn
from halfway.checkback.resolver import PoolResolver
from halfway.checkback.rules import AnyAddress, UrlRule
from halfway.checkback.verdict import NotAVerdictError, NotBoundError, is_json, read_verdict
from halfway.domain.records import Group
from halfway.domain.transaction import Outcome
from halfway.service.ports import CheckReply, CheckRequest

MAX_DETAIL = 500
MAX_REPLY_BYTES = 64 * 1024
CONNECTIONS_PER_ADDRESS = 64
"""Of one group: above what the service lets one group have in flight."""
KEEPALIVE_S = 15.0
_NONCE_BYTES = 16
ADDRESS_REFUSED = "the operator does not allow the address that the host name has (HALFWAY_CHECK_NETWORKS)"

_log = structlog.get_logger(__name__)


class AddressRefusedError(OSError):
    """The operator does not allow connections to that address."""


@dataclass(slots=True)
class _Attempt:
    """What became of one request to one endpoint."""

    sent: bool = False
    queued: bool = False
    reachable: bool = True
    outcome: Outcome | None = None
    remark: str | None = None
    detail: str = ""
    again: bool = False
    """Whether a kept connection is to blame, so that a new one may bring the answer."""


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
        urls: UrlRule | None = None,
        ssl_context: ssl.SSLContext | None = None,
        proxy: str | None = None,
    ) -> None:
        """Open nothing yet. `timeout_s` bounds one whole call, over all its endpoints.

        With `demand_nonce` nothing is a verdict that does not echo the question's nonce.
        `ssl_context` replaces the system's certificate authorities; `proxy` is the URL of an HTTP proxy.
        """
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._max_connections = max_connections
        self._demand_nonce = demand_nonce
        self._urls = urls or AnyAddress()
        self._ssl_context = ssl_context
        self._proxy = proxy
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

    def refusal(self, url: str) -> str | None:
        """Return why the operator's rules refuse an endpoint, None if they do not."""
        try:
            return self._urls.refusal(URL(url))
        except ValueError:
            return "the URL cannot be read"

    async def call(self, group: Group, urls: Sequence[str], request: CheckRequest) -> CheckReply:
        """Ask the endpoints in the order given, one at each host and port, until one gives a verdict.

        `unknown`, said so, is one.

        One deadline holds for all of them: each may use an equal share of the time that is left, so that one that
        hangs does not keep the next from being asked. Never raises.
        """
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        attempts: list[_Attempt] = []
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
            attempts.append(_Attempt(detail=f"halfway could not ask: {type(error).__name__}"))
        return _reply(attempts)

    def _one_for_each_host(self, urls: Sequence[str]) -> Sequence[str]:
        """Return the first URL of each host and port that may be called, and those that may not, to say so."""
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
                resolver=PoolResolver(),
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
                trace_configs=[_tracing()],
            )
        return self._session

    def _socket(self, address: AddrInfoType) -> socket.socket:
        family, kind, protocol, _, name = address
        if not self._urls.allows(ip_address(str(name[0]).partition("%")[0])):
            raise AddressRefusedError(ADDRESS_REFUSED)
        return socket.socket(family, kind, protocol)

    async def _ask(self, session: aiohttp.ClientSession, url: str, request: CheckRequest, deadline: float) -> _Attempt:
        """Ask one endpoint; once more, on a new connection, if a kept one gave no answer or another question's."""
        refusal = self.refusal(url)
        if refusal is not None:
            return _Attempt(reachable=False, detail=refusal)
        target = URL(url)
        attempt = await self._post(session, target, request, deadline, fresh=False)
        if attempt.again:
            attempt = await self._post(session, target, request, deadline, fresh=True)
        place = f"{target.host}:{target.port}"
        attempt.detail = f"{place}: {attempt.detail}" if attempt.detail else f"{place} answered"
        return attempt

    async def _post(
        self, session: aiohttp.ClientSession, url: URL, request: CheckRequest, deadline: float, *, fresh: bool
    ) -> _Attempt:
        attempt = _Attempt()
        nonce = secrets.token_urlsafe(_NONCE_BYTES)
        body = question.encode(request, nonce)
        headers = _headers(request.check_id)
        turn = Turn(request.group, fresh)
        TURN.set(turn)
        try:
            async with (
                asyncio.timeout_at(deadline),
                # As a stream it is sent in pieces; large bytes would hold up the loop.
                session.post(
                    url,
                    data=BytesIO(body),
                    headers=headers,
                    allow_redirects=False,
                    trace_request_ctx=attempt,
                ) as response,
            ):
                try:
                    attempt.outcome, attempt.remark = await self._verdict(response, turn, nonce)
                finally:
                    turn.end(response)
        except NotAVerdictError as error:
            attempt.detail = str(error)
            attempt.again = turn.reused and isinstance(error, NotBoundError)
        except TimeoutError:
            _timed_out(attempt)
        except aiohttp.ClientError as error:
            _failed(attempt, error, turn)
        except Exception as error:  # noqa: BLE001 - what one endpoint provokes must not keep the next from being asked
            _log.warning("check_request_failed", host=url.host, error=type(error).__name__)
            attempt.detail = f"the request failed: {type(error).__name__}"
        return attempt

    async def _verdict(self, response: aiohttp.ClientResponse, turn: Turn, nonce: str) -> tuple[Outcome, str | None]:
        """Return the verdict of an answer to this very question.

        An answer that echoes the nonce is bound to it. Any other counts only on a connection that carries no other
        question, if it came after the question and from no cache.
        """
        verdict = read_verdict(await self._read(response), nonce)
        if verdict.bound:
            turn.prove()
        elif turn.reused:
            raise NotBoundError("the answer on a kept connection does not echo the nonce")
        elif self._demand_nonce:
            raise NotBoundError("the answer does not echo the nonce (HALFWAY_CHECK_DEMAND_NONCE)")
        elif turn.is_out_of_turn:
            raise NotBoundError("the answer does not echo the nonce and came before the question was sent whole")
        elif "age" in response.headers:
            raise NotBoundError("the answer does not echo the nonce and comes from a cache")
        return verdict.outcome, verdict.remark

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body of an answer that may hold a verdict, and stop reading if it cannot."""
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


def _timed_out(attempt: _Attempt) -> None:
    if attempt.sent:
        attempt.reachable, attempt.detail = False, "no whole answer in time"
    elif attempt.queued:
        # The endpoint was not even tried: that it cannot be reached is not known.
        attempt.detail = "no connection was free in time"
    else:
        attempt.reachable, attempt.detail = False, "no connection in time"


def _failed(attempt: _Attempt, error: aiohttp.ClientError, turn: Turn) -> None:
    """Say what went wrong without the error's own text, which can hold the URL or parts of the answer."""
    match error:
        case aiohttp.ClientConnectorDNSError():
            attempt.reachable, attempt.detail = False, "the host name was not found"
        case aiohttp.ClientConnectorCertificateError():
            attempt.reachable, attempt.detail = False, "the TLS certificate is not valid"
        case aiohttp.ClientSSLError():
            attempt.reachable, attempt.detail = False, "TLS failed"
        case aiohttp.ClientConnectorError() if isinstance(error.os_error, AddressRefusedError):
            attempt.reachable, attempt.detail = False, ADDRESS_REFUSED
        case aiohttp.ClientConnectorError():
            attempt.reachable, attempt.detail = False, "the connection was refused"
        case aiohttp.InvalidURL():
            attempt.reachable, attempt.detail = False, "the URL cannot be read"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError():
            attempt.again = turn.reused
            attempt.detail = "the connection was closed without an answer"
        case aiohttp.ClientPayloadError():
            attempt.detail = "the body was cut short"
        case TooMuchError():
            attempt.detail = "more came than an answer may have"
        case _:
            attempt.detail = "the answer is not HTTP"


def _reply(attempts: Sequence[_Attempt]) -> CheckReply:
    last = attempts[-1] if attempts else _Attempt(reachable=False, detail="the group has no endpoint")
    detail = "; ".join(attempt.detail for attempt in attempts) if last.outcome is None and attempts else last.detail
    return CheckReply(
        outcome=last.outcome or Outcome.UNKNOWN,
        sent=any(attempt.sent for attempt in attempts),
        answered=last.outcome is not None,
        reachable=last.reachable or any(attempt.reachable for attempt in attempts),
        detail=detail[:MAX_DETAIL],
        remark=last.remark,
    )


def _tracing() -> aiohttp.TraceConfig:
    """Note in an attempt how far its request came."""
    config = aiohttp.TraceConfig()

    async def queued(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.queued = True

    async def dequeued(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.queued = False

    async def sent(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.sent = True

    config.on_connection_queued_start.append(queued)
    config.on_connection_queued_end.append(dequeued)
    config.on_request_headers_sent.append(sent)
    return config


def _headers(check_id: str) -> Mapping[str, str]:
    return {
        "content-type": "application/json",
        "accept": "application/json",
        "accept-encoding": "identity",
        "user-agent": "halfway",
        "webhook-id": check_id,
        "webhook-timestamp": str(int(time.time())),
    }
