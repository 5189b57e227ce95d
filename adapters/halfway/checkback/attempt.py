"""One request to one check endpoint, and how it went; what a whole check comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import aiohttp
from yarl import URL

from halfway.checkback.connections import Exchange, TooMuchError
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
    again: bool = False
    """Whether a reused connection may be the cause, so that a new one is worth a try."""


def host_of(url: str) -> str:
    """Return the scheme, host and port of a URL, without what may be secret in it."""
    try:
        return str(URL(url).origin())
    except ValueError:
        return ""


def timed_out(attempt: Attempt, exchange: Exchange) -> None:
    if attempt.sent:
        attempt.reachable, attempt.detail = False, "no whole answer in time"
    elif attempt.queued:
        # The endpoint was not tried, so nothing is known about whether it can be reached.
        attempt.detail = "no connection was free in time"
    elif exchange.look_up is not None and not exchange.look_up.begun:
        attempt.detail = "no look-up of the host name was free in time: those of other groups hang"
    elif exchange.look_up is not None:
        attempt.reachable, attempt.detail = False, "the host name was not found in time"
    else:
        attempt.reachable, attempt.detail = False, "no connection in time"


def failed(attempt: Attempt, error: aiohttp.ClientError, exchange: Exchange) -> None:
    """Describe a failure without the error's own text, which can hold the URL or parts of the answer."""
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
            attempt.again = exchange.reused
            attempt.detail = "the connection was closed without an answer"
        case aiohttp.ClientPayloadError():
            attempt.detail = "the body was cut short"
        case TooMuchError():
            attempt.detail = "more came than an answer may have"
        case _:
            attempt.detail = "the answer is not HTTP"


def reply_of(attempts: Sequence[Attempt]) -> CheckReply:
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
                host=one.host,
                sent=one.sent,
                answered=one.outcome is not None,
                status=one.status,
                detail=one.detail[:MAX_DETAIL],
                excerpt=one.excerpt,
                duration_s=one.duration_s,
            )
            for one in attempts
            if one.host
        ),
    )


def tracing() -> aiohttp.TraceConfig:
    """Record in an attempt how far its request got."""
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
