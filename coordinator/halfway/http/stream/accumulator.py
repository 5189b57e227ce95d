"""Collects the operations of all streams in one turn of the event loop; the coordinator gets one list of each kind.

What arrives on a WebSocket counts until its message is read.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

import msgspec
import structlog

from halfway.http.requests.admission import held_s
from halfway.http.responses.problems import InternalError, status_of
from halfway.http.stream import frames
from halfway.protocol.errors import GroupLimitedError, HalfwayError

if TYPE_CHECKING:
    from halfway.coordinator.answers import Answers
    from halfway.coordinator.coordinator import Coordinator
    from halfway.coordinator.requests import End, Prepare
    from halfway.http.requests.admission import Admission, InFlight
    from halfway.http.responses.problems import RefusalLog
    from halfway.http.stream.frames import Answer, FrameOperations
    from halfway.protocol.principal import Principal


log = structlog.get_logger(__name__)

R = TypeVar("R")

_AT_ONCE: Final = 250
"""Operations of one kind that are handed over before other work of the event loop goes on."""


class StreamObserver(Protocol):
    """Counts the operations of streams."""

    def streamed(self, operation: str, status: int, count: int) -> None:
        """Count operations that were answered with a status."""


class Connection(Protocol):
    """A connection, as the accumulator sees it."""

    principal: Principal
    lost: bool
    id: str
    """The id of the request that opened it."""

    def answer(self, answer: Answer) -> None:
        """Send an answer, unless the connection is lost."""

    def accept(self, n: int) -> None:
        """Answer an end that wants no confirmation; `settled` follows."""

    def settled(self) -> None:
        """Note that an accepted end is done."""


class _Frame(msgspec.Struct, eq=False):
    """The bytes of a frame, which count until its last operation is done."""

    size: int
    left: int


class _Operation(msgspec.Struct, eq=False):
    """One operation on its way."""

    connection: Connection
    frame: _Frame
    kind: str
    n: int
    request: Any
    confirm: bool = True
    accepted: bool = False
    """True if it was answered 202. Its result is not sent then."""


class OperationAccumulator:
    """Operations that wait for the end of this turn of the event loop."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        in_flight: InFlight,
        admission: Admission,
        timeout_s: float,
        hold_s: float,
        observer: StreamObserver,
        refusals: RefusalLog,
    ) -> None:
        """Take the bounds, which are those of requests.

        A refusal of a group at its limit is held back for up to `hold_s`.
        """
        self._coordinator = coordinator
        self._in_flight = in_flight
        self._admission = admission
        self._timeout_s = timeout_s
        self._hold_s = hold_s
        self._observer = observer
        self._refusals = refusals
        self._prepares: deque[_Operation] = deque()
        self._ends: deque[_Operation] = deque()
        self._scheduled = False
        self._waiting: dict[Connection, set[asyncio.Task[None]]] = {}
        """Prepares that wait for a place."""

    def add(self, connection: Connection, requested: FrameOperations, size: int) -> None:
        """Do the prepares and ends of a frame of `size` bytes, and send each answer to the connection."""
        self._refuse(connection, requested)
        caller = connection.principal.group
        wanted = len(requested.ends) + len(requested.prepares)
        try:
            self._in_flight.hold(size, caller)
        except HalfwayError as error:
            self._refuse_all(connection, requested.ends, "end", error)
            self._refuse_all(connection, requested.prepares, "prepare", error)
            return
        granted = self._in_flight.take(wanted, caller)
        frame = _Frame(size, granted)
        if not granted:
            self._in_flight.free(size, caller)
        ends, prepares = requested.ends[:granted], requested.prepares[: max(0, granted - len(requested.ends))]
        if granted < wanted:
            refusal = self._in_flight.refusal()
            self._refuse_all(connection, requested.ends[len(ends) :], "end", refusal)
            self._refuse_all(connection, requested.prepares[len(prepares) :], "prepare", refusal)
        self._ends += [_Operation(connection, frame, "end", n, end, confirm) for n, end, confirm in ends]
        admitted = self._admission.take(len(prepares))
        for index, (n, prepare) in enumerate(prepares):
            operation = _Operation(connection, frame, "prepare", n, prepare)
            if index < admitted:
                self._prepares.append(operation)
            else:
                self._wait(operation)
        self._schedule()

    def forget(self, connection: Connection) -> None:
        """Begin no more for a connection that is lost: nobody would end a transaction that begins now."""
        for task in self._waiting.pop(connection, ()):
            task.cancel()

    def _schedule(self) -> None:
        if not self._scheduled and (self._ends or self._prepares):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._hand_over)

    def _hand_over(self) -> None:
        self._scheduled = False
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        for principal, ends in _by_principal(self._ends):
            requests: list[End] = [one.request for one in ends]
            ending = self._coordinator.begin_ends(requests, deadline=deadline, principal=principal)
            self._follow(ending, ends, frames.ended, partial(self._done, principal.group))
            self._accept(ends)
        for principal, prepares in _by_principal(self._prepares):
            operations = [one for one in prepares if not self._given_up(one)]
            wanted: list[Prepare] = [one.request for one in operations]
            preparing = self._coordinator.begin_prepares(wanted, deadline=deadline, principal=principal)
            self._follow(preparing, operations, frames.prepared, partial(self._prepared, principal.group))
        self._schedule()

    def _given_up(self, prepare: _Operation) -> bool:
        """Return whether the connection of a prepare is lost: no client would end a transaction that begins now."""
        if not prepare.connection.lost:
            return False
        self._finish(prepare)
        self._prepared(prepare.connection.principal.group, 1)
        return True

    def _accept(self, operations: Sequence[_Operation]) -> None:
        """Answer 202 to the ends that are on their way and want no confirmation."""
        accepted = 0
        for one in operations:
            if not one.confirm and one.request is not None:
                one.accepted = True
                one.connection.accept(one.n)
                accepted += 1
        if accepted:
            self._observer.streamed("end", 202, accepted)

    def _follow(
        self,
        answers: Answers[R],
        operations: Sequence[_Operation],
        shown: Callable[[int, R], Answer],
        done: Callable[[int], None],
    ) -> None:
        """Send the answers to their connections as they come. `done` is called with the number of answers."""
        results = answers.results

        def send(indexes: Sequence[int]) -> None:
            counts: Counter[int] = Counter()
            for index in indexes:
                one = operations[index]
                result = results[index]
                error = _error(result) if isinstance(result, Exception) else None
                if error is not None:
                    self._note_refused(one.kind, one.connection, error, one.request)
                self._finish(one)
                if one.accepted:
                    one.connection.settled()
                    continue
                answer = frames.refused(one.n, error) if error is not None else shown(one.n, cast("R", result))
                counts[answer.status] += 1
                if isinstance(result, GroupLimitedError):
                    # As in REST: it slows down a caller that sends the next prepare at once.
                    asyncio.get_running_loop().call_later(held_s(self._hold_s), one.connection.answer, answer)
                else:
                    one.connection.answer(answer)
            done(len(indexes))
            for status, count in counts.items():
                self._observer.streamed(operations[0].kind, status, count)

        answers.on_answers(send)

    def _note_refused(self, kind: str, connection: Connection, error: HalfwayError, request: object) -> None:
        self._refusals.note(
            f"stream_{kind}",
            status_of(type(error))[0],
            error.code,
            group=getattr(request, "group", None) or connection.principal.group,
            id=getattr(request, "id", None),
            request_id=connection.id,
        )

    def _finish(self, operation: _Operation) -> None:
        operation.request = None
        frame = operation.frame
        frame.left -= 1
        if not frame.left:
            self._in_flight.free(frame.size, operation.connection.principal.group)

    def _done(self, caller: str | None, count: int) -> None:
        self._in_flight.leave(count, caller)

    def _prepared(self, caller: str | None, count: int) -> None:
        self._in_flight.leave(count, caller)
        self._admission.leave(count)

    # --- prepares that wait for a place

    def _wait(self, operation: _Operation) -> None:
        connection = operation.connection
        task = asyncio.get_running_loop().create_task(self._admission.enter(connection.principal.group))
        waiting = self._waiting.setdefault(connection, set())
        waiting.add(task)

        def over(task: asyncio.Task[None]) -> None:
            """Go on, or free what the operation holds: a task that is cancelled before its first step runs nothing."""
            waiting.discard(task)
            if not waiting and self._waiting.get(connection) is waiting:
                del self._waiting[connection]
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if error is None:
                self._prepares.append(operation)
                self._schedule()
                return
            self._finish(operation)
            self._in_flight.leave(1, connection.principal.group)
            if isinstance(error, Exception):
                self._refuse_all(connection, [(operation.n,)], operation.kind, _error(error))

        task.add_done_callback(over)

    # --- what is not begun

    def _refuse(self, connection: Connection, requested: FrameOperations) -> None:
        for kind, n, error in requested.refused:
            self._refuse_all(connection, [(n,)], kind, error)

    def _refuse_all(
        self, connection: Connection, requested: Sequence[tuple[int, *tuple[Any, ...]]], kind: str, error: HalfwayError
    ) -> None:
        if not requested:
            return
        status, document = frames.problem_of(error)
        for one in requested:
            self._note_refused(kind, connection, error, one[1] if len(one) > 1 else None)
            connection.answer(frames.Answer(n=one[0], status=status, problem=document))
        self._observer.streamed(kind, status, len(requested))


