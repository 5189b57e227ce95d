"""Indexes that return the lowest of many changing values; stale entries are dropped when they reach the top."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_SLACK = 64


class Standing(Protocol):
    """An entry with an offset in a log."""

    @property
    def offset(self) -> int:
        """Its offset now."""


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
    """Keeps one number (an offset, a time) for each id and returns the lowest."""

    def __init__(self) -> None:
        """Start empty."""
        self._current: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []
        self._level = 0
        self._levelled: list[str] = []
        """Ids that were set together to the number `_level`, in reverse order."""

    def __len__(self) -> int:
        """Count the ids."""
        return len(self._current)

    def put(self, key: str, value: int) -> None:
        """Set the number of an id, replacing the former one."""
        if self._current.get(key) == value:
            return
        self._current[key] = value
        if len(self._heap) > 2 * len(self._current) + _SLACK:
            self._heap = [(number, name) for name, number in self._current.items()]
            heapify(self._heap)
            self._levelled = []
        else:
            heappush(self._heap, (value, key))

    def put_all(self, keys: Iterable[str], value: int) -> None:
        """Set the number of many ids at once, in an empty index: much faster than one by one."""
        self._level, self._current = value, dict.fromkeys(keys, value)
        self._levelled = list(reversed(self._current))

    def get(self, key: str) -> int | None:
        """Return the number of an id, None if it has none."""
        return self._current.get(key)

    def discard(self, key: str) -> None:
        """Forget an id."""
        self._current.pop(key, None)

    def first(self) -> tuple[int, str] | None:
        """Return (number, id) of the lowest, None if there is none."""
        heap, levelled, current = self._heap, self._levelled, self._current
        while heap and current.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        while levelled and current.get(levelled[-1]) != self._level:
            levelled.pop()
        if levelled and (not heap or heap[0][0] >= self._level):
            return self._level, levelled[-1]
        return heap[0] if heap else None

    def lowest(self, at_most: int) -> list[str]:
        """Return up to `at_most` ids with the lowest numbers, in order; cheap if `at_most` is small."""
        first = self.first()
        if first is None:
            return []
        if at_most == 1:
            return [first[1]]
        return nsmallest(at_most, self._current, key=self._current.__getitem__)

    def pop_up_to(self, limit: int) -> str | None:
        """Remove and return the id of the lowest number that is not above `limit`, None if there is none."""
        first = self.first()
        if first is None or first[0] > limit:
            return None
        del self._current[first[1]]
        return first[1]
