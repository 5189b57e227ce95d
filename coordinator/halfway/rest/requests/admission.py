"""Decides which requests and operations of streams are served now, and how much of their bodies is held.

Bodies are read here: headers first, then the bytes, with bounds on size and on slowness. A transaction that was begun
must be ended, or the work was wasted: only prepares are held up here, never ends.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Final

from aiohttp import web

from halfway.domain.errors import OverloadedError, ShuttingDownError
from halfway.rest.requests.structure import demand_few_members
from halfway.rest.responses.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    MalformedJsonError,
    UnsupportedMediaTypeError,
)

JSON: Final = "application/json"
SMALL_BYTES: Final = 16 * 1024
"""A body of up to this size is never refused because of other bodies."""
MIN_BYTES: Final = 80 * 1024
MIN_BYTES_IN_S: Final = 5.0
"""At least this much of a body, or all of it, has to arrive in this time."""
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class InFlight:
    """Requests and operations of streams until they are answered: how many there are, and the bytes of their bodies.

    Only what is wholly received takes a place. Only bytes that have arrived count, not announced ones.
    """

    def __init__(self, *, most: int, max_bytes: int, max_bytes_in_flight: int, timeout_s: float) -> None:
        """Take the bounds on their number, on one body, on all bodies, and on the time of one body."""
        self._most = most
        self._max_bytes = max_bytes
        self._max_in_flight = max_bytes_in_flight
        self._timeout_s = timeout_s
        self.taken = 0
        """Places that are taken."""
        self.bytes = 0
        self.arriving = 0
        """Bytes of frames of streams that are not complete, or not read yet."""

    # --- requests

    async def receive(self, request: web.BaseRequest, deadline: float, *, reads: bool, expected: bool) -> bytes:
        """Return the body of a request, which has a place from then until `answered`; one that is refused has none.

        A body is not read unless the call `reads` one. If it is `expected`, it must have a Content-Type.
        """
        if self.taken >= self._most:
            raise self.refusal()
        body = await self._read(request, deadline, expected=expected) if reads else b""
        if len(body) > SMALL_BYTES:
            try:
                await demand_few_members(body)
            except BaseException:
                self.bytes -= len(body)
                raise
        if self.taken >= self._most:
            self.bytes -= len(body)
            raise self.refusal()
        self.taken += 1
        return body

    def answered(self, body: bytes) -> None:
        """Free the place of a request, and stop counting its body."""
        self.taken -= 1
        self.bytes -= len(body)

    async def _read(self, request: web.BaseRequest, deadline: float, *, expected: bool) -> bytes:
        """Return a body, which counts; a refused one does not."""
        self._judge_head(request, expected=expected)
        if not request.body_exists:
            return b""
        content = request.content
        if content.is_eof() and content.exception() is None:
            self.hold(content.total_bytes)  # a small body arrives with its headers: no wait
            return content.read_nowait()
        body = bytearray()
        try:
            await self._receive(request, body, deadline)
        except BaseException as error:
            self.bytes -= len(body)
            if isinstance(error, TimeoutError):
                raise BodyTimeoutError(
                    f"the body did not arrive within {self._timeout_s:g} s, or less than {MIN_BYTES // 1024} KiB of it "
                    f"in {MIN_BYTES_IN_S:g} s: send it again"
                ) from None
            if isinstance(error, web.RequestPayloadError):
                raise MalformedJsonError("the body is not sent as its headers say") from None
            raise
        return bytes(body)

    async def _receive(self, request: web.BaseRequest, body: bytearray, deadline: float) -> None:
        """Append the bytes that arrive to `body`, and count them."""
        loop = asyncio.get_running_loop()
        content = request.content
        wanted = MIN_BYTES
        async with asyncio.timeout_at(min(deadline, loop.time() + MIN_BYTES_IN_S)) as patience:
            if request.headers.get("Expect", "").lower() == "100-continue" and not content.total_bytes:
                await request.writer.write(_CONTINUE)
                request.writer.output_size = 0
            while chunk := await content.readany():
                body += chunk
                self.bytes += len(chunk)
                self._demand_fitting(len(body), self.bytes)
                if len(body) >= wanted:
                    wanted = len(body) + MIN_BYTES
                    patience.reschedule(min(deadline, loop.time() + MIN_BYTES_IN_S))

    def _judge_head(self, request: web.BaseRequest, *, expected: bool) -> None:
        """Refuse a body by its headers, before it is read."""
        headers = request.headers
        self._demand_fitting(request.content_length or 0, self.bytes)
        if not request.body_exists:
            return
        media_type = headers.get("Content-Type")
        if media_type is None:
            if expected:
                raise UnsupportedMediaTypeError(f"the body has no Content-Type: send it as {JSON}")
        elif media_type != JSON and media_type.partition(";")[0].strip().lower() != JSON:
            raise UnsupportedMediaTypeError(f"Content-Type {media_type[:100]!r} is not taken: send {JSON}")
        if headers.get("Content-Encoding", "identity").lower() != "identity":
            raise UnsupportedMediaTypeError("compressed bodies are not taken: send it as it is")

    # --- operations of streams, and their frames

    def take(self, wanted: int) -> int:
        """Take as many places as are free, and return how many; `leave` frees them."""
        granted = min(wanted, self._most - self.taken)
        self.taken += granted
        return granted

    def leave(self, places: int) -> None:
        """Free places."""
        self.taken -= places

    def refusal(self) -> OverloadedError:
        """Return the error of what finds no place."""
        return OverloadedError(f"{self.taken} requests are in flight here already: try again later")

    def hold(self, size: int) -> None:
        """Count the bytes of a frame, until `free`; OverloadedError if all are too many."""
        self._demand_fitting(size, self.bytes + size)
        self.bytes += size

    def arrive(self, size: int) -> None:
        """Count bytes of a frame that arrives, until `arrived`."""
        self.arriving += size

    @property
    def arriving_too_much(self) -> bool:
        """Whether all frames that arrive are too large together."""
        return self.arriving > self._max_in_flight

    def arrived(self, size: int) -> None:
        """Stop counting a frame that has arrived, or never will."""
        self.arriving -= size

    def free(self, size: int) -> None:
        """Stop counting a frame."""
        self.bytes -= size

    def _demand_fitting(self, size: int, in_flight: int) -> None:
        """Refuse a body if its size, or what has arrived of it, is too large, or all bodies together are."""
        if size > self._max_bytes:
            raise BodyTooLargeError(self._max_bytes)
        if size > SMALL_BYTES and in_flight > self._max_in_flight:
            raise OverloadedError(f"{in_flight} bytes of bodies are in flight here already: try again later")


class Admission:
    """Bounds the prepares that are being served to a quarter of all requests, and those that wait to half.

    A prepare without a place waits for one, in the order of arrival and at most `wait_s`. So a burst is served, and
    callers that retry at once are slowed down instead of keeping the event loop busy with refusals. The last quarter is
    left to requests that are never held up.
    """

    def __init__(self, *, max_requests: int, wait_s: float) -> None:
        """Take the bound on all requests, and how long one may wait, in seconds."""
        self._places = max(1, max_requests // 4)
        self._most = max(1, max_requests * 3 // 4)
        self._wait_s = wait_s
        self._waiting: dict[asyncio.Future[None], None] = {}
        """In the order of arrival."""
        self._closed = False
        self.prepares = 0
        """How many are being served."""

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return len(self._waiting)

    def take(self, wanted: int) -> int:
        """Take as many places as are free if nobody waits, and return how many; `leave` frees each."""
        if self._waiting or self._closed:
            return 0
        granted = min(wanted, max(0, self._places - self.prepares))
        self.prepares += granted
        return granted

    async def enter(self) -> None:
        """Take a place, waiting for it if need be; `leave` frees it.

        Raises:
            OverloadedError: no place was free in time, or too many prepares wait.
            ShuttingDownError: no more places are given.

        """
        if self._closed:
            raise ShuttingDownError
        if self.take(1):
            return
        if self.prepares + len(self._waiting) >= self._most:
            raise OverloadedError(f"{len(self._waiting)} prepares wait for a place already: try again later")
        place = asyncio.get_running_loop().create_future()
        self._waiting[place] = None
        try:
            async with asyncio.timeout(self._wait_s):
                await place
        except TimeoutError:
            if not _given(place):  # else the place came at the last instant
                raise OverloadedError(
                    f"more prepares arrive than are served, and none of {self._places} places became free within "
                    f"{self._wait_s:g} s: try again later"
                ) from None
        except asyncio.CancelledError:
            if _given(place):
                self.leave()
            raise
        finally:
            self._waiting.pop(place, None)

    def leave(self, places: int = 1) -> None:
        """Free places; the prepares that have waited longest get them."""
        self.prepares -= places
        while self._waiting and self.prepares < self._places:
            place = next(iter(self._waiting))
            del self._waiting[place]
            if not place.done():
                place.set_result(None)
                self.prepares += 1

    def close(self) -> None:
        """Give no more places, and refuse the prepares that wait."""
        self._closed = True
        while self._waiting:
            place, _ = self._waiting.popitem()
            if not place.done():
                place.set_exception(ShuttingDownError())


def held_s(most_s: float) -> float:
    """Return for how long to hold one refusal back: between half of the time and all of it."""
    return most_s * random.uniform(0.5, 1.0)  # noqa: S311 - nothing secret depends on it


class HeldRefusals:
    """Holds refusals of a group at its limit back for a time: callers that send the next one at once are slowed down.

    Without it, refusing such callers would take the time that the other groups need. The times differ, or the callers
    would all come back at one moment, and everybody else would wait behind them.
    """

    def __init__(self, *, wait_s: float, most: int) -> None:
        """Take for how long at most, and how many of one group; further ones are answered at once."""
        self._wait_s = wait_s
        self._most = most
        self._held: Counter[str] = Counter()

    async def hold(self, group: str) -> None:
        """Return after the time, or at once if many of this group are held."""
        if self._held[group] >= self._most:
            return
        self._held[group] += 1
        try:
            await asyncio.sleep(held_s(self._wait_s))
        finally:
            self._held[group] -= 1
            if not self._held[group]:
                del self._held[group]


def _given(place: asyncio.Future[None]) -> bool:
    return place.done() and not place.cancelled() and place.exception() is None
