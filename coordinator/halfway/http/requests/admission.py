"""Decides which requests and operations of streams are served now, and how much of their bodies is held.

Bodies are read here: headers first, then the bytes, with bounds on size and on slowness. A transaction that was begun
must be ended, or the work was wasted: only prepares are held up here, never ends.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from halfway.coordinator.fairness import Places, Shares
from halfway.coordinator.requests import Count, Seconds
from halfway.http.requests.validation import demand_few_members
from halfway.http.responses import BodyTimeoutError, BodyTooLargeError, MalformedJsonError, UnsupportedMediaTypeError
from halfway.protocol.errors import OverloadedError, ShuttingDownError

JSON: Final = "application/json"
SMALL_BYTES: Final = 16 * 1024
"""A body of up to this size is never refused because of other bodies."""
MIN_BYTES: Final = 80 * 1024
MIN_BYTES_IN_S: Final = 5.0
"""At least this much of a body, or all of it, has to arrive in this time."""
Body = bytes
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """The settings of the interface, in seconds, bytes and counts."""

    request_timeout_s: Seconds = 15.0
    """The time-out of every request; storing a half may take a third of it, at most 5 s."""
    max_requests: Count = 4096
    """Requests in flight; more are answered with 429."""


@dataclass(frozen=True, kw_only=True)
class ApiLimits(ApiSettings):
    """The limits of the interface: the settings, and what nobody sets."""

    max_body_bytes: int = 8 * 1024 * 1024
    prepare_wait_s: float = 1.0
    """How long a prepare may wait for a place under overload; after that it is answered with 429."""
    max_batch_items: int = 1000
    max_body_bytes_in_flight: int = 256 * 1024 * 1024
    max_streams: int = 1000
    max_stream_operations: int = 1024
    """Operations of one stream that are not answered yet."""
    stream_heartbeat_s: float | None = None

    @property
    def heartbeat_s(self) -> float:
        """After this silence the client of a stream is pinged. One operation may delay its answer."""
        return self.stream_heartbeat_s or 2 * self.request_timeout_s + 10


class InFlight:
    """Requests and operations of streams until they are answered: how many there are, and the bytes of their bodies.

    Only what is wholly received takes a place. Only bytes that have arrived count, not announced ones. A caller that
    holds less than its share of places or bytes is not refused because of others (`Shares`).
    """

    def __init__(self, *, most: int, max_bytes: int, max_bytes_in_flight: int, timeout_s: float) -> None:
        """Take the bounds on their number, on one body, on all bodies, and on the time of one body."""
        self._places = Shares(most)
        self._max_bytes = max_bytes
        self._max_in_flight = max_bytes_in_flight
        self._bytes = Shares(max_bytes_in_flight)
        self._timeout_s = timeout_s
        self.arriving = 0
        """Bytes of frames of streams that are not complete, or not read yet."""

    @property
    def taken(self) -> int:
        return self._places.total

    @property
    def bytes(self) -> int:
        return self._bytes.total

    # --- requests

    async def receive(
        self, request: web.BaseRequest, deadline: float, caller: str | None, *, reads: bool, expected: bool
    ) -> Body:
        """Return the body of a request, which has a place from then until `answered`; one that is refused has none.

        A body is not read unless the call `reads` one. If it is `expected`, it must have a Content-Type.
        """
        if not self._places.room(caller):
            raise self.refusal()
        body = await self._read(request, deadline, caller, expected=expected) if reads else b""
        if len(body) > SMALL_BYTES:
            try:
                await demand_few_members(body)
            except BaseException:
                self._bytes.leave(caller, len(body))
                raise
        if not self._places.room(caller):
            self._bytes.leave(caller, len(body))
            raise self.refusal()
        self._places.take(caller, 1)
        return body

    def answered(self, body: Body, caller: str | None) -> None:
        """Free the place of a request, and stop counting its body."""
        self._places.leave(caller, 1)
        self._bytes.leave(caller, len(body))

    async def _read(self, request: web.BaseRequest, deadline: float, caller: str | None, *, expected: bool) -> Body:
        """Return a body, which counts; a refused one does not."""
        self._judge_head(request, caller, expected=expected)
        if not request.body_exists:
            return b""
        content = request.content
        if content.is_eof() and content.exception() is None:
            self.hold(content.total_bytes, caller)  # a small body arrives with its headers: no wait
            return content.read_nowait()
        body = bytearray()
        try:
            await self._receive(request, body, deadline, caller)
        except BaseException as error:
            self._bytes.leave(caller, len(body))
            if isinstance(error, TimeoutError):
                raise BodyTimeoutError(
                    f"the body did not arrive within {self._timeout_s:g} s, or less than {MIN_BYTES // 1024} KiB of it "
                    f"in {MIN_BYTES_IN_S:g} s: send it again"
                ) from None
            if isinstance(error, web.RequestPayloadError):
                raise MalformedJsonError("the body is not sent as its headers say") from None
            raise
        return bytes(body)

    async def _receive(self, request: web.BaseRequest, body: bytearray, deadline: float, caller: str | None) -> None:
        """Append the bytes that arrive to `body`, and count them."""
        loop = asyncio.get_running_loop()
        content = request.content
        wanted = MIN_BYTES
        async with asyncio.timeout_at(min(deadline, loop.time() + MIN_BYTES_IN_S)) as patience:
            if request.headers.get("Expect", "").lower() == "100-continue" and not content.total_bytes:
                await request.writer.write(_CONTINUE)
                request.writer.output_size = 0
            while chunk := await content.readany():
                self._demand_fitting(len(body) + len(chunk), len(chunk), caller)
                self._bytes.take(caller, len(chunk))
                body += chunk
                if len(body) >= wanted:
                    wanted = len(body) + MIN_BYTES
                    patience.reschedule(min(deadline, loop.time() + MIN_BYTES_IN_S))

    def _judge_head(self, request: web.BaseRequest, caller: str | None, *, expected: bool) -> None:
        """Refuse a body by its headers, before it is read."""
        headers = request.headers
        self._demand_fitting(request.content_length or 0, 1, caller)
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

    def take(self, wanted: int, caller: str | None) -> int:
        """Take as many places as are free for this caller, and return how many; `leave` frees them."""
        granted = min(wanted, self._places.room(caller))
        self._places.take(caller, granted)
        return granted

    def leave(self, places: int, caller: str | None) -> None:
        self._places.leave(caller, places)

    def refusal(self) -> OverloadedError:
        return OverloadedError(f"{self.taken} requests are in flight here already: try again later")

    def hold(self, size: int, caller: str | None) -> None:
        """Count the bytes of a frame, until `free`; OverloadedError if all are too many."""
        self._demand_fitting(size, size, caller)
        self._bytes.take(caller, size)

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

    def free(self, size: int, caller: str | None) -> None:
        self._bytes.leave(caller, size)

    def _demand_fitting(self, size: int, further: int, caller: str | None) -> None:
        """Refuse a body if its size, or what has arrived of it, is too large, or all bodies together are.

        `further` bytes of it are not counted yet.
        """
        if size > self._max_bytes:
            raise BodyTooLargeError(self._max_bytes)
        if size > SMALL_BYTES and further > self._bytes.room(caller):
            raise OverloadedError(f"{self.bytes} bytes of bodies are in flight here already: try again later")


class Admission:
    """Bounds the prepares that are being served to a quarter of all requests, and those that wait to half.

    A prepare without a place waits for one, at most `wait_s`; the callers get places in turn, the prepares of one
    caller in the order of arrival. So a burst is served, and callers that retry at once are slowed down instead of
    keeping the event loop busy with refusals. The last quarter is left to requests that are never held up.
    """

    def __init__(self, *, max_requests: int, wait_s: float) -> None:
        """Take the bound on all requests, and how long one may wait, in seconds."""
        self._size = max(1, max_requests // 4)
        self._places = Places(self._size)
        self._waiting = Shares(max(0, max_requests * 3 // 4 - self._size))
        self._wait_s = wait_s

    @property
    def waiting(self) -> int:
        return self._places.waiting

    @property
    def prepares(self) -> int:
        return self._places.taken

    def take(self, wanted: int) -> int:
        """Take as many places as are free if nobody waits, and return how many; `leave` frees each."""
        return self._places.take(wanted)

    async def enter(self, caller: str | None) -> None:
        """Take a place, waiting for it if need be; `leave` frees it.

        Raises:
            OverloadedError: no place was free in time, or too many prepares wait.
            ShuttingDownError: no more places are given.
        """
        if self.take(1):
            return
        if not self._waiting.room(caller):
            raise OverloadedError(f"{self._places.waiting} prepares wait for a place already: try again later")
        self._waiting.take(caller, 1)
        try:
            await self._places.enter(caller, until=asyncio.get_running_loop().time() + self._wait_s)
        except TimeoutError:
            raise OverloadedError(
                f"more prepares arrive than are served, and none of {self._size} places became free within "
                f"{self._wait_s:g} s: try again later"
            ) from None
        finally:
            self._waiting.leave(caller, 1)

    def leave(self, places: int = 1) -> None:
        """Free places; the prepares that wait get them."""
        self._places.leave(places)

    def close(self) -> None:
        """Give no more places, and refuse the prepares that wait."""
        self._places.close(ShuttingDownError)


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
