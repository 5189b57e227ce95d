"""The queue of one group's checks."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from halfway.service.checkback.breaker import Breaker

if TYPE_CHECKING:
    from halfway.service.requests import ServiceLimits

RETRY_MS = 1000


class CheckQueue:
    """The checks of one group: due, in flight, and (in pull mode) the polls that wait for them."""

    def __init__(self, limits: ServiceLimits) -> None:
        """Start with no check due."""
        self.due: deque[tuple[int, str]] = deque()
        self.queued: set[str] = set()
        self.in_flight: set[str] = set()
        """Ids with a check in flight: at most one for each id."""
        self.running = 0
        """The number of places for checks that are taken."""
        self.next_url = 0
        self.polls = 0
        """The number of waiting polls."""
        self.arrival = asyncio.Event()
        self.slot_at = 0
        self.slot_taken = 0
        self.slot_size = limits.check_queue
        self.breaker = Breaker(
            failures=limits.breaker_failures, open_s=limits.breaker_open_s, max_open_s=limits.breaker_max_open_s
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is due or in flight, and nobody waits."""
        return not (self.due or self.in_flight or self.running or self.polls)

    def add(self, number: int, transaction_id: str, *, first: bool = False) -> None:
        """Queue a check, unless it is queued or in flight already; `first` puts it before all others."""
        if transaction_id in self.queued or transaction_id in self.in_flight:
            return
        self.queued.add(transaction_id)
        if first:
            self.due.appendleft((number, transaction_id))
        else:
            self.due.append((number, transaction_id))
        self.arrival.set()

    def defer(self, earliest: int) -> int:
        """Return when to offer a check again: as many per second as the queue holds, so that a backlog is cheap."""
        if self.slot_at < earliest:
            self.slot_at, self.slot_taken = earliest, 0
        self.slot_taken += 1
        if self.slot_taken > self.slot_size:
            self.slot_at, self.slot_taken = self.slot_at + RETRY_MS, 1
        return self.slot_at

    def endpoints_changed(self) -> None:
        """Drop the times that the failures of the former endpoints have set."""
        self.slot_at = 0
        self.breaker.record_success()

    def clock_was_set(self, now: int) -> None:
        """Drop the times of the former clock."""
        self.slot_at = 0
        self.breaker.clock_was_set(now)

    def take(self) -> tuple[int, str]:
        """Remove and return (shard, id) of the next due check."""
        number, transaction_id = self.due.popleft()
        self.queued.discard(transaction_id)
        return number, transaction_id
