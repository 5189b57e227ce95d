"""Indexes that return the lowest of many changing values; stale entries are dropped when they reach the top."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Protocol

_SLACK = 64
_SECOND_MS = 1000


class HasOffset(Protocol):
    """An entry with an offset in a log."""

    @property
    def offset(self) -> int:
        """Return its current offset."""


class HasLookTime(Protocol):
    """An entry that stores when the scan next looks at it."""

    look_at: int | None


class Agenda:
    """Returns ids when it is time to look at them. Entries store their own times, so no second table is needed.

    Most entries are removed before their time comes, so ids are grouped by second, and sorted only when that second
    comes. `entries` is maintained elsewhere; an id that is not in it has been removed.
    """

    def __init__(self, entries: Mapping[str, HasLookTime]) -> None:
        """Plan a look at every entry as soon as possible."""
        self._entries = entries
        for entry in entries.values():
            entry.look_at = 0
        self._unseen = list(reversed(list(entries)))
        """The initial entries that `pop_up_to` has not reached yet."""
        self._heap: list[tuple[int, str]] = []
        """(time, id) of the looks up to the second `_reached`."""
        self._reached = 0
        self._later: dict[int, list[str]] = {}
        """The ids of later looks, by second."""
        self._seconds: list[int] = []
        """The keys of `_later`, as a heap."""
        self._later_count = 0

    def put(self, key: str, at: int) -> None:
        """Set when to look at an entry, in place of the former time. The time must not be below 0."""
        entry = self._entries.get(key)
        if entry is None or entry.look_at == at:
            return
        entry.look_at = at
        if self._later_count + len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap, self._later, self._seconds, self._later_count, self._unseen = [], {}, [], 0, []
            for name, planned in self._entries.items():
                if planned.look_at is not None:
                    self._add(name, planned.look_at)
        else:
            self._add(key, at)

    def _add(self, key: str, at: int) -> None:
        second = at // _SECOND_MS
        if second <= self._reached:
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
        """Cancel the look at an entry."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.look_at = None

    def pop_up_to(self, limit: int) -> str | None:
        """Remove and return the id with the earliest time; None if that time is after `limit`."""
        while self._unseen:
            key = self._unseen.pop()
            if self._take(key, 0):
                return key
        self._sort_up_to(limit // _SECOND_MS)
        heap = self._heap
        while heap and heap[0][0] <= limit:
            at, key = heappop(heap)
            if self._take(key, at):
                return key
        return None

    def _sort_up_to(self, second: int) -> None:
        """Sort the looks up to a second; drop those of removed entries and those that were moved to another second."""
        self._reached = max(self._reached, second)
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
    """Returns the ids with the lowest offsets in a log, for ids that mostly come in that order: 16 bytes each.

    `entries` is maintained elsewhere. It maps each id to its entry with its current offset, at most one id per offset;
    an id that is not in it has been removed.
    """

    def __init__(self, entries: Mapping[str, HasOffset]) -> None:
        self._entries = entries
        self._offsets = array("q")
        self._ids: list[str] = []
        self._start = 0

    def note(self, key: str, offset: int) -> None:
        offsets, ids = self._offsets, self._ids
        if not offsets or offset > offsets[-1]:
            offsets.append(offset)
            ids.append(key)
        else:
            at = bisect_left(offsets, offset, self._start)
            if at < len(offsets) and offsets[at] == offset:
                ids[at] = key
            else:
                offsets.insert(at, offset)
                ids.insert(at, key)
        if len(ids) > 2 * len(self._entries) + _SLACK:
            self._compact()

    def first(self) -> tuple[int, str] | None:
        """Return (offset, id) of the id with the lowest offset, None if there is none."""
        first = next(self._current(), None)
        if first is None:
            self._compact()
            return None
        self._start = first
        return self._offsets[first], self._ids[first]

    def lowest(self, at_most: int) -> list[str]:
        """Return up to `at_most` ids with the lowest offsets, in order."""
        return [self._ids[at] for at in islice(self._current(), at_most)]

    def _current(self) -> Iterator[int]:
        """Iterate over the positions in `_ids` whose id still has that offset."""
        entries, offsets = self._entries, self._offsets
        for at in range(self._start, len(offsets)):
            entry = entries.get(self._ids[at])
            if entry is not None and entry.offset == offsets[at]:
                yield at

    def _compact(self) -> None:
        current = list(self._current())
        self._offsets = array("q", [self._offsets[at] for at in current])
        self._ids = [self._ids[at] for at in current]
        self._start = 0


class IndexedHeap:
    """Stores one offset for each id and returns the lowest."""

    def __init__(self) -> None:
        self._current: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def put(self, key: str, value: int) -> None:
        """Set the offset of an id, in place of the former one."""
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
        self._current.pop(key, None)

    def first(self) -> tuple[int, str] | None:
        """Return (offset, id) of the lowest offset, None if there is none."""
        heap, current = self._heap, self._current
        while heap and current.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0] if heap else None
