"""One connection of the stream: reads frames, writes answers, and closes in order (docs/api.md).

It is sent the checks of its groups, as many at a time as it wants (docs/api.md#checks). All open streams share
bounds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Final

import structlog
from aiohttp import WSMsgType, web

from halfway.coordinator.checkback.fetching import LOOK_EVERY_S
from halfway.coordinator.coordinator import Coordinator
from halfway.coordinator.logging import LogSummary
from halfway.coordinator.requests import LeasedCheck
from halfway.http.handlers.handlers import SUBPROTOCOL, Call
from halfway.http.requests.admission import SMALL_BYTES, ApiLimits, InFlight
from halfway.http.requests.models import Shards, StreamChecks
from halfway.http.requests.validation import cause_of, demand_few_members
from halfway.http.responses import InternalError, invalid
from halfway.http.stream import frames
from halfway.http.stream.frames import Answer, FrameReader, ServerFrame
from halfway.http.stream.operations import ArrivingPayload, StreamOperations
from halfway.protocol.errors import (
    ForbiddenError,
    HalfwayError,
    KafkaUnavailableError,
    OverloadedError,
    RetryableError,
    ShuttingDownError,
    UnauthenticatedError,
)
from halfway.protocol.principal import Permission, Principal

log = structlog.get_logger(__name__)

_WAIT_S: Final = 30.0
"""How long one request for checks waits for the first."""
_PAUSE_S: Final = 0.05
"""The pause before checks are fetched again if there were none."""
_CLOSE_S: Final = 2.0
"""How long a client may take to answer a close frame, or to read what comes before the one that breaks it off."""
_FULL_PAUSE_S: Final = 0.5
"""The same if none may be sent, as clients do not read what they were sent."""


class Subscription:
    """The checks of one group on one connection."""

    def __init__(self, coordinator: Coordinator, stream: Stream, group: str) -> None:
        self._coordinator = coordinator
        self._stream = stream
        self.group = group
        self._most = 0
        self._out: dict[str, float] = {}
        """The checks that are with the client, by their ids, each until its lease has passed."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def want(self, most: int) -> None:
        """Have at most so many checks with the client from now on.

        Raises HalfwayError: the group has no checks to fetch, or the caller may not fetch them; nothing is changed.
        """
        await self._leased(0, wait_s=0)
        self._most = most
        self._changed.set()
        if self._task is None or self._task.done():  # it may have ended while the group was looked up here
            self._task = asyncio.get_running_loop().create_task(self._run())

    def answered(self, check_id: str) -> None:
        if self._out.pop(check_id, None) is not None:
            self._changed.set()

    def end(self) -> None:
        """Send no more checks; those that were sent stay with the client until their leases have passed."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while True:
                await self._stream.reading()
                free = await self._free()
                found = await self._try(free)
                if found:
                    await self._stream.push(found)
                else:
                    await asyncio.sleep(_PAUSE_S if self._stream.reads else _FULL_PAUSE_S)
        except HalfwayError as error:
            self._stream.unsubscribed(self, error)
        except Exception:
            log.exception("stream_subscription_failed", group=self.group)
            self._stream.unsubscribed(self, InternalError())

    async def _try(self, free: int) -> Sequence[LeasedCheck]:
        try:
            return await self._leased(free, wait_s=_WAIT_S)
        except RetryableError as error:
            await asyncio.sleep(error.retry_after_s)
            return ()

    async def _leased(self, free: int, *, wait_s: float) -> Sequence[LeasedCheck]:
        found = await self._coordinator.lease_checks(
            self.group,
            at_most=free,
            wait_s=wait_s,
            principal=self._stream.principal,
            is_connected=lambda: self._stream.reads,
        )
        until = asyncio.get_running_loop().time() + self._coordinator.limits.lease_s
        self._out.update((check.check_id, until) for check in found)
        return found

    async def _free(self) -> int:
        """Return how many more checks the client may get, once it may get any."""
        while True:
            self._changed.clear()
            now = asyncio.get_running_loop().time()
            for check_id in [check_id for check_id, until in self._out.items() if until <= now]:
                del self._out[check_id]
            if (free := self._most - len(self._out)) > 0:
                return free
            try:
                async with asyncio.timeout_at(min(self._out.values(), default=None)):
                    await self._changed.wait()
            except TimeoutError:
                pass


GOING_AWAY: Final = 1001
BINARY: Final = 1003
TRY_AGAIN_LATER: Final = 1013
BAD_FRAME: Final = 4400
NOT_ALLOWED: Final = 4403
MAX_GROUPS: Final = 100
"""Groups whose checks one connection may get."""


class Stream:
    """One connection."""

    def __init__(
        self,
        socket: web.WebSocketResponse,
        *,
        call: Call,
        reader: FrameReader,
        operations: StreamOperations,
        limits: ApiLimits,
        on_frame: Callable[[Stream, int], None],
    ) -> None:
        """Take the connection of a handshake; `on_frame` is called with the size of each frame that is read."""
        self.principal = call.principal
        self.id = call.id
        self.lost = False
        self.socket = socket
        self.arriving = ArrivingPayload()
        self.unread_bytes = 0
        """What has arrived of messages that are not read yet."""
        self._request = call.request
        self._cause = cause_of(call.request.headers)
        self._coordinator = call.site.coordinator
        self._authority = call.site.coordinator.authority
        self._has_room = partial(call.site.unsent.has_room, call.principal.group)
        self._reader = reader
        self._operations = operations
        self._on_frame = on_frame
        self._open: set[int] = set()
        """The numbers of the operations that are not answered yet."""
        self._max_in_flight = min(limits.max_stream_operations, limits.max_requests)
        hello = frames.Hello(
            max_frame_bytes=limits.max_body_bytes,
            max_frame_operations=limits.max_batch_items,
            max_in_flight=self._max_in_flight,
            timeout_s=limits.request_timeout_s,
            heartbeat_s=limits.heartbeat_s,
        )
        self._answers: list[Answer] = []
        self._shards = Shards.of(self._coordinator.shards)
        self._frames: list[bytes] = [ServerFrame(hello=hello, shards=self._shards).encoded()]
        """What is sent before the answers."""
        self._work = asyncio.Event()
        self._work.set()
        self._flowing = asyncio.Event()
        """Not set while the client does not read what it is sent."""
        self._flowing.set()
        self._room = asyncio.Event()
        self._unconfirmed = 0
        """Ends that were answered 202 and are not written yet."""
        self._stopping = False
        self._closing = False
        self._close_with: int | None = None
        self._subscriptions: dict[str, Subscription] = {}
        self._subscribing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve the connection until either side closes it."""
        writing = asyncio.get_running_loop().create_task(self._write())
        self._spawn(self._watch())
        try:
            await self._read()
            if self._close_with is not None or self._closing:
                await writing
        finally:
            self.lost = True
            self._operations.forget(self)
            for subscription in self._subscriptions.values():
                subscription.end()
            for task in (writing, *self._tasks):
                task.cancel()

    def stop(self) -> None:
        """Take no more operations, answer what is in flight, and close."""
        if not self._stopping:
            self._stopping = True
            for subscription in self._subscriptions.values():
                subscription.end()
            self._say(ServerFrame(closing=frames.Closing(detail="this instance is stopping: connect to another one")))

    # --- reading

    async def _read(self) -> None:
        while self._close_with is None and not self.lost:
            if self._full:
                self._room.clear()
                await self._room.wait()
                continue
            message = await self.socket.receive()
            if message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
                self._on_frame(self, len(message.data))
            if message.type is WSMsgType.TEXT:
                try:
                    self._authority.require(self.principal, Permission.STREAM)
                    await self._take(message.data)
                except (UnauthenticatedError, ForbiddenError) as error:
                    self._break_off(error, NOT_ALLOWED)
                except KafkaUnavailableError as error:
                    self._break_off(error, TRY_AGAIN_LATER)
                except HalfwayError as error:
                    self._break_off(error, BAD_FRAME)
            elif message.type is WSMsgType.BINARY:
                self._break_off(invalid([("", "a binary message: send text")]), BINARY)
            else:
                return

    async def _watch(self) -> None:
        """Say when other shards are served here, and break off once the caller's key is revoked or has expired."""
        while self._close_with is None:
            await asyncio.sleep(LOOK_EVERY_S)
            if (shards := Shards.of(self._coordinator.shards)) != self._shards:
                self._shards = shards
                self._say(ServerFrame(shards=shards))
            try:
                self._authority.require(self.principal, Permission.STREAM)
            except (UnauthenticatedError, ForbiddenError) as error:
                self._break_off(error, NOT_ALLOWED)
            except KafkaUnavailableError:
                pass  # its next frame is refused

    @property
    def _full(self) -> bool:
        return len(self._open) + self._unconfirmed + len(self._answers) >= self._max_in_flight

    async def _take(self, data: bytes) -> None:
        if len(data) > SMALL_BYTES:
            await demand_few_members(data)
        requested = self._reader.read(data, self._cause)
        numbers = requested.numbers
        known = len(self._open)
        self._open.update(numbers)
        if len(self._open) < known + len(numbers):
            raise invalid([("n", "the number of an operation that is not answered yet: choose another")])
        if self._stopping:
            self._refuse(numbers, ShuttingDownError())
            return
        for _, end, _ in requested.ends:
            if end.check_id is not None:
                for subscription in self._subscriptions.values():
                    subscription.answered(end.check_id)
        self._operations.add(self, requested, len(data))
        for n, wanted in requested.checks:
            self._spawn(self._subscribe(n, wanted))

    def _refuse(self, numbers: Sequence[int], error: HalfwayError) -> None:
        for n in numbers:
            self.answer(frames.refused(n, error))

    # --- checks

    async def _subscribe(self, n: int, wanted: StreamChecks) -> None:
        async with self._subscribing:
            try:
                await self._subscribed(wanted)
            except HalfwayError as error:
                self.answer(frames.refused(n, error))
            else:
                self.answer(frames.subscribed(n, wanted))

    async def _subscribed(self, wanted: StreamChecks) -> None:
        subscription = self._subscriptions.get(wanted.group)
        if subscription is None:
            if len(self._subscriptions) >= MAX_GROUPS:
                raise OverloadedError(f"this stream gets the checks of {MAX_GROUPS} groups already: open another")
            subscription = Subscription(self._coordinator, self, wanted.group)
        await subscription.want(wanted.max)
        if wanted.max:
            self._subscriptions[wanted.group] = subscription
        else:
            subscription.end()
            self._subscriptions.pop(wanted.group, None)

    @property
    def reads(self) -> bool:
        """Return whether this client is connected and reads, and all clients together read enough."""
        return not self.lost and not self._stopping and self._flowing.is_set() and self._has_room()

    async def reading(self) -> None:
        """Return once the client has read what it was sent."""
        await self._flowing.wait()

    async def push(self, checks: Sequence[LeasedCheck]) -> None:
        self._frames.append(await frames.pushed(checks, partial(self._coordinator.turns.next, self.principal.group)))
        self._work.set()

    def unsubscribed(self, subscription: Subscription, error: HalfwayError) -> None:
        """Notify the client that it gets no more checks of a group."""
        if isinstance(error, UnauthenticatedError):
            self._break_off(error, NOT_ALLOWED)
            return
        if self._subscriptions.get(subscription.group) is subscription:
            del self._subscriptions[subscription.group]
        _, document = frames.problem_of(error)
        self._say(ServerFrame(ended=frames.Ended(group=subscription.group, problem=document)))

    # --- writing

    def answer(self, answer: Answer) -> None:
        """Send an answer, unless the connection is lost."""
        self._open.discard(answer.n)
        if not self.lost:
            if not self._answers:
                self._work.set()
            self._answers.append(answer)

    def accept(self, n: int) -> None:
        """Answer an end that wants no confirmation; `settled` follows."""
        self._unconfirmed += 1
        self.answer(frames.accepted(n))

    def settled(self) -> None:
        """Note that an accepted end is done."""
        self._unconfirmed -= 1
        self._room.set()

    def _say(self, frame: ServerFrame) -> None:
        self._frames.append(frame.encoded())
        self._work.set()

    def _break_off(self, error: HalfwayError, code: int) -> None:
        """Send the reason to the client, and close. Nothing more is read."""
        if self._close_with is None:
            _, document = frames.problem_of(error)
            self._say(ServerFrame(problem=document))
            self._close_with = code
            self._room.set()
            self._spawn(self._abort_later())

    async def _abort_later(self) -> None:
        """End the connection if the client does not read what comes before the close."""
        await asyncio.sleep(_CLOSE_S)
        if (transport := self._request.transport) is not None:
            transport.abort()

    async def _write(self) -> None:
        try:
            while True:
                while self._frames or self._answers:
                    self._flowing.clear()
                    for data in self._taken():
                        await self.socket.send_frame(data, WSMsgType.TEXT)
                    self._flowing.set()
                self._room.set()
                if (code := self._ends_with()) is not None:
                    self._closing = True
                    await self.socket.close(code=code)
                    return
                self._work.clear()
                await self._work.wait()
        except ConnectionError:
            self.lost = True
            self._room.set()

    def _ends_with(self) -> int | None:
        """Return the code to close with, None if the connection goes on."""
        if self._close_with is None and self._stopping and not self._open:
            return GOING_AWAY
        return self._close_with

    def _taken(self) -> Sequence[bytes]:
        found, self._frames = self._frames, []
        answers, self._answers = self._answers, []
        if answers:
            found.append(ServerFrame(answers=answers).encoded())
        return found

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Streams:
    """Every open stream of this instance."""

    def __init__(self, operations: StreamOperations, in_flight: InFlight, limits: ApiLimits) -> None:
        """Take what does the operations of all streams, and what counts their bytes; nothing is open."""
        self._operations = operations
        self._in_flight = in_flight
        self._limits = limits
        self._open: dict[Stream, web.BaseRequest] = {}
        self._cut_off = LogSummary(log, "info", "stream_cut_off")

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._open)

    def demand_room(self, principal: Principal) -> None:
        """Raise OverloadedError if no more may be opened, or no more by a group that has half of all."""
        if len(self._open) >= self._limits.max_streams:
            raise OverloadedError(f"{len(self._open)} streams are open here already: try again later")
        if (group := principal.group) is None:
            return
        of_group = sum(stream.principal.group == group for stream in self._open)
        if of_group >= max(1, self._limits.max_streams // 2):
            raise OverloadedError(f"{of_group} streams of group {group!r} are open here already: others need the rest")

    def make(self, call: Call) -> Stream:
        """Make the stream of a handshake that was accepted; `serve` opens it."""
        limits = self._limits
        socket = web.WebSocketResponse(
            timeout=_CLOSE_S,
            protocols=(SUBPROTOCOL,),
            compress=False,
            max_msg_size=limits.max_body_bytes + 1,  # aiohttp refuses a message of this size
            heartbeat=limits.heartbeat_s,
            decode_text=False,
        )
        return Stream(
            socket,
            call=call,
            reader=FrameReader(call.site.validation, max_operations=limits.max_batch_items),
            operations=self._operations,
            limits=limits,
            on_frame=self.read,
        )

    async def serve(self, stream: Stream, request: web.BaseRequest) -> web.StreamResponse:
        self._open[stream] = request
        log.debug("stream_opened", principal=str(stream.principal), remote=request.remote)
        try:
            await stream.socket.prepare(request)
            await stream.run()
        finally:
            del self._open[stream]
            self.read(stream, stream.unread_bytes)
            log.debug("stream_closed", principal=str(stream.principal), code=stream.socket.close_code)
            if not stream.socket.closed and request.transport is not None:
                request.transport.abort()
        return stream.socket

    def received(self, stream: Stream, data: bytes) -> bool:
        """Count what has arrived for a stream, and return whether it may go on.

        One that sends too many frames without content is cut off: each would take its time from other clients.
        If the unread frames of all streams are too large, the largest one of the caller that has most of them is cut
        off: the streams of others go on.
        """
        size = stream.arriving.size_in(data, asyncio.get_running_loop().time())
        if stream.arriving.is_flooded:
            self._cut_off.note({"reason": "empty_frames", "principal": str(stream.principal)})
            return False
        stream.unread_bytes += size
        self._in_flight.arrive(size)
        while self._in_flight.arriving_too_much and (largest := self._largest()) is not None:
            self._cut_off.note(
                {"reason": "frames_too_large", "principal": str(largest.principal)},
                unread_bytes=largest.unread_bytes,
                of_all=self._in_flight.arriving,
            )
            self.read(largest, largest.unread_bytes)
            if largest is stream:
                return False
            if (transport := self._open[largest].transport) is not None:
                transport.abort()
        return True

    def _largest(self) -> Stream | None:
        """Return the stream to cut off, None if no stream has more than a small frame."""
        of_groups: Counter[str | None] = Counter()
        for stream in self._open:
            of_groups[stream.principal.group] += stream.unread_bytes
        large = [stream for stream in self._open if stream.unread_bytes > SMALL_BYTES]
        return max(large, key=lambda one: (of_groups[one.principal.group], one.unread_bytes), default=None)

    def read(self, stream: Stream, size: int) -> None:
        self._in_flight.arrived(size)
        stream.unread_bytes -= size

    def stop(self) -> None:
        """Let every stream answer what is in flight, and close."""
        for stream in self._open:
            stream.stop()
