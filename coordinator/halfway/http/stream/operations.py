"""The operations of all streams: what they hold, and how their answers are sent together.

What arrives on a WebSocket counts until its message is read.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Protocol, cast

import msgspec
import structlog

from halfway.coordinator.coordinator import Coordinator
from halfway.coordinator.operations import Operation, Waits
from halfway.http.requests.admission import Admission, InFlight, held_s
from halfway.http.responses import InternalError, RefusalLog, status_of
from halfway.http.stream import frames
from halfway.http.stream.frames import Answer, FrameOperations
from halfway.protocol.errors import GroupLimitedError, HalfwayError
from halfway.protocol.principal import Principal

log = structlog.get_logger(__name__)


class RequestObserver(Protocol):
    """Counts requests, and the operations of streams."""

    def answered(self, operation: str, status: int) -> None:
        """Count a request by its operation (`none` if it has none) and status."""

    def streamed(self, operation: str, status: int, count: int) -> None:
        """Count operations that were answered with a status."""


class Connection(Protocol):
    """A connection, as its operations see it."""

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


class _Item(msgspec.Struct, eq=False):
    """One operation of a frame."""

    connection: Connection
    frame: _Frame
    kind: str
    n: int
    request: Any
    confirm: bool = True
    accepted: bool = False
    """True if it was answered 202. Its result is not sent then."""


class StreamOperations:
    """The operations of all streams, from their frames to their answers."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        in_flight: InFlight,
        admission: Admission,
        timeout_s: float,
        hold_s: float,
        observer: RequestObserver,
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
        self._unconfirmed: list[tuple[_Item, Operation[Any]]] = []
        """Ends that want no confirmation, until their turn has come."""
        self._answered: list[tuple[_Item, Operation[Any]]] = []
        """What has been answered in this turn of the event loop."""
        self._waiting: dict[Connection, set[asyncio.Task[None]]] = {}
        """Prepares that wait for a place."""
        self._begun: dict[Connection, set[Operation[Any]]] = {}
        """Prepares without an answer."""

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
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        for n, end, confirm in ends:
            self._begin(_Item(connection, frame, "end", n, end, confirm), deadline)
        admitted = self._admission.take(len(prepares))
        for index, (n, prepare) in enumerate(prepares):
            item = _Item(connection, frame, "prepare", n, prepare)
            if index < admitted:
                self._begin(item, deadline)
            else:
                self._wait(item)

    def forget(self, connection: Connection) -> None:
        """Begin no more for a connection that is lost: nobody would end a transaction that begins now."""
        for task in self._waiting.pop(connection, ()):
            task.cancel()
        for operation in self._begun.pop(connection, ()):
            if operation.waits is Waits.TURN:
                operation.cancel()

    def _begin(self, item: _Item, deadline: float) -> None:
        principal = item.connection.principal
        begin = self._coordinator.end if item.kind == "end" else self._coordinator.prepare
        operation: Operation[Any] = begin(item.request, deadline=deadline, principal=principal)
        operation.add_done_callback(partial(self._take_answer, item))
        if item.kind == "prepare":
            self._begun.setdefault(item.connection, set()).add(operation)
        if not item.confirm:
            if not self._unconfirmed:
                asyncio.get_running_loop().call_soon(self._accept)
            self._unconfirmed.append((item, operation))

    def _accept(self) -> None:
        """Answer 202 to the ends that are on their way and want no confirmation."""
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        accepted = 0
        for item, operation in unconfirmed:
            if operation.waits is Waits.TURN:
                self._unconfirmed.append((item, operation))
            elif operation.result is None:
                item.accepted = True
                item.connection.accept(item.n)
                accepted += 1
        if self._unconfirmed:
            asyncio.get_running_loop().call_soon(self._accept)
        if accepted:
            self._observer.streamed("end", 202, accepted)

    # --- answers

    def _take_answer(self, item: _Item, operation: Operation[Any]) -> None:
        """Send the answers of one turn of the event loop together."""
        if not self._answered:
            asyncio.get_running_loop().call_soon(self._send)
        self._answered.append((item, operation))

    def _send(self) -> None:
        answered, self._answered = self._answered, []
        counts: Counter[tuple[str, int]] = Counter()
        done: Counter[tuple[str, str | None]] = Counter()
        for item, operation in answered:
            done[item.kind, item.connection.principal.group] += 1
            if item.kind == "prepare":
                self._forget_begun(item.connection, operation)
            if not operation.is_cancelled:  # else its connection is lost
                self._send_one(item, operation, counts)
            self._finish(item)
        for (kind, caller), count in done.items():
            self._in_flight.leave(count, caller)
            if kind == "prepare":
                self._admission.leave(count)
        for (kind, status), count in counts.items():
            self._observer.streamed(kind, status, count)

    def _send_one(self, item: _Item, operation: Operation[Any], counts: Counter[tuple[str, int]]) -> None:
        connection, kind, result = item.connection, item.kind, cast("Any", operation.result)
        error = _error(result) if isinstance(result, Exception) else None
        if error is not None:
            self._note_refused(kind, connection, error, item.request)
        if item.accepted:
            connection.settled()
            return
        if error is not None:
            answer = frames.refused(item.n, error)
        elif kind == "end":
            answer = frames.ended(item.n, result)
        else:
            answer = frames.prepared(item.n, result)
        counts[kind, answer.status] += 1
        if isinstance(error, GroupLimitedError):
            # As in REST: it slows down a caller that sends the next prepare at once.
            asyncio.get_running_loop().call_later(held_s(self._hold_s), connection.answer, answer)
        else:
            connection.answer(answer)

    def _forget_begun(self, connection: Connection, operation: Operation[Any]) -> None:
        begun = self._begun.get(connection)
        if begun is not None:
            begun.discard(operation)
            if not begun:
                del self._begun[connection]

    def _note_refused(self, kind: str, connection: Connection, error: HalfwayError, request: object) -> None:
        self._refusals.note(
            f"stream_{kind}",
            status_of(type(error))[0],
            error.code,
            group=getattr(request, "group", None) or connection.principal.group,
            id=getattr(request, "id", None),
            request_id=connection.id,
        )

    def _finish(self, item: _Item) -> None:
        item.request = None
        frame = item.frame
        frame.left -= 1
        if not frame.left:
            self._in_flight.free(frame.size, item.connection.principal.group)

    # --- prepares that wait for a place

    def _wait(self, item: _Item) -> None:
        connection = item.connection
        task = asyncio.get_running_loop().create_task(self._admission.enter(connection.principal.group))
        waiting = self._waiting.setdefault(connection, set())
        waiting.add(task)

        def over(task: asyncio.Task[None]) -> None:
            """Go on, or free what the operation holds: a task that is cancelled before its first step runs nothing."""
            waiting.discard(task)
            if not waiting and self._waiting.get(connection) is waiting:
                del self._waiting[connection]
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if error is None and not connection.lost:
                self._begin(item, asyncio.get_running_loop().time() + self._timeout_s)
                return
            if error is None:  # no client would end a transaction that begins now
                self._admission.leave()
            self._finish(item)
            self._in_flight.leave(1, connection.principal.group)
            if isinstance(error, Exception):
                self._refuse_all(connection, [(item.n,)], item.kind, _error(error))

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


