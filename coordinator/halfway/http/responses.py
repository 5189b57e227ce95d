"""What is answered: JSON, or an error as a problem document (RFC 9457), from one table of all errors.

Refusals that anybody can cause at any rate are logged: the first of each kind, and then how many more there were in a
minute, with a sample. Large answers are made in slices, so that the event loop does other work, and are ended if the
client stops reading.
"""

from __future__ import annotations

import asyncio
import codecs
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from email.utils import formatdate
from functools import lru_cache
from http import HTTPMethod, HTTPStatus
from math import ceil
from typing import Any, Final, cast

import msgspec
import structlog
from aiohttp import HttpVersion10, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_writer import StreamWriter

from halfway.coordinator.fairness import Shares
from halfway.coordinator.logging import LogSummary
from halfway.protocol import errors
from halfway.protocol.errors import HalfwayError, InvalidRequestError, RetryableError, UnauthenticatedError
from halfway.protocol.records import Message, ShownMessage, is_plain, rfc3339, shown_data, shown_message


class MalformedJsonError(HalfwayError):
    """The body is not one JSON document in UTF-8."""

    code = "malformed_json"


class EmptyBodyError(HalfwayError):
    """The request needs a body of JSON, and has none."""

    code = "empty_body"


class BodyTooLargeError(HalfwayError):
    """The body is larger than the limit."""

    code = "body_too_large"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the body is larger than the limit of {limit} bytes: send less, or raise HALFWAY_MAX_PREPARE_BYTES",
            limit=limit,
        )


class BodyTimeoutError(HalfwayError):
    """The body did not arrive in time."""

    code = "body_timeout"


class UnsupportedMediaTypeError(HalfwayError):
    """The body is not sent as `application/json`, or is compressed."""

    code = "unsupported_media_type"


class BadHttpError(HalfwayError):
    """The request is not legal HTTP/1.1, its line or a header is longer than 8 KiB, or its head than 32 KiB."""

    code = "bad_http"


class UnknownPathError(HalfwayError):
    """There is nothing at this path: GET /openapi.json lists what there is."""

    code = "unknown_path"


class MethodNotAllowedError(HalfwayError):
    """The path does not take this method."""

    code = "method_not_allowed"

    def __init__(self, method: str, allowed: Sequence[str]) -> None:
        self.allowed = ", ".join(allowed)
        super().__init__(f"the path does not take {method[:20]}: {self.allowed}", allowed=list(allowed))


class UpgradeRequiredError(HalfwayError):
    """This path takes only WebSocket handshakes with a subprotocol that the server knows."""

    code = "upgrade_required"


class InternalError(HalfwayError):
    """Something went wrong here that is not the request's fault: the log has it under the request's id."""

    code = "internal"


def invalid(errors: Sequence[tuple[str, str]], *, noun: str = "the body") -> InvalidRequestError:
    """Return one error that names every wrong field, from (field as a JSON path, the fault and the remedy).

    `noun` is what the text calls the whole, which has the empty path.
    """
    first_field, first_detail = errors[0]
    more = f" (and {len(errors) - 1} more, in `errors`)" if len(errors) > 1 else ""
    error = InvalidRequestError(f"{first_field or noun}: {first_detail}{more}", field=first_field)
    error.fields["errors"] = [{"field": field, "detail": detail} for field, detail in errors]
    return error


CONTENT_TYPE: Final = "application/problem+json"

