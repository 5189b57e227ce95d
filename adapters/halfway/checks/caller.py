"""Requests the outcome of a transaction from a producer service (docs/protocol.md#scan-and-check-back).

A check is signed as in Standard Webhooks, and its answer is read strictly (docs/api.md#answer-a-check).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import socket
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from ipaddress import ip_address
from secrets import token_urlsafe
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, NoReturn, Self

import aiohttp
import msgspec
import structlog
from aiohttp.connector import AddrInfoType
from yarl import URL

from halfway.checks.connections import (
    EXCHANGE,
    AnswerTooLargeError,
    CheckConnector,
    DnsResolver,
    Exchange,
    GroupRequest,
)
from halfway.checks.destinations import Destinations
from halfway.coordinator.logging import LogSummary
from halfway.coordinator.ports import CheckAttempt, CheckReply, CheckRequest
from halfway.coordinator.tls import Trust, bound_receive_buffer
from halfway.protocol.records import MAX_REMARK_BYTES, Group, rfc3339, shown_message
from halfway.protocol.transactions import Outcome

_JSON = msgspec.json.Encoder()


def encode(request: CheckRequest, nonce: str) -> bytes:
    """Return the JSON of one check; its answer echoes `nonce`. `prepared_at` is RFC 3339 with milliseconds."""
    return _JSON.encode(
        {
            "type": "transaction.check",
            "nonce": nonce,
            "id": request.id,
            "group": request.group,
            "prepared_at": rfc3339(request.prepared_at),
            "attempt": request.attempt,
            "messages": [shown_message(message) for message in request.messages],
        }
    )


MAX_DETAIL = 500


@dataclass(slots=True)
class Attempt:
    """The result of one request to one endpoint."""

    sent: bool = False
    queued: bool = False
    reachable: bool = True
    outcome: Outcome | None = None
    remark: str | None = None
    detail: str = ""
    host: str = ""
    status: int | None = None
    duration_s: float = 0.0
    retry_on_new_connection: bool = False
    """Whether a reused connection may be the cause, so that a new one should be tried."""


def host_of(url: str) -> str:
    """Return the scheme, host and port of a URL, without the parts that may be secret."""
    try:
        return str(URL(url).origin())
    except ValueError:
        return ""


def record_timeout(attempt: Attempt, exchange: Exchange) -> None:
    """Record how far a request got before its time-out."""
    if attempt.sent:
        attempt.reachable, attempt.detail = False, "no whole answer in time"
    elif attempt.queued:
        # The endpoint was not tried, so nothing is known about whether it can be reached.
        attempt.detail = "no connection was free in time"
    elif exchange.look_up is not None and not exchange.look_up.has_begun:
        attempt.detail = "no look-up of the host name was free in time: those of other groups hang"
    elif exchange.look_up is not None:
        attempt.reachable, attempt.detail = False, "the host name was not found in time"
    else:
        attempt.reachable, attempt.detail = False, "no connection in time"


def record_failure(attempt: Attempt, error: aiohttp.ClientError, exchange: Exchange) -> None:
    """Record a failure without the error's own text, which can contain the URL or parts of the answer."""
    match error:
        case aiohttp.ClientConnectorDNSError():
            attempt.reachable, attempt.detail = False, exchange.refusal or "the host name was not found"
        case aiohttp.ClientConnectorCertificateError():
            attempt.reachable, attempt.detail = False, "the TLS certificate is not valid"
        case aiohttp.ClientSSLError():
            attempt.reachable, attempt.detail = False, "TLS failed"
        case aiohttp.ClientConnectorError():
            attempt.reachable, attempt.detail = False, exchange.refusal or "the connection was refused"
        case aiohttp.InvalidURL():
            attempt.reachable, attempt.detail = False, "the URL cannot be read"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError():
            attempt.retry_on_new_connection = exchange.reused
            attempt.detail = "the connection was closed without an answer"
        case aiohttp.ClientPayloadError():
            attempt.detail = "the body was cut short"
        case AnswerTooLargeError():
            attempt.detail = "more came than an answer may have"
        case _:
            attempt.detail = "the answer is not HTTP"


