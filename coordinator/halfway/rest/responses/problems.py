"""Errors as problem documents (RFC 9457): one table from each error to its status and title."""

from __future__ import annotations

from math import ceil
from typing import Any, Final

import msgspec

from halfway.domain import errors
from halfway.domain.errors import HalfwayError, RetryableError
from halfway.rest.responses import errors as rest_errors

CONTENT_TYPE: Final = "application/problem+json"

STATUS: Final[dict[type[HalfwayError], tuple[int, str]]] = {
    rest_errors.MalformedJsonError: (400, "Malformed JSON"),
    rest_errors.EmptyBodyError: (400, "Empty body"),
    rest_errors.BadHttpError: (400, "Bad request"),
    errors.UnauthenticatedError: (401, "Unauthenticated"),
    errors.PreparesRejectedError: (403, "No new transactions are taken"),
    errors.ForbiddenError: (403, "Forbidden"),
    errors.UnknownGroupError: (404, "Unknown group"),
    errors.UnknownKeyError: (404, "Unknown key"),
    errors.UnknownJobError: (404, "Unknown job"),
    errors.UnknownTransactionError: (404, "Unknown transaction"),
    rest_errors.UnknownPathError: (404, "Unknown path"),
    rest_errors.MethodNotAllowedError: (405, "Method not allowed"),
    rest_errors.BodyTimeoutError: (408, "Body not received in time"),
    errors.AlreadyEndedError: (409, "Already ended"),
    errors.NotPendingError: (409, "Not pending"),
    errors.IdReusedError: (409, "Id reused"),
    errors.IdReplacedError: (409, "Id replaced"),
    errors.JobIdReusedError: (409, "Job id reused"),
    errors.GroupInUseError: (409, "Group in use"),
    errors.TooManyKeysError: (409, "Too many keys"),
    errors.AccessControlOffError: (409, "Access control is off"),
    errors.OutcomeExpiredError: (410, "Outcome expired"),
    errors.MessageTooLargeError: (413, "Message too large"),
    rest_errors.BodyTooLargeError: (413, "Body too large"),
    rest_errors.UnsupportedMediaTypeError: (415, "Unsupported media type"),
    errors.InvalidRequestError: (422, "Invalid request"),
    errors.TopicNotAllowedError: (422, "Topic not allowed"),
    errors.UnknownTopicError: (422, "Unknown topic"),
    rest_errors.UpgradeRequiredError: (426, "Upgrade required"),
    errors.OverloadedError: (429, "Overloaded"),
    errors.GroupLimitedError: (429, "Group limited"),
    rest_errors.InternalError: (500, "Internal error"),
    errors.OutcomeUnknownError: (503, "Outcome unknown"),
    errors.EndUnconfirmedError: (503, "End not confirmed"),
    errors.ShardUnavailableError: (503, "Shard unavailable"),
    errors.KafkaUnavailableError: (503, "Kafka unavailable"),
    errors.TopicUnavailableError: (503, "Topic unavailable"),
    errors.NotAuthorisedError: (503, "Not authorised by Kafka"),
    errors.ShuttingDownError: (503, "Shutting down"),
}
"""Every error that a caller can get; any other is an internal error (500)."""

_ENCODER: Final = msgspec.json.Encoder(enc_hook=str)


class FieldProblem(msgspec.Struct, frozen=True, kw_only=True):
    """One wrong field."""

    field: str
    """A JSON path such as `messages[0].topic`; empty for the whole body."""
    detail: str


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error; more members come with some codes (`id`, `state`, `group`, `pending`, `parked`, `limit`)."""

    type: str
    title: str
    status: int
    detail: str
    error_code: str
    """Never changes; act on this, not on `detail`."""
    instance: str | None = None
    """The request's id, as in the header X-Request-Id and in the log."""
    errors: list[FieldProblem] | None = None
    state: str | None = None
    retry_after_s: int | None = None
    """Of one of many answers, in a batch or on a stream: the seconds that the header Retry-After says elsewhere."""


def status_of(kind: type[HalfwayError]) -> tuple[int, str]:
    """Return the status and the title of an error, or those of its nearest base in the table."""
    for base in kind.__mro__:
        if base in STATUS:
            return STATUS[base]
    return STATUS[rest_errors.InternalError]


def problem(error: HalfwayError) -> dict[str, Any]:
    """Return the problem document of an error; an internal error reveals no details."""
    status, title = status_of(type(error))
    if status == STATUS[rest_errors.InternalError][0] and not isinstance(error, rest_errors.InternalError):
        error = rest_errors.InternalError()
    document: dict[str, Any] = {
        "type": f"urn:halfway:problem:{error.code}",
        "title": title,
        "status": status,
        "detail": error.detail,
        "error_code": error.code,
    }
    for name, value in error.fields.items():
        document.setdefault(name, value)
    return document


def standing_alone(error: HalfwayError) -> dict[str, Any]:
    """Return the problem document of one of many answers: what a header says of a whole one stands in it."""
    document = problem(error)
    wait = retry_after(error)
    return document if wait is None else {**document, "retry_after_s": int(wait)}


def encoded(document: dict[str, Any]) -> bytes:
    """Return a problem document as JSON."""
    return _ENCODER.encode(document)


def retry_after(error: HalfwayError) -> str | None:
    """Return the value of Retry-After in whole seconds, None for an error that a retry does not help."""
    return str(max(1, ceil(error.retry_after_s))) if isinstance(error, RetryableError) else None