STATUS: Final[dict[type[HalfwayError], tuple[int, str]]] = {
    MalformedJsonError: (400, "Malformed JSON"),
    EmptyBodyError: (400, "Empty body"),
    BadHttpError: (400, "Bad request"),
    errors.UnauthenticatedError: (401, "Unauthenticated"),
    errors.PreparesRejectedError: (403, "No new transactions are taken"),
    errors.ForbiddenError: (403, "Forbidden"),
    errors.UnknownGroupError: (404, "Unknown group"),
    errors.UnknownKeyError: (404, "Unknown key"),
    errors.UnknownTransactionError: (404, "Unknown transaction"),
    UnknownPathError: (404, "Unknown path"),
    MethodNotAllowedError: (405, "Method not allowed"),
    BodyTimeoutError: (408, "Body not received in time"),
    errors.AlreadyEndedError: (409, "Already ended"),
    errors.NotPendingError: (409, "Not pending"),
    errors.IdReusedError: (409, "Id reused"),
    errors.GroupInUseError: (409, "Group in use"),
    errors.TooManyKeysError: (409, "Too many keys"),
    errors.AccessControlOffError: (409, "Access control is off"),
    errors.OutcomeExpiredError: (410, "Outcome expired"),
    errors.MessageTooLargeError: (413, "Message too large"),
    BodyTooLargeError: (413, "Body too large"),
    UnsupportedMediaTypeError: (415, "Unsupported media type"),
    errors.InvalidRequestError: (422, "Invalid request"),
    errors.IdInFutureError: (422, "Id in the future"),
    errors.TopicNotAllowedError: (422, "Topic not allowed"),
    errors.UnknownTopicError: (422, "Unknown topic"),
    UpgradeRequiredError: (426, "Upgrade required"),
    errors.OverloadedError: (429, "Overloaded"),
    errors.GroupLimitedError: (429, "Group limited"),
    InternalError: (500, "Internal error"),
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
    return STATUS[InternalError]


def problem(error: HalfwayError) -> dict[str, Any]:
    """Return the problem document of an error; an internal error reveals no details."""
    status, title = status_of(type(error))
    if status == STATUS[InternalError][0] and not isinstance(error, InternalError):
        error = InternalError()
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
    return _ENCODER.encode(document)


def retry_after(error: HalfwayError) -> str | None:
    """Return the value of Retry-After in whole seconds, None for an error that a retry does not help."""
    return str(max(1, ceil(error.retry_after_s))) if isinstance(error, RetryableError) else None


log = structlog.get_logger(__name__)

_SHOWN: Final = 128
"""Shown characters of what a client sent: as many as an id may have."""


class RefusalLog:
    """A kind is an operation, its error and the group. What the caller can change is info, all else a warning."""

    def __init__(self) -> None:
        self._of_callers = LogSummary(log, "info", "request_refused")
        self._of_ours = LogSummary(log, "warning", "request_refused")

    def note(
        self,
        operation: str,
        status: int,
        error_code: str | None,
        *,
        group: str | None,
        id: str | None,  # noqa: A002 - the name of the field
        request_id: str | None,
    ) -> None:
        """Log or count a request, or an item of one, that was refused."""
        is_ours = status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS
        summary = self._of_ours if is_ours else self._of_callers
        kind = {"operation": operation, "status": int(status), "error": error_code, "group": group and group[:_SHOWN]}
        summary.note(kind, id=id and id[:_SHOWN], request_id=request_id)


JSON: Final = "application/json"
ENCODER: Final = msgspec.json.Encoder(enc_hook=rfc3339)
"""It writes each `Moment` as RFC 3339; no other type needs the hook."""
_NO_CONTENT: Final = HTTPStatus.NO_CONTENT.value
_HEAD: Final = HTTPMethod.HEAD.value
_STATUS_LINES: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}


class Answer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An answer: a body of JSON, or none."""

    status: int
    body: bytes | None
    rest: Sequence[bytes] = ()
    """What follows `body`, in pieces: to join a large body would stop the event loop."""
    headers: tuple[tuple[str, str], ...] = ()
    error_code: str | None = None


def answer(status: int, body: Any = None, *headers: tuple[str, str]) -> Answer:
    return Answer(status=status, body=None if body is None else ENCODER.encode(body), headers=headers)


def answer_in_pieces(status: int, pieces: Sequence[bytes]) -> Answer:
    """Answer with JSON that is made already."""
    return Answer(status=status, body=pieces[0], rest=pieces[1:])


def refusal(error: HalfwayError, *, instance: str | None = None) -> Answer:
    document = problem(error)
    if instance is not None:
        document["instance"] = instance
    wait = retry_after(error)
    headers = () if wait is None else (("Retry-After", wait),)
    if isinstance(error, UnauthenticatedError):
        headers = (("WWW-Authenticate", 'Bearer realm="halfway"'),)
    elif isinstance(error, MethodNotAllowedError):
        headers = (("Allow", error.allowed),)
    return Answer(status=document["status"], body=encoded(document), headers=headers, error_code=error.code)


def problem_response(error: HalfwayError, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a refusal as aiohttp's own response, for what is not a call of the API."""
    answer = refusal(error)
    fields = {**(headers or {}), **dict(answer.headers), "Content-Type": CONTENT_TYPE}
    return web.Response(status=answer.status, body=answer.body, headers=fields)


