"""The lane's queue: first in, first out, bounded, and read in bounded batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from halfway.domain.errors import HalfwayError, NotWrittenError, OverloadedError
from halfway.service.ports import LaneWrite


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Release:
    """Release shards in a Kafka transaction of its own, after everything queued before.

    `done` returns whether it was written; False if suspects of these shards are still under way.
    """

    shards: Sequence[int]
    done: Future[bool] = field(default_factory=Future)


Batch = list[LaneWrite] | Release | None
"""Writes for one Kafka transaction, a release, or None if nothing came in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """Bounds of one Kafka transaction: ends, payload bytes, records. One end always fits, however large."""

    ends: int
    payload_bytes: int
    records: int = 50_000


class LaneQueue:
    """A first-in-first-out queue with one reader. Any thread may put.

    It holds up to `capacity` writes with `capacity_bytes` of payload; one write always fits, however large.
    """

    def __init__(self, capacity: int, capacity_bytes: int, limits: BatchLimits) -> None:
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._bytes = 0
        self._limits = limits
        self._items: deque[LaneWrite | Release] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._waiting = False
        self._closed = False

    def __len__(self) -> int:
        """Return the number of items that wait."""
        return len(self._items)

    def put_release(self, release: Release) -> bool:
        """Queue a release, for which there is always room; False if the queue is closed."""
        with self._changed:
            if self._closed:
                return False
            self._items.append(release)
            self._wake()
            return True

    def put_all(self, writes: Sequence[LaneWrite]) -> list[tuple[LaneWrite, HalfwayError]]:
        """Queue writes in order; return those that are refused, each with its error.

        That is NotWrittenError if the queue is closed, and OverloadedError if it is full.
        """
        refused: list[tuple[LaneWrite, HalfwayError]] = []
        with self._changed:
            items = self._items
            for write in writes:
                if self._closed:
                    refused.append((write, NotWrittenError(f"{write.id}: the lane has ended", id=write.id)))
                elif len(items) >= self._capacity:
                    refused.append((write, OverloadedError("too many ends wait for the lane", limit=self._capacity)))
                elif self._bytes and self._bytes + write.size > self._capacity_bytes:
                    error = OverloadedError("too many bytes wait for the lane", limit_bytes=self._capacity_bytes)
                    refused.append((write, error))
                else:
                    self._bytes += write.size
                    items.append(write)
            self._wake()
        return refused

    def _wake(self) -> None:
        if self._waiting and self._items:
            self._changed.notify()

    def take(self, timeout: float) -> Batch:
        """Wait up to `timeout` seconds for an item, then take all that fits into one Kafka transaction."""
        with self._changed:
            if not self._items and not self._closed:
                self._waiting = True
                self._changed.wait(timeout)
                self._waiting = False
            if not self._items:
                return None
            first = self._items[0]
            if isinstance(first, Release):
                self._items.popleft()
                return first
            return self._take_writes()

    def _take_writes(self) -> list[LaneWrite]:
        items, limits = self._items, self._limits
        batch: list[LaneWrite] = []
        payload = records = 0
        while items and len(batch) < limits.ends:
            item = items[0]
            if isinstance(item, Release):
                break
            payload += item.size
            records += len(item.messages) + 3
            if batch and (payload > limits.payload_bytes or records > limits.records):
                break
            batch.append(item)
            items.popleft()
            self._bytes -= item.size
        return batch

    @property
    def closed(self) -> bool:
        """Return whether the queue takes nothing more."""
        return self._closed

    def close(self) -> list[LaneWrite | Release]:
        """Close the queue and return the items that still wait."""
        with self._changed:
            self._closed = True
            left = list(self._items)
            self._items.clear()
            self._bytes = 0
            self._changed.notify_all()
            return left
