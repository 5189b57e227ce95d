"""The prepares and ends of a process on one stream, and in shared requests where no coordinator accepts a stream."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Collection, Iterator
from http import HTTPStatus
from itertools import chain
from typing import Any, Final

import aiohttp

from halfway.client.calls.stream import Call, Kind, RefusedStreamError, Stream, answer_in, current_span
from halfway.client.calls.transport import (
    AVOID_S,
    SLOWEST_BYTES_PER_S,
    STOPPING,
    DeadlinePassedError,
    NoAnswerError,
    Reply,
    Transport,
)
from halfway.client.errors import ClientClosedError, QueueFullError

log = logging.getLogger(__name__)

_MAX_BYTES: Final = 256 * 1024 * 1024
"""The most bytes of calls without an answer."""
_CONNECT_S: Final = 3.0
_REFUSED_S: Final = 60.0
"""How long calls are sent in requests after no coordinator has accepted a stream."""
_AGE_S: Final = 600.0
"""After this time, or up to twice as long, the next call opens another stream: to a coordinator that was away, or to
whichever the load balancer chooses now."""
_TICK_S: Final = 0.02
"""Calls whose time is over within one tick fail together."""
_OF_ANOTHER_TIME: Final = frozenset({"id_in_future", "outcome_expired"})


class SharedCalls:
    """Sends calls on a stream, and returns to each its own answer.

    The stream is opened for the first call, and again for the next one after it was closed, lost or old. It goes to
    the first coordinator that accepts one. If none does, calls share requests for a while (`Batches`), and one of the
    next calls tries to open a stream again, which no call waits for then.
    """

    def __init__(self, transport: Transport, *, max_waiting: int, stream: bool) -> None:
        """Bound the calls of each kind that wait to be sent. Without `stream`, all calls share requests."""
        self._transport = transport
        self._max_waiting = max_waiting
        self._uses_stream = stream
        self._waiting: dict[Kind, deque[Call]] = {"end": deque(), "prepare": deque()}
        """The calls that wait for the stream, the most urgent kind first."""
        self._batches: dict[Kind, Batches] = {kind: Batches(transport, kind) for kind in self._waiting}
        self._bytes = 0
        self._pauses: set[asyncio.Future[None]] = set()
        """Of callers that will try again. Cancelled when the client is closed."""
        self._is_closed = False
        self._stream: Stream | None = None
        self._streams: dict[Stream, asyncio.Task[None]] = {}
        """The stream, and those that take no more calls and wait for answers."""
        self._opening: asyncio.Task[None] | None = None
        self._by_request = not stream
        """Whether no coordinator has accepted a stream when one was opened last."""
        self._open_at = 0.0
        """From when on the next call opens a stream, unless one is being opened."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")

    async def submit(self, kind: Kind, id: str, body: bytes, deadline: float, attempt_s: float) -> Reply:
        """Send one call, a JSON object, and return its answer. It gets `attempt_s` after it was sent, and its deadline.

        Raises QueueFullError if too many wait, NoAnswerError if no coordinator answered or the deadline passed, and
        ClientClosedError.
        """
        if self._is_closed:
            raise _closed()
        if len(self._waiting[kind]) + len(self._batches[kind].waiting) >= self._max_waiting:
            raise QueueFullError(f"{self._max_waiting} calls of this client already wait for halfway")
        size = len(body)
        if self._bytes and self._bytes + size > _MAX_BYTES:
            raise QueueFullError(f"calls with {self._bytes} bytes of this client already wait for halfway")
        loop = asyncio.get_running_loop()
        call = Call(kind, id, body, deadline, attempt_s, loop.create_future(), current_span(), expires=deadline)
        self._expect_by(deadline)
        self._bytes += size
        try:
            self._add(call)
            return await call.reply
        finally:
            self._bytes -= size

    def under_way(self, id: str) -> list[asyncio.Future[None]]:
        """Return what is done as soon as no prepare of this id, whose caller may have given up, is under way."""
        loop = asyncio.get_running_loop()
        found = []
        for call in self._sent():
            if call.kind == "prepare" and call.id == id:
                call.settled = call.settled or loop.create_future()
                found.append(call.settled)
        return found

    async def pause(self, seconds: float) -> None:
        """Wait; raises ClientClosedError as soon as the client is closed."""
        if self._is_closed:
            raise _closed()
        pause = asyncio.get_running_loop().create_future()
        self._pauses.add(pause)
        try:
            await asyncio.wait([pause], timeout=seconds)
        finally:
            self._pauses.discard(pause)
            pause.cancel()
        if self._is_closed:
            raise _closed()

    async def close(self) -> None:
        """Send no more, and end all calls with ClientClosedError."""
        self._is_closed = True
        for call in (*self._queued(), *self._sent()):
            call.fail(_closed())
        for pause in self._pauses:
            pause.cancel()
        for waiting in self._waiting.values():
            waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
        tasks = [*self._streams.values(), *([] if self._opening is None else [self._opening])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *(each.close() for each in self._batches.values()), return_exceptions=True)

    # --- the way of a call

    def _add(self, call: Call) -> None:
        """Send a call on the stream, or in a request, or let it wait until a stream is open."""
        if self._opening is None and self._uses_stream:
            now = asyncio.get_running_loop().time()
            if now >= self._open_at:
                self._opening = asyncio.get_running_loop().create_task(self._open(call.deadline - now))
        if self._by_request or (self._stream is not None and not self._stream.accepts(call)):
            self._batches[call.kind].add(call)
            return
        self._waiting[call.kind].append(call)
        if self._stream is not None:
            self._stream.wake()

    def next_call(self, kinds: Collection[Kind], most: int) -> Call | None:
        """Return the next call of these kinds for the stream if it has at most so many bytes. Its attempt begins.

        Each coordinator gets its share of the remaining time, and more for a large call.
        """
        for waiting in (self._waiting[kind] for kind in kinds):
            while waiting:
                call = waiting[0]
                if call.reply.done():  # its caller has given up
                    waiting.popleft()
                    continue
                if len(call.body) > most:
                    return None
                waiting.popleft()
                now = asyncio.get_running_loop().time()
                share_s = (call.deadline - now) / self._transport.url_count
                attempt_s = call.attempt_s + len(call.body) / SLOWEST_BYTES_PER_S
                call.expires = now + min(attempt_s, share_s)
                self._expect_by(call.expires)
                return call
        return None

    def take_answer(self, call: Call, reply: Reply) -> None:
        """Give an answer of the stream to its caller. Send a call again that a stopping coordinator has refused.

        The refusal of an id that was made by a wrong clock has no time: a request has the coordinator's in its answer.
        """
        code = reply.body.get("error_code")
        if code == STOPPING and call.connection is not None:
            self.leave(call.connection)
        if code == STOPPING or (code in _OF_ANOTHER_TIME and call.kind == "prepare"):
            call.connection, call.expires = None, call.deadline
            if code == STOPPING:
                self._add(call)
            else:
                self._batches[call.kind].add(call)
        else:
            call.answer(reply)

    # --- the stream

    async def _open(self, within_s: float) -> None:
        """Open a stream to the first coordinator that accepts one; otherwise send the calls that wait in requests."""
        urls = self._transport.urls()
        pause_s = AVOID_S
        for tried, url in enumerate(urls):
            try:
                stream = await Stream.connect(self._transport, url, min(_CONNECT_S, within_s / 2 / (len(urls) - tried)))
            except RefusedStreamError as error:
                log.info("no stream to %s: %s", url, error)
                pause_s = pause_s if error.is_temporary else _REFUSED_S
            except (aiohttp.ClientError, OSError) as error:
                self._transport.avoid(url)
                log.info("no stream to %s: %s", url, str(error) or type(error).__name__)
            except Exception:  # calls wait for the result
                log.exception("no stream to %s", url)
            else:
                self._by_request = False
                self._run(stream)
                break
        else:
            self._open_later(pause_s)
            self._by_request = self._stream is None
        self._opening = None
        self._add_waiting()

    def _run(self, stream: Stream) -> None:
        """Send the next calls on this stream. An older one only brings the answers to what it has sent."""
        if self._stream is not None:
            self._stream.give_up()
        self._stream = stream
        self._open_later(_AGE_S * random.uniform(1, 2))  # noqa: S311 - so that the clients of a service take turns
        task = asyncio.get_running_loop().create_task(stream.run(self))
        self._streams[stream] = task
        task.add_done_callback(lambda _: self._has_ended(stream))

    def _has_ended(self, stream: Stream) -> None:
        del self._streams[stream]
        if stream.is_refused and self._stream is stream:
            self._by_request = True
        self.leave(stream)

    def _open_later(self, after_s: float) -> None:
        self._open_at = asyncio.get_running_loop().time() + after_s

    def leave(self, stream: Stream) -> None:
        """Use another stream from now on; this one only brings the answers to what it has sent."""
        stream.give_up()
        if self._stream is stream:
            self._stream = None
            if self._by_request:
                self._open_later(_REFUSED_S)
            elif stream.answered_at:
                self._open_later(0)
            else:  # a proxy may upgrade, and cut or hold what follows
                self._by_request = True
                self._open_later(AVOID_S)
            self._add_waiting()

    def _add_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {kind: deque() for kind in self._waiting}
        for call in chain(*waiting.values()):
            self._add(call)

    # --- time

    def _expect_by(self, at: float) -> None:
        """Look at the calls at this time, or a tick later."""
        if at < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = at
            self._timer = asyncio.get_running_loop().call_at(at, self._look_at_time)

    def _look_at_time(self) -> None:
        """Fail the calls whose time is over."""
        now = asyncio.get_running_loop().time()
        self._timer, self._timer_at = None, float("inf")
        left = float("inf")
        for call in [call for call in chain(self._queued(), self._sent()) if not call.reply.done()]:
            if call.expires > now:
                left = min(left, call.expires)
            elif call.deadline <= now:
                call.fail(DeadlinePassedError("the deadline passed before an answer came"))
                self._suspect(call)
            else:
                self._suspect(call)
                url = call.connection.url if call.connection is not None else ""
                call.fail(NoAnswerError(f"{url}: no answer within {now - call.sent_at:.1f} s"))
        if left < float("inf"):
            self._expect_by(max(left, now + _TICK_S))

    def _suspect(self, call: Call) -> None:
        """Leave the stream of a call without an answer, if another coordinator may answer, or if it has become silent.

        What keeps one coordinator from answering, such as a broker that it cannot reach, may not concern another.
        """
        stream = call.connection
        if stream is not None and (self._transport.url_count > 1 or stream.answered_at < call.sent_at):
            self._transport.avoid(stream.url)
            self.leave(stream)

    def _queued(self) -> Iterator[Call]:
        for kind, waiting in self._waiting.items():
            yield from waiting
            yield from self._batches[kind].waiting

    def _sent(self) -> Iterator[Call]:
        for stream in self._streams:
            yield from stream.sent.values()
        for batches in self._batches.values():
            yield from batches.sent


