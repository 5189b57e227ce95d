"""Events of transactions that are in no record, as this instance saw them, in bounded memory (docs/rest.md#history)."""

from __future__ import annotations

from collections import deque
from sys import getsizeof, intern
from typing import TYPE_CHECKING, Final

from halfway.service.records.journal_records import HistoryEvent

if TYPE_CHECKING:
    from halfway.service.check_ports import CheckReply

MAX_IDS: Final = 20_000
MAX_EVENTS_PER_ID: Final = 16
MAX_BYTES: Final = 64 * 1024 * 1024
"""The texts of all events. Equal texts are stored once and counted once."""


class Journal:
    """The last checks and acts of each transaction on this instance. The oldest transactions are dropped first."""

    def __init__(self, since: int) -> None:
        """Start empty at a time in ms since the epoch."""
        self.since = since
        self._events: dict[str, deque[HistoryEvent]] = {}
        self._texts: dict[str, int] = {}
        """The number of events that have each text."""
        self._bytes = 0

    def events_of(self, transaction_id: str) -> tuple[HistoryEvent, ...]:
        """Return the events of an id, the oldest first."""
        return tuple(self._events.get(transaction_id, ()))

    def add(self, transaction_id: str, event: HistoryEvent) -> None:
        """Add an event."""
        events = self._events.pop(transaction_id, None)
        if events is None:
            events = deque()
        elif len(events) >= MAX_EVENTS_PER_ID:
            self._uncount(events.popleft())
        events.append(event)
        self._count(event)
        self._events[transaction_id] = events
        while len(self._events) > MAX_IDS or (self._bytes > MAX_BYTES and len(self._events) > 1):
            for dropped in self._events.pop(next(iter(self._events))):
                self._uncount(dropped)

    def _count(self, event: HistoryEvent) -> None:
        for text in _texts(event):
            count = self._texts.get(text, 0)
            self._bytes += 0 if count else getsizeof(text)
            self._texts[text] = count + 1

    def _uncount(self, event: HistoryEvent) -> None:
        for text in _texts(event):
            if self._texts[text] > 1:
                self._texts[text] -= 1
            else:
                del self._texts[text]
                self._bytes -= getsizeof(text)

    def add_check(self, transaction_id: str, number: int, reply: CheckReply, at: int) -> None:
        """Add a check with its number: one event for each endpoint that was tried."""
        for attempt in reply.attempts:
            event = HistoryEvent(
                at=at,
                event="check",
                attempt=number,
                verdict=reply.outcome.value if attempt.answered else "none",
                sent=attempt.sent,
                host=intern(attempt.host),
                status=attempt.status,
                # Thousands of checks may fail in the same way: equal texts are stored once.
                excerpt=None if attempt.excerpt is None else intern(attempt.excerpt),
                duration_s=round(attempt.duration_s, 4),
                detail=intern(attempt.detail) or None,
                remark=intern(reply.remark) if attempt.answered and reply.remark is not None else None,
            )
            self.add(transaction_id, event)


def _texts(event: HistoryEvent) -> list[str]:
    return [text for text in (event.excerpt, event.detail, event.remark) if text]
