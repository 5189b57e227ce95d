"""Chooses the shard of each new id that the server makes: shards take turns."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

SLICE_S: Final = 0.05
SLICE_IDS: Final = 1000


class ShardRotation:
    """Assigns ids that are made at about the same time to one shard.

    They are mostly ended at about the same time too, so the Kafka transaction that ends them touches few partitions. A
    broker's work for a Kafka transaction grows with its partitions, and hardly with its records. A turn ends after
    `SLICE_S` or `SLICE_IDS` ids, so each of up to 20 shards has its share of every second.
    """

    def __init__(self) -> None:
        """Start with any shard."""
        self._turn = 0
        self._left = 0
        self._until = 0.0

    def choose(self, shards: Sequence[int]) -> int:
        """Return the shard whose turn it is, and count one id of the turn."""
        now = monotonic()
        if not self._left or now >= self._until:
            self._turn += 1
            self._left, self._until = SLICE_IDS, now + SLICE_S
        self._left -= 1
        return shards[self._turn % len(shards)]
