"""The checks of one group that are due, under way, or waited for."""

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
        """Start with nothing due."""
        self.due: deque[tuple[int, str]] = deque()
        self.queued: set[str] = set()
        self.asked: set[str] = set()
        """Ids with a check in flight: at most one for each id."""
        self.running = 0
        self.next_url = 0
        self.polls = 0
        self.arrival = asyncio.Event()
        self.slot_at = 0
        self.slot_taken = 0
        self.slot_size = limits.check_queue
        self.breaker = Breaker(
            failures=limits.breaker_failures, open_s=limits.breaker_open_s, max_open_s=limits.breaker_max_open_s
        )

    def add(self, number: int, transaction_id: str, *, first: bool = False) -> None:
        """Queue a check, unless it is queued or under way already; `first` puts it before all others."""
        if transaction_id in self.queued or transaction_id in self.asked:
            return
        self.queued.add(transaction_id)
        if first:
            self.due.appendleft((number, transaction_id))
        else:
            self.due.append((number, transaction_id))
        self.arrival.set()

    def defer(self, earliest: int) -> int:
        """Return when to offer a check again: per second as many as may be queued, so that a backlog costs little."""
        if self.slot_at < earliest:
            self.slot_at, self.slot_taken = earliest, 0
        self.slot_taken += 1
        if self.slot_taken > self.slot_size:
            self.slot_at, self.slot_taken = self.slot_at + RETRY_MS, 1
        return self.slot_at

    def clock_was_set(self, now: int) -> None:
        """Put nothing off to a time of the former clock."""
        self.slot_at = 0
        self.breaker.clock_was_set(now)

    def take(self) -> tuple[int, str]:
        """Return the shard and the id of the next check that is due."""
        number, transaction_id = self.due.popleft()
        self.queued.discard(transaction_id)
        return number, transaction_id