def _by_principal(waiting: deque[_Operation]) -> list[tuple[Principal, list[_Operation]]]:
    """Take what waits, up to a bound, by who asks for it."""
    found: dict[Principal, list[_Operation]] = {}
    for _ in range(min(len(waiting), _AT_ONCE)):
        one = waiting.popleft()
        found.setdefault(one.connection.principal, []).append(one)
    return list(found.items())


def _error(error: Exception) -> HalfwayError:
    if isinstance(error, HalfwayError):
        return error
    log.error("stream_operation_failed", exc_info=error)
    return InternalError()


_MASKED: Final = 0x80
_LENGTH: Final = 0x7F
_TWO_BYTES: Final = 126
_EIGHT_BYTES: Final = 127
_CONTROL: Final = 0x08


class ArrivingPayload:
    """Follows the headers of frames, and counts the payload of messages.

    Headers and control frames (pings, pongs, closes) do not count. They are not held, and a client may send any number
    of them without ever completing a message.
    """

    def __init__(self) -> None:
        """Start at the header of a frame."""
        self._header = bytearray()
        """What has arrived of the header."""
        self._left = 0
        """Bytes of the payload of this frame that have yet to arrive."""
        self._counts = False

    def size_in(self, data: bytes) -> int:
        """Return how many bytes of `data`, which follows what came before, are payload of messages."""
        found = at = 0
        while at < len(data):
            if not self._left:
                at += self._read_header(data, at)
            taken = min(self._left, len(data) - at)
            self._left -= taken
            at += taken
            if self._counts:
                found += taken
        return found

    def _read_header(self, data: bytes, at: int) -> int:
        """Read more of a header, and return how many bytes of it are in `data`."""
        header, start = self._header, at
        while at < len(data) and (missing := _header_size(header) - len(header)):
            header += data[at : at + missing]
            at = min(at + missing, len(data))
        if len(header) == _header_size(header):
            length = header[1] & _LENGTH
            extended = {_TWO_BYTES: header[2:4], _EIGHT_BYTES: header[2:10]}.get(length)
            self._left = length if extended is None else int.from_bytes(extended)
            self._counts = not header[0] & _CONTROL
            header.clear()
        return at - start


def _header_size(header: bytes | bytearray) -> int:
    """Return the size of a header as far as it is known: its second byte says how long it is."""
    if len(header) < 2:  # noqa: PLR2004 - flags and length
        return 2
    extended = {_TWO_BYTES: 2, _EIGHT_BYTES: 8}.get(header[1] & _LENGTH, 0)
    return 2 + extended + (4 if header[1] & _MASKED else 0)
