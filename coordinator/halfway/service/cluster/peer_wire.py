"""Calls between instances as bytes: MessagePack, many calls in a request, each answer as soon as it is done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from halfway.domain import errors
from halfway.domain.errors import HalfwayError, RetryableError, ShardUnavailableError
from halfway.domain.principal import PEER, Principal, PrincipalKind
from halfway.service.peer_calls import ANSWERS, PeerCall

CONTENT_TYPE: Final = "application/msgpack"
_LENGTH_BYTES: Final = 4


class CallFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a request: how long its caller waits, who the caller is, and the call."""

    within_ms: int
    principal: Principal = PEER
    """Who calls, as the instance that was asked has found out; an older release does not say."""
    call: msgspec.Raw

    @property
    def caller(self) -> Principal:
        """Who calls; PEER if the other instance has no access control, so that it can be turned on step by step."""
        return PEER if self.principal.kind is PrincipalKind.ANYBODY else self.principal


class RequestFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A request."""

    calls: list[CallFrame]


class ErrorFrame(msgspec.Struct, frozen=True, kw_only=True):
    """An error as callers see it."""

    code: str
    detail: str
    fields: dict[str, Any] = {}
    retry_after_s: float | None = None


class AnswerFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to the call at `index` of the request."""

    index: int
    result: msgspec.Raw = msgspec.Raw()
    """Empty if there is an error."""
    error: ErrorFrame | None = None


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=str)
_CALL: Final[msgspec.msgpack.Decoder[PeerCall]] = msgspec.msgpack.Decoder(PeerCall)
_REQUEST: Final = msgspec.msgpack.Decoder(RequestFrame)
_ANSWER: Final = msgspec.msgpack.Decoder(AnswerFrame)
_RESULTS: Final[dict[type, msgspec.msgpack.Decoder[Any]]] = {
    call: msgspec.msgpack.Decoder(result) for call, result in ANSWERS.items()
}


def encode_call(call: PeerCall, *, within_ms: int, principal: Principal) -> bytes:
    """Return one encoded call, for `request_of`."""
    return _ENCODER.encode(CallFrame(within_ms=within_ms, principal=principal, call=msgspec.Raw(_ENCODER.encode(call))))


def request_of(calls: list[bytes]) -> bytes:
    """Return the body of a request."""
    return _ENCODER.encode({"calls": [msgspec.Raw(call) for call in calls]})


def decode_request(body: bytes) -> list[CallFrame]:
    """Return the calls of a request; ValueError if it is not one."""
    try:
        return _REQUEST.decode(body).calls
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None


def decode_call(raw: msgspec.Raw) -> PeerCall:
    """Return a call; ShardUnavailableError if this release does not know it: nothing was done."""
    try:
        return _CALL.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ShardUnavailableError(f"the owner runs a release that does not know this call: {error}") from None


def encode_answer(index: int, result: msgspec.Struct | HalfwayError) -> bytes:
    """Return an answer as it goes over the connection: its length in four bytes, then the answer."""
    if isinstance(result, HalfwayError):
        wait = result.retry_after_s if isinstance(result, RetryableError) else None
        told = ErrorFrame(code=result.code, detail=result.detail, fields=result.fields, retry_after_s=wait)
        frame = _ENCODER.encode({"index": index, "error": told})
    else:
        frame = _ENCODER.encode({"index": index, "result": result})
    return len(frame).to_bytes(_LENGTH_BYTES, "big") + frame


class AnswerReader:
    """Cuts the bytes of a connection into answers; ValueError for bad bytes, or for an answer that is too large."""

    def __init__(self, max_bytes: int) -> None:
        """Bound one answer."""
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[AnswerFrame]:
        """Return the answers that are complete now."""
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= _LENGTH_BYTES:
                end = at + _LENGTH_BYTES + int.from_bytes(buffer[at : at + _LENGTH_BYTES], "big")
                if end - at > self._max_bytes:
                    raise ValueError(f"an answer of {end - at} bytes is larger than {self._max_bytes}")
                if len(buffer) < end:
                    break
                with memoryview(buffer) as view:
                    frame = bytes(view[at + _LENGTH_BYTES : end])
                at = end
                try:
                    yield _ANSWER.decode(frame)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise ValueError(f"an answer cannot be read: {error}") from None
        finally:
            del buffer[:at]


def result_of(call: PeerCall, frame: AnswerFrame) -> Any:
    """Return the result of a call.

    Raises:
        HalfwayError: the error that the other instance answers with.
        ValueError: the result is not one that this release can read.

    """
    if frame.error is not None:
        raise _rebuilt(frame.error)
    if not bytes(frame.result):
        raise ValueError("the answer has neither a result nor an error")
    try:
        return _RESULTS[type(call)].decode(frame.result)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the result cannot be read: {error}") from None


def _codes() -> Mapping[str, type[HalfwayError]]:
    """Return the errors that callers may see, by their codes; if several share a code, the most general."""
    found: dict[str, type[HalfwayError]] = {}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, HalfwayError) and kind is not errors.NotServedError:
            found.setdefault(kind.code, kind)
    return found


_KINDS: Final = _codes()


def _rebuilt(told: ErrorFrame) -> HalfwayError:
    """Return an error as the other instance raised it; an unknown one of a newer release is retryable."""
    kind = _KINDS.get(told.code)
    if kind is None:
        return ShardUnavailableError(f"the owner refuses with {told.code!r}, which this release does not know")
    error = kind.__new__(kind)
    HalfwayError.__init__(error, told.detail, **told.fields)
    if isinstance(error, RetryableError) and told.retry_after_s is not None:
        error.retry_after_s = told.retry_after_s
    return error
