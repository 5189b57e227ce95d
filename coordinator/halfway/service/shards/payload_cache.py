"""Payloads of pending transactions, kept while they fit into a bound of bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfway.domain.records import Half

_OVERHEAD_BYTES = 512


class PayloadCache:
    """Halves by id, the least recently used thrown out first; what is not here is read back from Kafka by offset."""

    def __init__(self, max_bytes: int) -> None:
        """Start empty."""
        self._max_bytes = max_bytes
        self._halves: OrderedDict[str, tuple[Half, int]] = OrderedDict()
        """Each with the bytes that it counts."""
        self.bytes = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        """Count the halves."""
        return len(self._halves)

    def put(self, half: Half, payload_bytes: int) -> None:
        """Keep a half of so many bytes in place of the one that its id had."""
        self.drop(half.id)
        size = payload_bytes + _OVERHEAD_BYTES
        if size > self._max_bytes:
            return
        self._halves[half.id] = half, size
        self.bytes += size
        while self.bytes > self._max_bytes:
            _, (_, freed) = self._halves.popitem(last=False)
            self.bytes -= freed

    def get(self, transaction_id: str, fingerprint: bytes) -> Half | None:
        """Return the half of an id, None if it is not here or has other content."""
        kept = self._halves.get(transaction_id)
        if kept is None or kept[0].fingerprint != fingerprint:
            self.misses += 1
            return None
        self._halves.move_to_end(transaction_id)
        self.hits += 1
        return kept[0]

    def drop(self, transaction_id: str) -> None:
        """Forget an id."""
        kept = self._halves.pop(transaction_id, None)
        if kept is not None:
            self.bytes -= kept[1]
