"""The lane's queue: in order for each group, the groups in turn; bounded, and read in bounded batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from halfway.coordinator.fairness import Shares
from halfway.coordinator.ports import LaneWrite
from halfway.protocol.errors import HalfwayError, NotWrittenError, OverloadedError


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


_group_of = attrgetter("group")


class _Writes:
    """Writes that wait, by group. The groups come in turn, the writes of one group in order."""

    def __init__(self) -> None:
        self._groups: dict[str, deque[LaneWrite]] = {}

    def put(self, group: str, writes: Sequence[LaneWrite]) -> None:
        waiting = self._groups.get(group)
        if waiting is None:
            waiting = self._groups[group] = deque()
        waiting += writes

    def take(self, limits: BatchLimits) -> list[LaneWrite]:
        """Take what fits into one Kafka transaction, one write of each group in turn."""
        batch: list[LaneWrite] = []
        payload = records = 0
        groups, passed_over = self._groups, {}
        while groups and len(batch) < limits.ends:
            group, waiting = next(iter(groups.items()))
            alone = len(groups) == 1
            while True:
                write = waiting[0]
                payload += write.size
                records += len(write.messages) + 3
                if batch and (payload > limits.payload_bytes or records > limits.records):
                    payload -= write.size
                    records -= len(write.messages) + 3
                    del groups[group]
                    passed_over[group] = waiting
                    break
                batch.append(waiting.popleft())
                if not waiting or not alone or len(batch) >= limits.ends:
                    del groups[group]
                    if waiting:
                        groups[group] = waiting  # behind the others
                    break
        self._groups = passed_over | groups  # those whose next write did not fit come first in the next batch
        return batch

    def __bool__(self) -> bool:
        return bool(self._groups)

    def all(self) -> list[LaneWrite]:
        return [write for waiting in self._groups.values() for write in waiting]


class LaneQueue:
    """A queue with one reader. Any thread may put.

    The writes of one group leave it in order, and the groups take turns, so that nobody waits for all writes of
    another. A release leaves it after everything that was queued before. It holds up to `capacity` writes with
    `capacity_bytes` of payload, divided among the groups (`Shares`); one write always fits, however large.
    """

    def __init__(self, capacity: int, capacity_bytes: int, limits: BatchLimits) -> None:
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._writes = Shares(capacity)
        self._bytes = Shares(capacity_bytes)
        self._limits = limits
        self._items: deque[_Writes | Release] = deque()
        """Releases, and the writes between them."""
        self._releases = 0
        self._changed = threading.Condition(threading.Lock())
        self._waiting = False
        self._closed = False

    def __len__(self) -> int:
        """Return the number of items that wait."""
        return self._writes.total + self._releases

    def put_release(self, release: Release) -> bool:
        """Queue a release, for which there is always room; False if the queue is closed."""
        with self._changed:
            if self._closed:
                return False
            self._items.append(release)
            self._releases += 1
            self._wake()
            return True

    def put_all(self, writes: Sequence[LaneWrite]) -> list[tuple[LaneWrite, HalfwayError]]:
        """Queue writes in order; return those that are refused, each with its error.

        That is NotWrittenError if the queue is closed, and OverloadedError if it is full.
        """
        refused: list[tuple[LaneWrite, HalfwayError]] = []
        with self._changed:
            for group, of_group in groupby(writes, _group_of):
                if self._closed:
                    refused += [(one, NotWrittenError(f"{one.id}: the lane has ended", id=one.id)) for one in of_group]
                else:
                    refused += self._put(group, of_group)
            self._wake()
        return refused

    def _put(self, group: str, writes: Iterable[LaneWrite]) -> Iterator[tuple[LaneWrite, HalfwayError]]:
        """Queue writes of one group, and yield those that are refused."""
        room, room_bytes = self._writes.room(group), self._bytes.room(group)
        is_empty = not self._bytes.total
        accepted: list[LaneWrite] = []
        size = 0
        for write in writes:
            if len(accepted) >= room:
                yield write, OverloadedError("too many ends wait for the lane", limit=self._capacity)
            elif size + write.size > room_bytes and not (is_empty and not size):
                yield write, OverloadedError("too many bytes wait for the lane", limit_bytes=self._capacity_bytes)
            else:
                accepted.append(write)
                size += write.size
        if accepted:
            self._writes.take(group, len(accepted))
            self._bytes.take(group, size)
            self._last_writes().put(group, accepted)

    def _last_writes(self) -> _Writes:
        last = self._items[-1] if self._items else None
        if not isinstance(last, _Writes):
            last = _Writes()
            self._items.append(last)
        return last

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
                self._releases -= 1
                return first
            batch = first.take(self._limits)
            if not first:
                self._items.popleft()
            for group, of_group in groupby(batch, _group_of):
                sizes = [write.size for write in of_group]
                self._writes.leave(group, len(sizes))
                self._bytes.leave(group, sum(sizes))
            return batch

    @property
    def closed(self) -> bool:
        """Return whether the queue takes nothing more."""
        return self._closed

    def close(self) -> list[LaneWrite | Release]:
        """Close the queue and return the items that still wait."""
        with self._changed:
            self._closed = True
            left: list[LaneWrite | Release] = []
            for item in self._items:
                left += [item] if isinstance(item, Release) else item.all()
            self._items.clear()
            self._writes, self._bytes = Shares(self._capacity), Shares(self._capacity_bytes)
            self._releases = 0
            self._changed.notify_all()
            return left
