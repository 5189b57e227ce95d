"""A check: its body and signed headers, the result of one request and of the whole check, and how a verdict is read.

See docs/rest.md#answer-a-check and docs/rest.md#a-signed-check (as in Standard Webhooks).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, NoReturn

import aiohttp
import msgspec
from yarl import URL

from halfway.checks.connections import AnswerTooLargeError, Exchange
from halfway.coordinator.ports import CheckAttempt, CheckReply, CheckRequest
from halfway.protocol.records import MAX_REMARK_BYTES, rfc3339, shown_message
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
    send more to its own tools; a remark that is not a string is ignored too.

    Raises:
        NotAVerdictError: the body is anything else, or echoes another nonce.

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
