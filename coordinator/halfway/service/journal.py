"""What this instance saw of transactions and no record holds, in memory and bounded (docs/rest.md#history)."""

from __future__ import annotations

from collections import deque
from sys import getsizeof, intern
from typing import TYPE_CHECKING, Final

from halfway.service.journal_records import HistoryEvent

if TYPE_CHECKING:
    from halfway.service.check_ports import CheckReply

MOST_IDS: Final = 20_000
MOST_OF_ONE: Final = 16
MOST_BYTES: Final = 64 * 1024 * 1024
"""Of the texts of all events; equal ones are kept once, and count once."""


class Journal:
    """The last checks and acts of each transaction, as they were seen here; the oldest transactions go first."""

    def __init__(self, since: int) -> None:
        """Start empty at a time in ms since the epoch."""
        self.since = since
        self._events: dict[str, deque[HistoryEvent]] = {}
        self._texts: dict[str, int] = {}
        """How many events have a text."""
        self._bytes = 0

    def of(self, transaction_id: str) -> tuple[HistoryEvent, ...]:
        """Return what was seen of an id, the oldest first."""
        return tuple(self._events.get(transaction_id, ()))

    def note(self, transaction_id: str, event: HistoryEvent) -> None:
        """Keep an event."""
        events = self._events.pop(transaction_id, None)
        if events is None:
            events = deque()
        elif len(events) >= MOST_OF_ONE:
            self._drop(events.popleft())
        events.append(event)
        self._hold(event)
        self._events[transaction_id] = events
        while len(self._events) > MOST_IDS or (self._bytes > MOST_BYTES and len(self._events) > 1):
            for one in self._events.pop(next(iter(self._events))):
                self._drop(one)

    def _hold(self, event: HistoryEvent) -> None:
        for text in _texts(event):
            count = self._texts.get(text, 0)
            self._bytes += 0 if count else getsizeof(text)
            self._texts[text] = count + 1

    def _drop(self, event: HistoryEvent) -> None:
        for text in _texts(event):
            if self._texts[text] > 1:
                self._texts[text] -= 1
            else:
                del self._texts[text]
                self._bytes -= getsizeof(text)

    def checked(self, transaction_id: str, attempt: int, reply: CheckReply, at: int) -> None:
        """Keep a check that was tried, an event for each endpoint."""
        for one in reply.attempts:
            event = HistoryEvent(
                at=at,
                event="check",
                attempt=attempt,
                verdict=reply.outcome.value if one.answered else "none",
                sent=one.sent,
                host=intern(one.host),
                status=one.status,
                # Thousands of checks may fail in the same way: equal texts are kept once.
                excerpt=None if one.excerpt is None else intern(one.excerpt),
                duration_s=round(one.duration_s, 4),
                detail=intern(one.detail) or None,
                remark=intern(reply.remark) if one.answered and reply.remark is not None else None,
            )
            self.note(transaction_id, event)


def _texts(event: HistoryEvent) -> list[str]:
    return [text for text in (event.excerpt, event.detail, event.remark) if text]