def to_reply(attempts: Sequence[Attempt]) -> CheckReply:
    last = attempts[-1] if attempts else Attempt(reachable=False, detail="the group has no endpoint")
    detail = "; ".join(attempt.detail for attempt in attempts) if last.outcome is None and attempts else last.detail
    return CheckReply(
        outcome=last.outcome or Outcome.UNKNOWN,
        sent=any(attempt.sent for attempt in attempts),
        answered=last.outcome is not None,
        reachable=last.reachable or any(attempt.reachable for attempt in attempts),
        detail=detail[:MAX_DETAIL],
        remark=last.remark,
        attempts=tuple(
            CheckAttempt(
                host=attempt.host,
                sent=attempt.sent,
                answered=attempt.outcome is not None,
                status=attempt.status,
                detail=attempt.detail[:MAX_DETAIL],
                duration_s=attempt.duration_s,
            )
            for attempt in attempts
            if attempt.host
        ),
    )


def trace_config() -> aiohttp.TraceConfig:
    """Return a trace configuration that records in an attempt how far its request got."""
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


_VERSION: Final = "v1,"


def signed_headers(check_id: str, body: bytes, secrets: Sequence[bytes]) -> Mapping[str, str]:
    """Return the headers of one request: the id of its check, the time, and one signature per secret, if any."""
    timestamp = str(int(time.time()))
    headers = {"webhook-id": check_id, "webhook-timestamp": timestamp}
    if secrets:
        content = f"{check_id}.{timestamp}.".encode() + body
        headers["webhook-signature"] = " ".join(signature(secret, content) for secret in secrets)
    return headers


def signature(secret: bytes, content: bytes) -> str:
    """Return `v1,` and the HMAC-SHA-256 of the signed content."""
    return _VERSION + b64encode(hmac.digest(secret, content, hashlib.sha256)).decode("ascii")


_OUTCOMES: Final = frozenset(Outcome)


class NotAVerdictError(Exception):
    """The answer is not a verdict. The message is the reason, and contains no part of the answer."""


class NotBoundError(NotAVerdictError):
    """The answer may belong to another request."""


def is_json(content_type: str) -> bool:
    """Return whether a media type (lower case, without parameters) is JSON."""
    return content_type == "application/json" or (
        content_type.startswith("application/") and content_type.endswith("+json")
    )


class Verdict(NamedTuple):
    """The content of an answer's body; the remark is cut to 1 KiB."""

    outcome: Outcome
    remark: str | None
    bound: bool
    """Whether the body echoes the nonce of the request, which binds the answer to it."""


def read_verdict(body: bytes, nonce: str) -> Verdict:
    """Return the verdict in a body.

    The body is one JSON object in UTF-8 with exactly one `outcome`. Other fields are ignored, so that a service can
    send more to its own tools; a remark that is not a string is ignored too. Raises NotAVerdictError: the body is
    anything else, or echoes another nonce.
    """
    try:
        answer = _DECODER.decode(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise NotAVerdictError("the body is not UTF-8") from None
    except RecursionError:
        raise NotAVerdictError("the body is nested too deep") from None
    except ValueError:
        raise NotAVerdictError("the body is not one JSON document") from None
    if not isinstance(answer, dict):
        raise NotAVerdictError("the body is not a JSON object")
    if "outcome" not in answer:
        raise NotAVerdictError("the body has no outcome")
    outcome = answer["outcome"]
    # Compare value and type: `Outcome("commit")` would also accept an object that merely compares equal.
    if not isinstance(outcome, str) or outcome not in _OUTCOMES:
        raise NotAVerdictError("the outcome is not commit, rollback or unknown")
    if "nonce" in answer and answer["nonce"] != nonce:
        raise NotBoundError("the nonce is that of another question")
    return Verdict(Outcome(outcome), _remark(answer.get("remark")), "nonce" in answer)


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for field in ("outcome", "nonce"):
        if names.count(field) > 1:
            raise NotAVerdictError(f"the body has more than one {field}")
    return dict(pairs)


def _refuse_constant(name: str) -> NoReturn:
    raise NotAVerdictError(f"the body has {name}, which JSON does not know")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique_fields, parse_constant=_refuse_constant)


