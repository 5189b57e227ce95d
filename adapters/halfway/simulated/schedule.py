"""Time, chance and turns of a simulated cluster: one clock, one generator, one lock.

Everything that happens later (a marker, a retry, a time-out) is an entry of the schedule. Whoever waits runs what is
due, so the broker has no threads of its own, and a virtual clock can order every step.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from itertools import count
from operator import itemgetter
from random import Random
from typing import Final, Protocol, TypeVar

T = TypeVar("T")

_LONG_S: Final = 3_600.0


class Clock(Protocol):
    """The only source of time. All methods are called while the schedule's lock is held."""

    def monotonic(self) -> float:
        """Return seconds that never go back."""

    def now_ms(self) -> int:
        """Return the brokers' wall time in ms since the epoch."""

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """Release the lock until the condition is notified, or for `seconds`."""


class MachineClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        condition.wait(seconds)


class Schedule:
    """What happens later, and who waits. Whoever uses the cluster does so in a `with` block of it."""

    def __init__(self, clock: Clock, random: Random) -> None:
        self.clock = clock
        self.random = random
        self.lock: Final = threading.RLock()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._waiting: dict[int, tuple[float, threading.Condition]] = {}
        """By thread: until when it waits at most, and for what."""

    def __enter__(self) -> None:
        """Take the lock, and let happen what is due."""
        self.lock.acquire()
        self.run_due()

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def condition(self) -> threading.Condition:
        """Return something to wait for, on the one lock."""
        return threading.Condition(self.lock)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call it once `seconds` have passed and somebody looks."""
        heapq.heappush(self._due, (self.clock.monotonic() + seconds, next(self._numbers), call))
        self._have_somebody_wake()

    def _have_somebody_wake(self) -> None:
        """Wake a thread that waits, if none of them wakes by itself when something is due."""
        if self._due and self._waiting:
            until, condition = min(self._waiting.values(), key=itemgetter(0))
            if until > self._due[0][0]:
                condition.notify_all()

    def run_due(self) -> None:
        while self._due and self._due[0][0] <= self.clock.monotonic():
            heapq.heappop(self._due)[2]()

    def wait(self, condition: threading.Condition, timeout: float, look: Callable[[], T | None]) -> T | None:
        """Wait until `look` returns something; return None after `timeout` seconds. A negative one is for ever."""
        until = self.clock.monotonic() + timeout if timeout >= 0 else float("inf")
        while True:
            self.run_due()
            found = look()
            now = self.clock.monotonic()
            if found is not None or now >= until:
                self._have_somebody_wake()
                return found
            wakes = min(until, self._due[0][0] if self._due else now + _LONG_S)
            self._waiting[threading.get_ident()] = wakes, condition
            try:
                self.clock.wait(condition, wakes - now)
            finally:
                del self._waiting[threading.get_ident()]