class WholeResponse(web.StreamResponse):
    """Writes head and body at once; `web.Response` takes several times as long to build the same head.

    Names and values of `headers` hold no line breaks: none of them is what a client sent.
    """

    def __init__(self, given: Answer, *headers: tuple[str, str]) -> None:
        super().__init__(status=given.status)
        self._whole = given.body
        self._rest = given.rest
        self._fields = [*given.headers, *headers]
        if given.body is not None:
            self._fields.append(("Content-Type", JSON if given.error_code is None else CONTENT_TYPE))

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Build the bytes; `write_eof` sends them."""
        if self._payload_writer is not None:
            return self._payload_writer
        self._payload_writer = request.writer
        if self._keep_alive is None:
            self._keep_alive = request.keep_alive
        parts = [_STATUS_LINES[self.status], *[f"{name}: {value}\r\n" for name, value in self._fields]]
        body = self._whole
        if self.status != _NO_CONTENT:
            parts.append(f"Content-Length: {len(body or b'') + sum(map(len, self._rest))}\r\n")
        if not self._keep_alive:
            parts.append("Connection: close\r\n")
        elif request.version == HttpVersion10:
            parts.append("Connection: keep-alive\r\n")
        parts.append("\r\n")
        head = "".join(parts).encode()
        self._whole = head if body is None or request.method == _HEAD else head + body
        if request.method == _HEAD:
            self._rest = ()
        return self._payload_writer

    async def write_eof(self, data: bytes = b"") -> None:
        writer, whole = self._payload_writer, self._whole
        if self._eof_sent or writer is None or whole is None:
            return
        self._eof_sent = True
        rest, self._rest = self._rest, ()
        for piece in (whole, *rest[:-1]) if rest else ():
            # The connection gets all of it at once: it counts and bounds what the client does not read (`Unsent`).
            await cast("StreamWriter", writer).write(piece, drain=False)
        await writer.write((rest[-1] if rest else whole) + data)
        await writer.write_eof()


@lru_cache(maxsize=4)
def http_date(second: int) -> str:
    """Return a time, in seconds since the epoch, for the header Date."""
    return formatdate(second, usegmt=True)


GiveWay = Callable[[], Awaitable[None]]
"""Returns when the next slice may be made."""

SMALL_BYTES: Final = 16 * 1024
"""A payload of this size is shown without waiting for its turn."""
SLICE_BYTES: Final = 3 * 64 * 1024
"""The payload that is encoded at once. A multiple of 3, so that slices of base64 can be joined."""
_PART_BYTES: Final = 100
"""What a message and each of its headers count in addition to their bytes: many small ones take long, too."""
_NO_MESSAGES: Final = b'"messages":[]'


def is_large(messages: Sequence[Message] | None) -> bool:
    """Return whether a payload is encoded in slices."""
    return messages is not None and sum(map(_cost, messages)) > SLICE_BYTES


def _cost(message: Message) -> int:
    return message.size + _PART_BYTES * (1 + len(message.headers))


async def with_messages(model: Any, messages: Sequence[Message], give_way: GiveWay) -> list[bytes]:
    """Return the JSON of a model in pieces, with these messages in place of its empty list `messages`."""
    head, _, tail = ENCODER.encode(model).partition(_NO_MESSAGES)  # no string can hold it: its quotes are escaped
    pieces = [head + _NO_MESSAGES[:-1]]
    waiting: list[ShownMessage] = []
    """Small messages that are encoded together."""
    size = 0
    for message in messages:
        own = _cost(message)
        if waiting and size + own > SLICE_BYTES:
            await give_way()
            pieces.append(_joined(waiting))
            waiting, size = [], 0
        if own <= SLICE_BYTES:
            waiting.append(shown_message(message))
            size += own
            continue
        pieces.extend([piece async for piece in _large(message, give_way)])
        pieces.append(b",")
    if waiting:
        await give_way()
        pieces.append(_joined(waiting))
    if messages:
        pieces[-1] = pieces[-1][:-1]  # no comma after the last one
    pieces.append(b"]" + tail)
    return pieces


def _joined(messages: Sequence[ShownMessage]) -> bytes:
    """Return the JSON of messages, each with a comma behind it."""
    return ENCODER.encode(messages)[1:-1] + b","


async def _large(message: Message, give_way: GiveWay) -> AsyncIterator[bytes]:
    """Yield the JSON of one message, in the order of `ShownMessage`."""
    yield b'{"topic":' + ENCODER.encode(message.topic) + b',"key":'
    async for piece in _data(message.key, give_way):
        yield piece
    yield b',"value":'
    async for piece in _data(message.value, give_way):
        yield piece
    yield b',"headers":['
    for number, (name, value) in enumerate(message.headers):
        yield (b"," if number else b"") + b'{"name":' + ENCODER.encode(name) + b',"value":'
        async for piece in _data(value, give_way):
            yield piece
        yield b"}"
    yield b'],"partition":' + ENCODER.encode(message.partition) + b"}"


async def _data(data: bytes | None, give_way: GiveWay) -> AsyncIterator[bytes]:
    """Yield the JSON of a key or a value, as `shown_data` makes it."""
    if data is None or len(data) <= SLICE_BYTES:
        yield ENCODER.encode(shown_data(data))
        return
    texts = await _texts(data, give_way)
    if texts is not None:
        yield b'"'
        for text in texts:
            await give_way()
            yield ENCODER.encode(text)[1:-1]
        yield b'"'
        return
    yield b'{"data":"'
    for at in range(0, len(data), SLICE_BYTES):
        await give_way()
        yield b64encode(data[at : at + SLICE_BYTES])
    yield b'","type":"BINARY"}'


async def _texts(data: bytes, give_way: GiveWay) -> list[str] | None:
    """Return data as text in pieces, None if it is not text (`as_text`)."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    texts = []
    for at in range(0, len(data), SLICE_BYTES):
        await give_way()
        part = data[at : at + SLICE_BYTES]
        if not is_plain(part):
            return None
        try:
            texts.append(decoder.decode(part, final=at + SLICE_BYTES >= len(data)))
        except UnicodeDecodeError:
            return None
    return texts


