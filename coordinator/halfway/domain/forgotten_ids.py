"""Ids whose outcomes were forgotten before the outcome horizon, in little memory.

See docs/protocol.md#state-is-a-fold-over-the-log.
"""

from __future__ import annotations

from typing import Final

_BITS: Final = 1 << 25
"""The size of one filter: 4 MiB. With a million ids it takes one new id in 6,000 for one of them, with four 1 in 50."""
_BITS_PER_ID: Final = 8
"""A filter is full when it has an id for so many bits: four million."""
_PROBES: Final = 4
_MOST_FILTERS: Final = 8
"""If more were needed, because outcomes are not forgotten by age for long, the oldest two become one."""


class _Filter:
    """A Bloom filter: it finds every id that was added, and rarely one that was not."""

    __slots__ = ("_bits", "count", "first", "until")

    def __init__(self, first: int) -> None:
        """Start empty, for times from `first` on."""
        self._bits = bytearray(_BITS // 8)
        self.first = self.until = first
        self.count = 0

    def add(self, transaction_id: str, until: int) -> None:
        """Add an id that matters until a time."""
        self.until = max(self.until, until)
        self.count += 1
        for place in _places(transaction_id):
            self._bits[place >> 3] |= 1 << (place & 7)

    def take(self, other: _Filter) -> None:
        """Add the ids of another filter."""
        bits = int.from_bytes(self._bits, "little") | int.from_bytes(other._bits, "little")
        self._bits = bytearray(bits.to_bytes(len(self._bits), "little"))
        self.until = max(self.until, other.until)
        self.count += other.count

    def may_have(self, transaction_id: str) -> bool:
        """Return False if the id was certainly not added."""
        return all(self._bits[place >> 3] & 1 << (place & 7) for place in _places(transaction_id))


class ForgottenIds:
    """Ids, each with the time until which it matters (ms since the epoch), in a few filters, however many there are."""

    def __init__(self) -> None:
        """Start empty, and without memory for filters."""
        self._filters: list[_Filter] = []

    def add(self, transaction_id: str, until: int, *, horizon_ms: int) -> None:
        """Add an id. A filter takes those of half a horizon, so three or four are in use if the clocks are right.

        The halves are the same in whatever order the times come. Times of a wrong clock have filters of their own: one
        that matters for long would soon have most ids.
        """
        first = until - until % max(1, horizon_ms // 2)
        for one in reversed(self._filters):
            if one.first == first and one.count < _BITS // _BITS_PER_ID:
                break
        else:
            one = _Filter(first)
            self._filters.append(one)
            if len(self._filters) > _MOST_FILTERS:
                self._filters[1].take(self._filters.pop(0))
        one.add(transaction_id, until)

    def may_have(self, transaction_id: str) -> bool:
        """Return False if the id was certainly not added, or is in no filter any more.

        The time is no reason: if the clock was set ahead, nothing expires until outcomes are forgotten by age again.
        """
        return any(one.may_have(transaction_id) for one in self._filters)

    def expire(self, now: int) -> int:
        """Drop the filters that matter no more at a time. Return until when one of them did, 0 if none was dropped."""
        gone = [one.until for one in self._filters if one.until <= now]
        if gone:
            self._filters = [one for one in self._filters if one.until > now]
        return max(gone, default=0)


def _places(transaction_id: str) -> list[int]:
    # Python's hash of a text has 64 bits and a secret, so nobody can choose ids that share places.
    hashed = hash(transaction_id)
    step = hashed >> 32 | 1
    return [hashed + number * step & _BITS - 1 for number in range(_PROBES)]