def _closed() -> ClientClosedError:
    return ClientClosedError("this client was closed during the call: check-back resolves its transaction")


_MAX_CALLS: Final = 100
_MAX_BATCH_BYTES: Final = 1024 * 1024
"""The size limit of one request. A call that is larger is sent alone."""
_MAX_REQUESTS: Final = 4
"""The limit of requests under way. Calls that arrive in the meantime share the next request."""

_REFUSED_TOGETHER: Final = {
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
}
"""The refusals of a body, such as one with too many fields. Each half is sent again, so that no call is refused because
of its neighbours."""


class Batches:
    """Sends calls of one kind, and returns to each its own answer.

    If fewer than `_MAX_REQUESTS` requests are under way, a call is sent in the same turn of the event loop, so a
    single caller never waits for others. Prepares and ends have separate batches, because an end may have to wait
    for its topic and must not delay prepares.
    """

    def __init__(self, transport: Transport, kind: Kind) -> None:
        self._transport = transport
        self._kind = kind
        self.waiting: deque[Call] = deque()
        self.sent: set[Call] = set()
        """The calls whose request is under way, also those whose caller has given up."""
        self._under_way: set[asyncio.Task[None]] = set()
        self._is_scheduled = False

    def add(self, call: Call) -> None:
        """Send a call with all others that are added in this turn of the event loop."""
        self.waiting.append(call)
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send_waiting)

    async def close(self) -> None:
        """Send no more, and cancel the requests under way. The client ends the callers."""
        self.waiting.clear()
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    def _send_waiting(self) -> None:
        self._is_scheduled = False
        while len(self._under_way) < _MAX_REQUESTS and (calls := self._next_calls()):
            self.sent.update(calls)
            task = asyncio.get_running_loop().create_task(self._send(calls))
            self._under_way.add(task)
            task.add_done_callback(self._on_done)

    def _next_calls(self) -> list[Call]:
        calls: list[Call] = []
        size = 0
        while self.waiting and len(calls) < _MAX_CALLS:
            call = self.waiting[0]
            if calls and size + len(call.body) > _MAX_BATCH_BYTES:
                break
            self.waiting.popleft()
            if not call.reply.done():  # its caller still waits
                calls.append(call)
                size += len(call.body)
        return calls

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._send_waiting()

    async def _send(self, calls: list[Call]) -> None:
        try:
            await self._send_one(calls)
        finally:
            self.sent.difference_update(calls)
            for call in calls:
                call.settle()

    async def _send_one(self, calls: list[Call]) -> None:
        body = b'{"%s":[%s]}' % (self._kind.encode(), b",".join(call.body for call in calls))
        try:
            reply = await self._transport.send(
                "POST",
                "/v1/batch",
                body,
                traces=",".join(call.traceparent for call in calls).rstrip(","),
                deadline=max(call.deadline for call in calls),
                attempt_s=max(call.attempt_s for call in calls),
            )
            if reply.status in _REFUSED_TOGETHER and len(calls) > 1:
                middle = len(calls) // 2
                await self._send_one(calls[:middle])
                await self._send_one(calls[middle:])
                return
            if reply.status == HTTPStatus.OK:
                self._transport.ids.learn_shards(reply.body)
            answers = _answers(reply, self._kind, len(calls))
        except NoAnswerError as error:
            for call in calls:
                call.fail(error)
            return
        for call, answer in zip(calls, answers, strict=True):
            call.answer(answer)


def _answers(reply: Reply, kind: str, count: int) -> list[Reply]:
    """Return the answer to each call; a refusal of the whole request is the answer to all of them."""
    listed: Any = reply.body.get(kind)
    if reply.status != HTTPStatus.OK or not isinstance(listed, list) or len(listed) != count:
        status = HTTPStatus.BAD_GATEWAY if reply.status == HTTPStatus.OK else reply.status
        return [Reply(status=status, body=reply.body, retry_after_s=reply.retry_after_s)] * count
    return [answer_in(item) for item in listed]