def _error(error: Exception) -> HalfwayError:
    if isinstance(error, HalfwayError):
        return error
    log.error("stream_operation_failed", exc_info=error)
    return InternalError()


_MASKED: Final = 0x80
_FINAL: Final = 0x80
_LENGTH: Final = 0x7F
_TWO_BYTES: Final = 126
_EIGHT_BYTES: Final = 127
_CONTROL: Final = 0x08


MAX_EMPTY_FRAMES: Final = 20
"""How many frames without content a client may send in a second."""
_SHORT: Final = 125
"""The longest payload of a frame without content; more needs a longer header."""


class ArrivingPayload:
    """Follows the headers of frames, and counts the payload of messages.

    Headers and control frames (pings, pongs, closes) do not count as payload: they are not held. But each takes its
    time, and one read may have tens of thousands. So frames without content are counted.
    """

    def __init__(self) -> None:
        """Start at the header of a frame."""
        self._header = bytearray()
        """What has arrived of the header."""
        self._left = 0
        """Bytes of the payload of this frame that have yet to arrive."""
        self._counts = False
        self.empty_frames = 0
        """Control frames, and short fragments that end no message, in this second."""
        self._second = 0

    @property
    def is_flooded(self) -> bool:
        """Whether there have been too many frames without content in this second."""
        return self.empty_frames > MAX_EMPTY_FRAMES

    def size_in(self, data: bytes, now: float = 0.0) -> int:
        """Return how many bytes of `data`, which follows what came before, are payload of messages.

        `now` is in seconds. Stops if there have been too many frames without content.
        """
        if self._second != int(now):
            self._second, self.empty_frames = int(now), 0
        found = at = 0
        while at < len(data) and not self.is_flooded:
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
            if not self._counts or (length <= _SHORT and not header[0] & _FINAL):
                self.empty_frames += 1
            header.clear()
        return at - start


def _header_size(header: bytes | bytearray) -> int:
    """Return the size of a header as far as it is known: its second byte says how long it is."""
    if len(header) < 2:  # noqa: PLR2004 - flags and length
        return 2
    extended = {_TWO_BYTES: 2, _EIGHT_BYTES: 8}.get(header[1] & _LENGTH, 0)
    return 2 + extended + (4 if header[1] & _MASKED else 0)