def _remark(remark: object) -> str | None:
    if not isinstance(remark, str):
        return None
    return remark.encode("utf-8", "replace")[:MAX_REMARK_BYTES].decode("utf-8", "ignore")


MAX_REPLY_BYTES = 64 * 1024
KEEPALIVE_S = 15.0
_NONCE_BYTES = 16
_ONE_PIECE_BYTES = 64 * 1024
"""A body of up to this size is sent in one piece, which costs less."""
_HEADERS: Mapping[str, str] = {
    "content-type": "application/json",
    "accept": "application/json",
    "accept-encoding": "identity",
    "user-agent": "halfway",
}

_log = structlog.get_logger(__name__)
_failed: Final = LogSummary(_log, "warning", "check_failed")
_request_failed: Final = LogSummary(_log, "warning", "check_request_failed")


class AddressRefusedError(OSError):
    """The operator does not allow connections to this address."""


class HttpCheckCaller:
    """The port `CheckCaller` over HTTP.

    Only an answer that arrives in time and is a verdict counts. Redirects are not followed, compressed bodies are not
    unpacked, cookies are not stored, and proxies and credentials from the environment are not used. Times are in
    seconds, sizes in bytes.
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
        trust: Trust | None = None,
        proxy: str | None = None,
    ) -> None:
        """Keep the settings; no connection is opened yet. `timeout_s` bounds one call over all its endpoints.

        With `demand_nonce` an answer counts only if it echoes the nonce of its request.
        `secrets_of` returns the secrets that sign the checks of a group.
        `trust` gives the context that verifies an endpoint, instead of the system's authorities; `proxy` is the URL of
        an HTTP proxy.
        """
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._max_connections = max_connections
        self._demand_nonce = demand_nonce
        self._secrets_of = secrets_of
        self._destinations = destinations or Destinations()
        self._trust = trust or (lambda: True)
        self._proxy = proxy
        self._resolver = DnsResolver()
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; calls under way and later calls return `unknown`."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
        await self._resolver.close()

    def refusal(self, url: str) -> str | None:
        """Return why the operator's settings refuse an endpoint, None if they allow it."""
        return self._destinations.refusal(url)

    async def reach(self, group: str, url: str) -> Attempt:
        """Send HEAD to an endpoint, to see whether it answers at all; `detail` is empty if it does. Never raises."""
        exchange = Exchange(URL(url), group, fresh=True)
        attempt = Attempt(detail=self.refusal(url) or "", host=host_of(url))
        if attempt.detail:
            return attempt
        EXCHANGE.set(exchange)
        head = partial(self._open().head, url, ssl=self._trust(), allow_redirects=False, trace_request_ctx=attempt)
        try:
            async with asyncio.timeout(self._timeout_s), head() as response:
                attempt.status = response.status
                exchange.end(response)
        except TimeoutError:
            record_timeout(attempt, exchange)
        except aiohttp.ClientError as error:
            record_failure(attempt, error, exchange)
        return attempt

    async def call(self, group: Group, urls: Sequence[str], request: CheckRequest) -> CheckReply:
        """Call the endpoints in the given order, one per host and port, until one returns a verdict.

        An explicit `unknown` is a verdict. One deadline covers all endpoints. Each may use an equal share of the
        remaining time, so that an endpoint that hangs does not keep the next from being called. Never raises.
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
                attempts.append(await self._call_endpoint(session, url, request, share))
                if attempts[-1].outcome is not None:
                    break
        except Exception as error:  # noqa: BLE001 - no error here may stop the scan
            _failed.note({"group": group.name, "error": type(error).__name__}, transaction=request.id)
            attempts.append(Attempt(detail=f"halfway could not send the check: {type(error).__name__}"))
        return to_reply(attempts)

    def _one_for_each_host(self, urls: Sequence[str]) -> Sequence[str]:
        """Return the first permitted URL of each host and port, and every refused URL, whose refusal is reported."""
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
            connector = CheckConnector(
                max_kept=self._max_connections // 2,
                limit=self._max_connections,
                keepalive_timeout=KEEPALIVE_S,
                resolver=self._resolver,
                use_dns_cache=False,  # all groups would share aiohttp's cache and its look-ups under way
                socket_factory=self._socket,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                request_class=GroupRequest,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
                read_bufsize=MAX_REPLY_BYTES,
                proxy=self._proxy,
                # The deadline in `_call_endpoint` bounds a whole attempt.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
                trace_configs=[trace_config()],
            )
        return self._session

    def _socket(self, address: AddrInfoType) -> socket.socket:
        family, kind, protocol, _, name = address
        exchange = EXCHANGE.get()
        if self._proxy is None:  # the operator chose the proxy's address
            refusal = self._destinations.refusal(exchange.url, ip_address(str(name[0]).partition("%")[0]))
            if refusal is not None:
                exchange.refusal = refusal
                raise AddressRefusedError(refusal)
        found = socket.socket(family, kind, protocol)
        if exchange.url.scheme == "https":
            bound_receive_buffer(found)
        return found

    async def _call_endpoint(
        self, session: aiohttp.ClientSession, url: str, request: CheckRequest, deadline: float
    ) -> Attempt:
        """Call one endpoint. Retry on a new connection if a reused one gave no answer or another request's answer."""
        host = host_of(url)
        refusal = self.refusal(url)
        if refusal is not None:
            return Attempt(reachable=False, detail=refusal, host=host)
        target = URL(url)
        started = asyncio.get_running_loop().time()
        attempt = await self._post(session, target, request, deadline, fresh=False)
        if attempt.retry_on_new_connection:
            attempt = await self._post(session, target, request, deadline, fresh=True)
        attempt.host, attempt.duration_s = host, asyncio.get_running_loop().time() - started
        place = f"{target.host}:{target.port}"
        attempt.detail = f"{place}: {attempt.detail}" if attempt.detail else f"{place} answered"
        return attempt

    async def _post(
        self, session: aiohttp.ClientSession, url: URL, request: CheckRequest, deadline: float, *, fresh: bool
    ) -> Attempt:
        attempt = Attempt()
        nonce = token_urlsafe(_NONCE_BYTES)
        body = encode(request, nonce)
        secrets = () if self._secrets_of is None else self._secrets_of(request.group)
        headers = {**request.headers, **_HEADERS, **signed_headers(request.check_id, body, secrets)}
        exchange = Exchange(url, request.group, fresh)
        EXCHANGE.set(exchange)
        try:
            async with (
                asyncio.timeout_at(deadline),
                session.post(
                    url,
                    # A stream is sent in pieces: one large bytes object would block the event loop.
                    data=body if len(body) <= _ONE_PIECE_BYTES else BytesIO(body),
                    headers=headers,
                    ssl=self._trust(),
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
            attempt.retry_on_new_connection = exchange.reused and isinstance(error, NotBoundError)
        except TimeoutError:
            record_timeout(attempt, exchange)
        except aiohttp.ClientError as error:
            record_failure(attempt, error, exchange)
        except Exception as error:  # noqa: BLE001 - an error of one endpoint must not keep the next from being called
            _request_failed.note({"host": url.host, "error": type(error).__name__})
            attempt.detail = f"the request failed: {type(error).__name__}"
        return attempt

    async def _verdict(
        self, response: aiohttp.ClientResponse, exchange: Exchange, nonce: str, attempt: Attempt
    ) -> tuple[Outcome, str | None]:
        """Return the verdict in the answer to this request.

        An answer that echoes the nonce is bound to its request. Any other answer counts only if the connection carries
        no other request, and if it arrived after the request and not from a cache.
        """
        attempt.status = response.status
        body = await self._read(response)
        verdict = read_verdict(body, nonce)
        if verdict.bound:
            exchange.mark_bound()
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
        """Return the body of an answer; NotAVerdictError as soon as it cannot be a verdict."""
        if response.status != 200:  # noqa: PLR2004 - the only status of a verdict
            raise NotAVerdictError(f"status {response.status}, not 200")
        if not is_json(response.content_type):
            raise NotAVerdictError("the content type is not JSON")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise NotAVerdictError("the body is compressed, which was not requested")
        too_large = NotAVerdictError(f"the body is larger than {MAX_REPLY_BYTES} bytes")
        if (response.content_length or 0) > MAX_REPLY_BYTES:
            raise too_large
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > MAX_REPLY_BYTES:
                raise too_large
        return bytes(body)
