"""The result of one request to a check endpoint, and of a whole check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import aiohttp
from yarl import URL

from halfway.checkback.connections import AnswerTooLargeError, Exchange
from halfway.domain.transaction import Outcome
from halfway.service.check_ports import CheckAttempt, CheckReply

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
    excerpt: str | None = None
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
    """Return the result of a check from its attempts."""
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
                excerpt=attempt.excerpt,
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
