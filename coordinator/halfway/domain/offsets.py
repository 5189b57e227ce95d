"""The lowest value of many that change; what is stale is thrown away when it surfaces."""

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
    """What stands somewhere in a log."""

    @property
    def offset(self) -> int:
        """Where it stands now."""


class PlaceOrder:
    """Tells which ids stand first in a log, for ids that are mostly noted in that order: 16 bytes for each.

    `standing` is kept elsewhere: it tells where an id stands now, one at most at a place; what is not in it is gone.
    """

    def __init__(self, standing: Mapping[str, Standing]) -> None:
        """Start with nothing noted."""
        self._known = standing
        self._places = array("q")
        self._ids: list[str] = []
        self._start = 0

    def note(self, key: str, place: int) -> None:
        """Note where an id stands now."""
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
        """Return (place, id) of the first, None where there is none."""
        found = next(self._standing(), None)
        if found is None:
            self._tidy()
            return None
        self._start = found
        return self._places[found], self._ids[found]

    def lowest(self, at_most: int) -> list[str]:
        """Return the ids that stand first, in order."""
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


class OffsetIndex:
    """Keeps one number (an offset, a time) for each id and tells the lowest."""

    def __init__(self) -> None:
        """Start empty."""
        self._current: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []
        self._level = 0
        self._levelled: list[str] = []
        """Ids that were set to one number together, `_level`, the first of them last."""

    def __len__(self) -> int:
        """Count the ids."""
        return len(self._current)

    def put(self, key: str, value: int) -> None:
        """Set an id's number, in place of the one it had."""
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
        """Set the number of many ids at once, in an index that is empty: in much less time than one by one."""
        self._level, self._current = value, dict.fromkeys(keys, value)
        self._levelled = list(reversed(self._current))

    def get(self, key: str) -> int | None:
        """Return an id's number, None where it has none."""
        return self._current.get(key)

    def discard(self, key: str) -> None:
        """Forget an id."""
        self._current.pop(key, None)

    def first(self) -> tuple[int, str] | None:
        """Return (number, id) of the lowest, None where there is none."""
        heap, levelled, current = self._heap, self._levelled, self._current
        while heap and current.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        while levelled and current.get(levelled[-1]) != self._level:
            levelled.pop()
        if levelled and (not heap or heap[0][0] >= self._level):
            return self._level, levelled[-1]
        return heap[0] if heap else None

    def lowest(self, at_most: int) -> list[str]:
        """Return ids with the lowest numbers, in order; cheap where few of them are asked for."""
        first = self.first()
        if first is None:
            return []
        if at_most == 1:
            return [first[1]]
        return nsmallest(at_most, self._current, key=self._current.__getitem__)

    def pop_up_to(self, limit: int) -> str | None:
        """Remove and return the id of the lowest number that is not above `limit`, None where there is none."""
        first = self.first()
        if first is None or first[0] > limit:
            return None
        del self._current[first[1]]
        return first[1]
