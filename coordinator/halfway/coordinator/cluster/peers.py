"""Answers the calls of other instances from the shards served here, without calling another instance.

Calls and answers are frames in MessagePack. A message of a connection has one or many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, TypeVar, assert_never

import msgspec

from halfway.coordinator.checkback.dispatcher import CheckDispatcher
from halfway.coordinator.checkback.fetching import FetchedChecks
from halfway.coordinator.ending import Ending
from halfway.coordinator.fairness import Turns
from halfway.coordinator.prepare import Preparer
from halfway.coordinator.queries.queries import Queries
from halfway.coordinator.records import (
    ANSWERS,
    CheckCall,
    CountCall,
    DueCall,
    DueResult,
    EndCall,
    GetCall,
    InstanceCall,
    LeaseCall,
    LeaseResult,
    ListCall,
    PeerCall,
    PrepareCall,
    ReadCall,
    ResumeCall,
    ShardCall,
)
from halfway.coordinator.requests import Moment
from halfway.coordinator.shards.groups import Groups
from halfway.protocol import errors
from halfway.protocol.errors import HalfwayError, NotServedError, RetryableError, ShardUnavailableError
from halfway.protocol.principal import PEER, Permission, Principal, PrincipalKind

_LONGEST_WAIT_S = 10.0

InstanceCallHandler = Callable[[Any, float, Principal], Awaitable[msgspec.Struct]]
"""Answers a call by a deadline on the loop's clock, for a principal."""


class PeerHandler:
    """The receiving side of the port `Peers`."""

    turns: Turns

    def __init__(
        self,
        preparer: Preparer,
        ending: Ending,
        queries: Queries,
        groups: Groups,
        checks: CheckDispatcher,
        leases: FetchedChecks,
    ) -> None:
        self._preparer = preparer
        self._ending = ending
        self._queries = queries
        self._groups = groups
        self._checks = checks
        self._leases = leases
        self._handlers: dict[type, InstanceCallHandler] = {}

    def register(self, handler: InstanceCallHandler, *calls: type) -> None:
        """Answer calls of these types with `handler`."""
        self._handlers.update(dict.fromkeys(calls, handler))

    async def answer(self, call: PeerCall, *, deadline: float, principal: Principal) -> msgspec.Struct:
        """Carry out a call and return its answer, of the type in `peer_calls.ANSWERS`.

        Raises:
            ShardUnavailableError: its shard is not served here; nothing was done.
            HalfwayError: any error that the same call of a client raises.

        """
        try:
            if isinstance(call, InstanceCall):
                return await self._handlers[type(call)](call, deadline, principal)
            return await self._answer(call, deadline, principal)
        except NotServedError as error:
            raise ShardUnavailableError(error.detail, **error.fields) from None

    async def _answer(self, call: ShardCall, deadline: float, principal: Principal) -> msgspec.Struct:
        match call:
            case PrepareCall():
                answer: msgspec.Struct = await self._preparer.prepare(
                    call.request, deadline=deadline, principal=principal, is_relayed=True
                )
            case EndCall():
                answer = await self._ending.end(call.request, deadline=deadline, principal=principal)
            case CheckCall():
                answer = await self._checks.check_now(call.id, deadline=deadline, principal=principal)
            case ResumeCall():
                answer = await self._ending.resume(
                    call.id,
                    remark=call.remark,
                    deadline=deadline,
                    principal=principal,
                )
            case DueCall():
                await self._groups.get_permitted(
                    call.group, Permission.FETCH_CHECKS, principal=principal, deadline=deadline
                )
                until = min(deadline, asyncio.get_running_loop().time() + min(call.wait_s, _LONGEST_WAIT_S))
                answer = DueResult(due=await self._leases.wait_until_due(call.group, until=until))
            case LeaseCall():
                checks = await self._leases.lease(
                    call.group, at_most=call.at_most, wait_s=0, principal=principal, counts=False
                )
                self._leases.settle(call.group, call.settled, is_taken=call.taken)
                answer = LeaseResult(checks=tuple(checks))
            case _:
                answer = await self._read(call, deadline, principal)
        return answer

    async def _read(self, call: ReadCall, deadline: float, principal: Principal) -> msgspec.Struct:
        """Answer a call that changes no transaction."""
        match call:
            case GetCall():
                answer: msgspec.Struct = await self._queries.get(
                    call.id, payload=call.payload, deadline=deadline, principal=principal
                )
                await self.turns.next(principal.group)  # its payload is encoded next
            case ListCall():
                answer = await self._queries.list(call.query, call.shards, deadline=deadline, principal=principal)
            case CountCall():
                answer = await self._groups.count(
                    call.group, call.shards, hold_s=call.hold_s, deadline=deadline, principal=principal
                )
            case _:
                assert_never(call)
        return answer


class CallFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One call, with its caller and how long the caller waits."""

    number: int
    """The number of the call on its connection, for the answer."""
    within_ms: int
    principal: Principal
    """The caller, as the first instance authenticated it."""
    call: msgspec.Raw

    @property
    def caller(self) -> Principal:
        """The caller; PEER if the other instance has no access control, so that it can be turned on step by step."""
        return PEER if self.principal.kind is PrincipalKind.ANYBODY else self.principal


class ErrorFrame(msgspec.Struct, frozen=True, kw_only=True):
    """An error as callers get it."""

    code: str
    detail: str
    fields: dict[str, Any] = {}
    retry_after_s: float | None = None


class AnswerFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to the call with this number."""

    number: int
    result: msgspec.Raw = msgspec.Raw()
    """Empty if there is an error."""
    error: ErrorFrame | None = None


def _encoded(value: object) -> int | str:
    return int(value) if isinstance(value, Moment) else str(value)


def _decoded(kind: type, value: Any) -> Moment:
    if kind is Moment and isinstance(value, int):
        return Moment(value)
    raise NotImplementedError(kind)


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_encoded)
_CALL: Final[msgspec.msgpack.Decoder[PeerCall]] = msgspec.msgpack.Decoder(PeerCall)
_CALLS: Final = msgspec.msgpack.Decoder(list[CallFrame])
_ANSWERS: Final = msgspec.msgpack.Decoder(list[AnswerFrame])
_RESULTS: Final[dict[type, msgspec.msgpack.Decoder[Any]]] = {
    call: msgspec.msgpack.Decoder(result, dec_hook=_decoded) for call, result in ANSWERS.items()
}

F = TypeVar("F")


def encode_message(frames: Iterable[bytes]) -> bytes:
    """Return the message with these encoded frames: all of calls, or all of answers."""
    return _ENCODER.encode([msgspec.Raw(frame) for frame in frames])


def encode_call(number: int, call: PeerCall, *, within_ms: int, principal: Principal) -> bytes:
    raw = msgspec.Raw(_ENCODER.encode(call))
    return _ENCODER.encode(CallFrame(number=number, within_ms=within_ms, principal=principal, call=raw))


def encode_answer(number: int, result: msgspec.Struct | HalfwayError) -> bytes:
    if isinstance(result, HalfwayError):
        wait = result.retry_after_s if isinstance(result, RetryableError) else None
        error = ErrorFrame(code=result.code, detail=result.detail, fields=result.fields, retry_after_s=wait)
        return _ENCODER.encode({"number": number, "error": error})
    return _ENCODER.encode({"number": number, "result": result})


def decode_calls(message: bytes) -> list[CallFrame]:
    """Return the calls of a message; raise ValueError if it is none of calls."""
    return _decode(_CALLS, message)


def decode_answers(message: bytes) -> list[AnswerFrame]:
    """Return the answers of a message; raise ValueError if it is none of answers."""
    return _decode(_ANSWERS, message)


def _decode(decoder: msgspec.msgpack.Decoder[F], message: bytes | msgspec.Raw) -> F:
    try:
        return decoder.decode(message)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"it cannot be read: {error}") from None


def decode_call(raw: msgspec.Raw) -> PeerCall:
    """Return a call; raise ShardUnavailableError if this release does not know it: nothing was done."""
    try:
        return _decode(_CALL, raw)
    except ValueError as error:
        raise ShardUnavailableError(f"the owner runs a release that does not know this call: {error}") from None


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
    return _decode(_RESULTS[type(call)], frame.result)


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
