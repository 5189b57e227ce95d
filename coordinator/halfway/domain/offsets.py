"""The lowest value of many that change: a heap whose stale entries are thrown away when they surface."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, nsmallest

_SLACK = 64


class OffsetIndex:
    """Keeps one number (an offset, a time) for each id and tells the lowest."""

    def __init__(self) -> None:
        """Start empty."""
        self._current: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

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
        else:
            heappush(self._heap, (value, key))

    def get(self, key: str) -> int | None:
        """Return an id's number, None where it has none."""
        return self._current.get(key)

    def discard(self, key: str) -> None:
        """Forget an id."""
        self._current.pop(key, None)

    def first(self) -> tuple[int, str] | None:
        """Return (number, id) of the lowest, None where there is none."""
        heap, current = self._heap, self._current
        while heap:
            value, key = heap[0]
            if current.get(key) == value:
                return value, key
            heappop(heap)
        return None

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
        heappop(self._heap)
        return first[1]
