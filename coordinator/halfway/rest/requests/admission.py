"""Decides which operations are served now, and which prepares wait for a place or are refused.

A transaction that was begun must be ended, or the work was wasted: only prepares are held up here, never ends.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from halfway.domain.errors import OverloadedError, ShuttingDownError


class Places:
    """Bounds requests that are wholly received, and operations of streams, until they are answered."""

    def __init__(self, most: int) -> None:
        """Take the bound."""
        self.most = most
        self.taken = 0

    def take(self, wanted: int) -> int:
        """Take as many places as are free, and return how many; `leave` frees them."""
        granted = min(wanted, self.most - self.taken)
        self.taken += granted
        return granted

    def leave(self, places: int) -> None:
        """Free places."""
        self.taken -= places

    def refusal(self) -> OverloadedError:
        """Return the error of what finds no place."""
        return OverloadedError(f"{self.taken} requests are in flight here already: try again later")


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

    def leave(self) -> None:
        """Free a place; the prepare that has waited longest gets it."""
        self.prepares -= 1
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
