"""The encoding of calls between instances: MessagePack, with many calls in a request, and a frame for each answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from halfway.domain import errors
from halfway.domain.errors import HalfwayError, RetryableError, ShardUnavailableError
from halfway.domain.principal import PEER, Principal, PrincipalKind
from halfway.service.records.peer_calls import ANSWERS, PeerCall

CONTENT_TYPE: Final = "application/msgpack"
_LENGTH_BYTES: Final = 4


class CallFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a request, with its caller and how long the caller waits."""

    within_ms: int
    principal: Principal = PEER
    """The caller, as the first instance authenticated it. An older release does not send it."""
    call: msgspec.Raw

    @property
    def caller(self) -> Principal:
        """The caller; PEER if the other instance has no access control, so that it can be turned on step by step."""
        return PEER if self.principal.kind is PrincipalKind.ANYBODY else self.principal


class RequestFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A request with its calls."""

    calls: list[CallFrame]


class ErrorFrame(msgspec.Struct, frozen=True, kw_only=True):
    """An error as callers get it."""

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
    """Return an encoded call, for `encode_request`."""
    return _ENCODER.encode(CallFrame(within_ms=within_ms, principal=principal, call=msgspec.Raw(_ENCODER.encode(call))))


def encode_request(calls: list[bytes]) -> bytes:
    """Return the body of a request with encoded calls."""
    return _ENCODER.encode({"calls": [msgspec.Raw(call) for call in calls]})


def decode_request(body: bytes) -> list[CallFrame]:
    """Return the calls of a request; raise ValueError if the body is not a request."""
    try:
        return _REQUEST.decode(body).calls
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None


def decode_call(raw: msgspec.Raw) -> PeerCall:
    """Return a call; raise ShardUnavailableError if this release does not know it: nothing was done."""
    try:
        return _CALL.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ShardUnavailableError(f"the owner runs a release that does not know this call: {error}") from None


def encode_answer(index: int, result: msgspec.Struct | HalfwayError) -> bytes:
    """Return an answer as it is sent on the connection: its length in four bytes, then the answer."""
    if isinstance(result, HalfwayError):
        wait = result.retry_after_s if isinstance(result, RetryableError) else None
        error = ErrorFrame(code=result.code, detail=result.detail, fields=result.fields, retry_after_s=wait)
        frame = _ENCODER.encode({"index": index, "error": error})
    else:
        frame = _ENCODER.encode({"index": index, "result": result})
    return len(frame).to_bytes(_LENGTH_BYTES, "big") + frame


class AnswerReader:
    """Splits the bytes of a connection into answers. Raises ValueError for malformed or too large answers."""

    def __init__(self, max_bytes: int) -> None:
        """Set the maximum size of one answer."""
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[AnswerFrame]:
        """Return the answers that are complete now."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _LENGTH_BYTES:
                end = start + _LENGTH_BYTES + int.from_bytes(buffer[start : start + _LENGTH_BYTES], "big")
                if end - start > self._max_bytes:
                    raise ValueError(f"an answer of {end - start} bytes is larger than {self._max_bytes}")
                if len(buffer) < end:
                    break
                with memoryview(buffer) as view:
                    frame = bytes(view[start + _LENGTH_BYTES : end])
                start = end
                try:
                    yield _ANSWER.decode(frame)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise ValueError(f"an answer cannot be read: {error}") from None
        finally:
            del buffer[:start]


def decode_result(call: PeerCall, frame: AnswerFrame) -> Any:
    """Return the result of a call from its answer.

    Raises:
        HalfwayError: the error that the other instance answered with.
        ValueError: this release cannot read the result.

    """
    if frame.error is not None:
        raise _decode_error(frame.error)
    if not bytes(frame.result):
        raise ValueError("the answer has neither a result nor an error")
    try:
        return _RESULTS[type(call)].decode(frame.result)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the result cannot be read: {error}") from None


def _errors_by_code() -> Mapping[str, type[HalfwayError]]:
    """Return the errors that callers may get, by their codes; if several share a code, the most general one."""
    by_code: dict[str, type[HalfwayError]] = {}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, HalfwayError) and kind is not errors.NotServedError:
            by_code.setdefault(kind.code, kind)
    return by_code


_ERRORS: Final = _errors_by_code()


def _decode_error(frame: ErrorFrame) -> HalfwayError:
    """Return the error that the other instance raised; one that only a newer release knows becomes retryable."""
    kind = _ERRORS.get(frame.code)
    if kind is None:
        return ShardUnavailableError(
            f"the owner answered with the error {frame.code!r}, which this release does not know"
        )
    error = kind.__new__(kind)
    HalfwayError.__init__(error, frame.detail, **frame.fields)
    if isinstance(error, RetryableError) and frame.retry_after_s is not None:
        error.retry_after_s = frame.retry_after_s
    return error
