"""What all callers share, divided among them: amounts, places, and turns of the event loop.

A caller is here the group of a group's key. All callers without a group (operators, readers, everybody under open
access) count as one.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from halfway.protocol.errors import HalfwayError

_MOST: Final = 2
"""All callers together hold at most this many times the bound."""


class Shares:
    """An amount that is bounded: places, or bytes.

    A caller that is alone may hold all of it. If the bound is reached, a caller that holds less than its share (the
    bound divided by the callers that hold something) still gets more: others who came first do not shut it out.
    """

    def __init__(self, bound: int) -> None:
        """Take the bound; nothing is held."""
        self._bound = bound
        self._held: Counter[str | None] = Counter()
        self.total = 0
        """What all hold."""

    def room(self, caller: str | None) -> int:
        """Return how much a caller may take now."""
        held = self._held.get(caller, 0)
        callers = len(self._held) + (not held)
        left = max(self._bound - self.total, self._bound // callers - held)
        return max(0, min(left, _MOST * self._bound - self.total))

    def take(self, caller: str | None, size: int) -> None:
        if size:
            self._held[caller] += size
            self.total += size

    def leave(self, caller: str | None, size: int) -> None:
        if size:
            self._held[caller] -= size
            self.total -= size
            if not self._held[caller]:
                del self._held[caller]


class _Queues:
    """Futures that wait, by caller: the callers in turn, those of one caller in order."""

    def __init__(self) -> None:
        self._queues: dict[str | None, deque[asyncio.Future[None]]] = {}

    def of(self, caller: str | None) -> int:
        """Return how many of a caller wait."""
        return len(self._queues.get(caller, ()))

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, caller: str | None) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().create_future()
        self._queues.setdefault(caller, deque()).append(future)
        return future

    def discard(self, caller: str | None, future: asyncio.Future[None]) -> None:
        """Remove what waits no more."""
        queue = self._queues.get(caller)
        if queue is not None and future in queue:
            queue.remove(future)
            if not queue:
                del self._queues[caller]

    def pop(self) -> asyncio.Future[None] | None:
        """Return the next one that still waits, None if there is none."""
        while self._queues:
            caller, queue = next(iter(self._queues.items()))
            del self._queues[caller]
            future = queue.popleft()
            if queue:
                self._queues[caller] = queue  # behind the others
            if not future.done():
                return future
        return None


class Places:
    """Places for work, given to the callers in turn."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._waiting = _Queues()
        self.taken = 0
        self._closed: Callable[[], HalfwayError] | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def waiting_of(self, caller: str | None) -> int:
        return self._waiting.of(caller)

    def take(self, wanted: int) -> int:
        """Take as many places as are free if nobody waits, and return how many; `leave` frees each."""
        if self._waiting or self._closed is not None:
            return 0
        granted = min(wanted, max(0, self._places - self.taken))
        self.taken += granted
        return granted

    async def enter(self, caller: str | None, *, until: float) -> None:
        """Take a place, waiting for it until a time on the loop's clock; `leave` frees it.

        Raises:
            TimeoutError: no place was free in time.
            HalfwayError: the reason for which the places were closed.
        """
        if self._closed is not None:
            raise self._closed()
        if self.take(1):
            return
        place = self._waiting.add(caller)
        try:
            async with asyncio.timeout_at(until):
                await place
        except TimeoutError:
            if not _given(place):  # else the place came at the last instant
                raise
        except asyncio.CancelledError:
            if _given(place):
                self.leave()
            raise
        finally:
            self._waiting.discard(caller, place)

    def leave(self, places: int = 1) -> None:
        """Free places, and give them to those that wait."""
        self.taken -= places
        while self.taken < self._places and (place := self._waiting.pop()) is not None:
            place.set_result(None)
            self.taken += 1

    @asynccontextmanager
    async def place(self, caller: str | None, *, until: float) -> AsyncIterator[None]:
        """Hold a place; errors as for `enter`."""
        await self.enter(caller, until=until)
        try:
            yield
        finally:
            self.leave()

    def close(self, reason: Callable[[], HalfwayError]) -> None:
        """Give no more places, and refuse those that wait."""
        self._closed = reason
        while (place := self._waiting.pop()) is not None:
            place.set_exception(reason())


class Turns:
    """Long work in slices: one in a turn of the event loop, two if the queue has just run empty; callers in turn.

    So the loop's pauses do not grow with the requests, and no caller waits for all the work of another.
    """

    def __init__(self) -> None:
        self._waiting = _Queues()
        self._taken = False
        """Whether a slice is done in this turn of the loop."""

    async def next(self, caller: str | None) -> None:
        """Return when one slice may be done; at once if nobody else does one in this turn."""
        if not self._taken:
            self._taken = True
            asyncio.get_running_loop().call_soon(self._pass_on)
            return
        turn = self._waiting.add(caller)
        try:
            await turn
        finally:
            self._waiting.discard(caller, turn)

    def _pass_on(self) -> None:
        turn = self._waiting.pop()
        if turn is None:
            self._taken = False
            return
        turn.set_result(None)
        asyncio.get_running_loop().call_soon(self._pass_on)


def _given(place: asyncio.Future[None]) -> bool:
    return place.done() and not place.cancelled() and place.exception() is None
