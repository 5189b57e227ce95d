"""Indexes that return the lowest of many changing values; stale entries are dropped when they reach the top."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SLACK = 64
_SECOND_MS = 1000


class Standing(Protocol):
    """An entry with an offset in a log."""

    @property
    def offset(self) -> int:
        """Its offset now."""


class Planned(Protocol):
    """An entry that knows when it is to be looked at."""

    look_at: int | None


class Agenda:
    """Returns ids when it is time to look at them. Each entry holds its own time, so no second table maps ids to times.

    Most entries are gone before their time: ids are listed by the second, and ordered once that second has come.
    `entries` is kept elsewhere; an absent id is gone.
    """

    def __init__(self, entries: Mapping[str, Planned]) -> None:
        """Plan to look at every entry as soon as possible."""
        self._entries = entries
        for entry in entries.values():
            entry.look_at = 0
        self._unseen = list(reversed(list(entries)))
        """Of the entries that were there first, those that no call has passed yet."""
        self._heap: list[tuple[int, str]] = []
        """What is planned up to the second `_come`."""
        self._come = 0
        self._later: dict[int, list[str]] = {}
        """What is planned after it, by the second."""
        self._seconds: list[int] = []
        """Those seconds, as a heap."""
        self._later_count = 0

    def put(self, key: str, at: int) -> None:
        """Set when to look at an entry, replacing the former time; it must not be below 0."""
        entry = self._entries.get(key)
        if entry is None or entry.look_at == at:
            return
        entry.look_at = at
        if self._later_count + len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap, self._later, self._seconds, self._later_count, self._unseen = [], {}, [], 0, []
            for name, planned in self._entries.items():
                if planned.look_at is not None:
                    self._list(name, planned.look_at)
        else:
            self._list(key, at)

    def _list(self, key: str, at: int) -> None:
        second = at // _SECOND_MS
        if second <= self._come:
            heappush(self._heap, (at, key))
            return
        keys = self._later.get(second)
        if keys is None:
            self._later[second] = [key]
            heappush(self._seconds, second)
        else:
            keys.append(key)
        self._later_count += 1

    def discard(self, key: str) -> None:
        """Plan no look at an entry."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.look_at = None

    def pop_up_to(self, limit: int) -> str | None:
        """Take and return the id whose time comes first, None if that is after `limit`."""
        while self._unseen:
            key = self._unseen.pop()
            if self._take(key, 0):
                return key
        self._reach(limit // _SECOND_MS)
        heap = self._heap
        while heap and heap[0][0] <= limit:
            at, key = heappop(heap)
            if self._take(key, at):
                return key
        return None

    def _reach(self, second: int) -> None:
        """Order what is planned up to a second, without what has gone or was put to another one."""
        self._come = max(self._come, second)
        while self._seconds and self._seconds[0] <= second:
            reached = heappop(self._seconds)
            keys = self._later.pop(reached)
            self._later_count -= len(keys)
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and entry.look_at is not None and entry.look_at // _SECOND_MS == reached:
                    heappush(self._heap, (entry.look_at, key))

    def _take(self, key: str, at: int) -> bool:
        entry = self._entries.get(key)
        if entry is None or entry.look_at != at:
            return False
        entry.look_at = None
        return True


class OffsetOrder:
    """Returns the ids that stand first in a log, for ids that are mostly noted in that order: 16 bytes each.

    `standing` is kept elsewhere. It maps an id to its offset now, at most one id per offset; an absent id is gone.
    """

    def __init__(self, standing: Mapping[str, Standing]) -> None:
        """Start with nothing noted."""
        self._known = standing
        self._places = array("q")
        self._ids: list[str] = []
        self._start = 0

    def note(self, key: str, place: int) -> None:
        """Note the offset of an id."""
        places, ids = self._places, self._ids
        if not places or place > places[-1]:
            places.append(place)
            ids.append(key)
        else:
            at = bisect_left(places, place, self._start)
            if at < len(places) and places[at] == place:
                ids[at] = key
            else:
                places.insert(at, place)
                ids.insert(at, key)
        if len(ids) > 2 * len(self._known) + _SLACK:
            self._tidy()

    def first(self) -> tuple[int, str] | None:
        """Return (place, id) of the first, None if there is none."""
        found = next(self._standing(), None)
        if found is None:
            self._tidy()
            return None
        self._start = found
        return self._places[found], self._ids[found]

    def lowest(self, at_most: int) -> list[str]:
        """Return up to `at_most` ids that stand first, in order."""
        return [self._ids[at] for at in islice(self._standing(), at_most)]

    def _standing(self) -> Iterator[int]:
        known, places = self._known, self._places
        for at in range(self._start, len(places)):
            held = known.get(self._ids[at])
            if held is not None and held.offset == places[at]:
                yield at

    def _tidy(self) -> None:
        kept = list(self._standing())
        self._places = array("q", [self._places[at] for at in kept])
        self._ids = [self._ids[at] for at in kept]
        self._start = 0


class IndexedHeap:
    """Keeps one offset for each id and returns the lowest."""

    def __init__(self) -> None:
        """Start empty."""
        self._current: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def put(self, key: str, value: int) -> None:
        """Set the offset of an id, replacing the former one."""
        if self._current.get(key) == value:
            return
        self._current[key] = value
        if len(self._heap) > 2 * len(self._current) + _SLACK:
            self._heap = [(number, name) for name, number in self._current.items()]
            heapify(self._heap)
        else:
            heappush(self._heap, (value, key))

    def get(self, key: str) -> int | None:
        """Return the offset of an id, None if it has none."""
        return self._current.get(key)

    def discard(self, key: str) -> None:
        """Forget an id."""
        self._current.pop(key, None)

    def first(self) -> tuple[int, str] | None:
        """Return (offset, id) of the lowest, None if there is none."""
        heap, current = self._heap, self._current
        while heap and current.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0] if heap else None
