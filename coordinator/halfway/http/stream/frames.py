"""The frames of the stream as JSON (docs/api.md#frames)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET

from halfway.coordinator import tracing
from halfway.coordinator.requests import End, EndResult, LeasedCheck, Prepare, Prepared
from halfway.http.requests import models
from halfway.http.requests.validation import Validation, given, to_batch_end
from halfway.http.responses import ENCODER, GiveWay, MalformedJsonError, encoded, invalid, is_large, standing_alone
from halfway.protocol.errors import HalfwayError
from halfway.protocol.transactions import Cause

VERSION: Final = 1

R = TypeVar("R")
M = TypeVar("M", bound=msgspec.Struct)
Request = TypeVar("Request", "Prepare", "End")
F = TypeVar("F", models.StreamFrame, models.WholeStreamFrame)

# --- from the client


class _Numbered(msgspec.Struct, frozen=True):
    n: models.Number


_NUMBERED: Final = msgspec.json.Decoder(_Numbered)


class FrameOperations(msgspec.Struct, frozen=True, kw_only=True):
    """The operations of one frame, each with its number; those that can't be done with their error."""

    prepares: list[tuple[int, Prepare]]
    ends: list[tuple[int, End, bool]]
    """With whether each wants a confirmation."""
    checks: list[tuple[int, models.StreamChecks]]
    refused: list[tuple[str, int, HalfwayError]] = []
    """With the kind of each."""

    @property
    def numbers(self) -> list[int]:
        return [
            *(one[0] for one in self.prepares),
            *(one[0] for one in self.ends),
            *(one[0] for one in self.checks),
            *(one[1] for one in self.refused),
        ]


class FrameReader:
    """Reads the frames of clients."""

    def __init__(self, validation: Validation, *, max_operations: int) -> None:
        self._validation = validation
        self._max_operations = max_operations

    def read(self, data: bytes, cause: Cause) -> FrameOperations:
        """Return the operations of a frame; `cause` is that of its ends.

        Raises:
            MalformedJsonError: the frame is not one JSON document.
            InvalidRequestError: it is not a frame, or an operation has no number.
        """

        def converted(frame: models.WholeStreamFrame) -> FrameOperations:
            self._few(frame)
            return FrameOperations(
                prepares=[self._to_prepare(one) for one in given(frame.prepare) or ()],
                ends=[_to_end(one, cause) for one in given(frame.end) or ()],
                checks=[(one.n, one) for one in given(frame.checks) or ()],
            )

        whole = self._validation.read_whole(models.WholeStreamFrame, data, converted)
        return self._one_by_one(data, cause) if whole is None else whole

    def _few(self, frame: F) -> F:
        count = sum(len(given(operations) or ()) for operations in (frame.prepare, frame.end, frame.checks))
        if not 0 < count <= self._max_operations:
            raise invalid(
                [("", f"{count} operations: from 1 to {self._max_operations} in one frame")], noun="the frame"
            )
        return frame

    def _one_by_one(self, data: bytes, cause: Cause) -> FrameOperations:
        """Read the operations of a frame one by one, if one of them is wrong, or may be."""
        frame: models.StreamFrame = self._validation.read(models.StreamFrame, data, self._few)
        wrong: list[tuple[str, int, HalfwayError]] = []

        def each(kind: str, raws: Sequence[msgspec.Raw], model: type[M], to: Callable[[M], R]) -> list[R]:
            done = []
            for index, raw in enumerate(raws):
                try:
                    done.append(self._validation.read(model, raw, to))
                except HalfwayError as error:
                    wrong.append((kind, _decoded(_NUMBERED, raw, f"{kind}[{index}]").n, error))
            return done

        return FrameOperations(
            prepares=each("prepare", frame.prepare, models.StreamPrepare, self._to_prepare),
            ends=each("end", frame.end, models.StreamEnd, partial(_to_end, cause=cause)),
            checks=each("checks", frame.checks, models.StreamChecks, lambda one: (one.n, one)),
            refused=wrong,
        )

    def _to_prepare(self, one: models.StreamPrepare) -> tuple[int, Prepare]:
        return one.n, _traced(self._validation.to_prepare(one), one)


def _to_end(one: models.StreamEnd, cause: Cause) -> tuple[int, End, bool]:
    return one.n, _traced(to_batch_end(one, cause), one), one.confirm is not False


def _traced(request: Request, one: models.StreamPrepare | models.StreamEnd) -> Request:
    span = given(one.traceparent)
    return request if span is None else tracing.traced(request, {"traceparent": span})


def _decoded(decoder: msgspec.json.Decoder[M], data: bytes | msgspec.Raw, field: str) -> M:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError:
        fault = "not an operation: expected an object with its number n, a whole number from 0 to 9007199254740991"
        raise invalid([(field, fault)]) from None
    except RecursionError:
        raise MalformedJsonError("the frame is nested too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedJsonError(f"the frame is not one JSON document: {error}") from None


# --- to the client


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What the server takes, in its first frame."""

    version: int = VERSION
    max_frame_bytes: int
    max_frame_operations: int
    max_in_flight: int
    timeout_s: float
    heartbeat_s: float
    traceparent: bool = True
    """Whether a prepare or an end may name its span."""


class Closing(msgspec.Struct, frozen=True, kw_only=True):
    """The server is about to close."""

    detail: str


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A subscription that the server ended."""

    group: str
    problem: msgspec.Raw


class Subscribed(msgspec.Struct, frozen=True, kw_only=True):
    """A subscription as it is now."""

    group: str
    max: int


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The answer to one operation."""

    n: int
    status: int
    body: Any = None
    problem: msgspec.Raw | None = None


class ServerFrame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the server sends."""

    hello: Hello | None = None
    shards: models.Shards | None = None
    answers: list[Answer] = []
    checks: list[models.FetchedCheck] = []
    ended: Ended | None = None
    closing: Closing | None = None
    problem: msgspec.Raw | None = None

    def encoded(self) -> bytes:
        return ENCODER.encode(self)


def prepared(n: int, done: Prepared) -> Answer:
    status = HTTPStatus.CREATED if done.created else HTTPStatus.OK
    return Answer(n=n, status=status, body=msgspec.structs.replace(done, created=UNSET))


def ended(n: int, done: EndResult) -> Answer:
    return Answer(n=n, status=HTTPStatus.OK, body=done)


def accepted(n: int) -> Answer:
    """Return the answer to an end that wants no confirmation."""
    return Answer(n=n, status=HTTPStatus.ACCEPTED)


def subscribed(n: int, wanted: models.StreamChecks) -> Answer:
    return Answer(n=n, status=HTTPStatus.OK, body=Subscribed(group=wanted.group, max=wanted.max))


def refused(n: int, error: HalfwayError) -> Answer:
    status, document = problem_of(error)
    return Answer(n=n, status=status, problem=document)


def problem_of(error: HalfwayError) -> tuple[int, msgspec.Raw]:
    """Return the status and the problem document of an error; what a header says in REST stands in it."""
    document = standing_alone(error)
    return document["status"], msgspec.Raw(encoded(document))


async def pushed(checks: Sequence[LeasedCheck], give_way: GiveWay) -> bytes:
    if any(is_large(check.messages) for check in checks):
        return b"".join(await models.fetched_in_pieces(checks, give_way))
    return ServerFrame(checks=[models.fetched(check) for check in checks]).encoded()