MAX_BYTES: Final = 256 * 1024 * 1024
LOOK_EVERY_S: Final = 1.0
SLOW_LOOKS: Final = 5
"""A client that reads less than `MIN_BYTES` in this many looks is taken for one that does not read."""
MIN_BYTES: Final = 80 * 1024


class _Waiting:
    """What one connection has not sent yet."""

    def __init__(self, transport: asyncio.Transport, caller: str | None) -> None:
        self.transport = transport
        self.caller = caller
        self.size = transport.get_write_buffer_size()
        self.looks = 0
        self.size_before = self.size


class Unsent:
    """The answers held for clients that read too slowly.

    A connection is watched from the moment its buffer is full until everything is sent. A group that reads its answers
    is not refused because of others that do not (`Shares`).
    """

    def __init__(self, *, max_bytes: int = MAX_BYTES, look_every_s: float = LOOK_EVERY_S) -> None:
        self._held = Shares(max_bytes)
        self._look_every_s = look_every_s
        self._waiting: dict[object, _Waiting] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._not_read = LogSummary(log, "info", "answer_not_read")

    @property
    def bytes(self) -> int:
        """What all connections have not sent yet."""
        return self._held.total

    def has_room(self, caller: str | None, size: int = 1) -> bool:
        """Return whether an answer of this size may be held for a caller."""
        return size <= self._held.room(caller)

    def begin(self, connection: object, transport: asyncio.Transport, caller: str | None = None) -> None:
        """Count the bytes that the connection of a caller could not send."""
        self._waiting[connection] = waiting = _Waiting(transport, caller)
        self._held.take(caller, waiting.size)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._look_every_s, self._look)

    def end(self, connection: object) -> None:
        """Stop counting a connection, which has sent everything or is lost."""
        waiting = self._waiting.pop(connection, None)
        if waiting is not None:
            self._held.leave(waiting.caller, waiting.size)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        for connection, waiting in list(self._waiting.items()):
            size = waiting.transport.get_write_buffer_size()
            self._held.leave(waiting.caller, waiting.size)
            self._held.take(waiting.caller, size)
            waiting.size = size
            waiting.size_before = max(waiting.size_before, size)  # more was written in the meantime
            waiting.looks += 1
            if waiting.size_before - size >= MIN_BYTES:
                waiting.looks, waiting.size_before = 0, size
            elif waiting.looks >= SLOW_LOOKS:
                self._not_read.note({"group": waiting.caller}, unsent_bytes=size)
                self.end(connection)
                waiting.transport.abort()
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(self._look_every_s, self._look)
