"""The entries of a shard's state: transactions without their payloads."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import islice
from sys import intern
from typing import ClassVar, Protocol

import msgspec

from halfway.protocol.records import Half, Op, OpKind, Origin, Parked, key_digest, size_of
from halfway.protocol.transactions import Cause, State

KEY_BYTES = 8
_COMMITTED, _ROLLED_BACK = State.COMMITTED, State.ROLLED_BACK  # to read an attribute of an enum's class takes long
_MARKS_COMMIT = OpKind.COMMITTED


class MessageIndex(msgspec.Struct, frozen=True, gc=False):
    """The topic and the short key hash of each message, for lists.

    There may be millions of these, so equal topics are shared, and a key that all messages have is stored once.
    """

    topics: tuple[str, ...]
    keys: tuple[bytes | None, ...]

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, bytes | None]]) -> MessageIndex:
        """Build an index from the topic and the short key hash of each message."""
        entries = tuple(pairs)
        topics = _shared(tuple(intern(topic) for topic, _ in entries))
        return cls(topics, collapse_equal_keys(tuple(key for _, key in entries)))

    def __iter__(self) -> Iterator[tuple[str, bytes | None]]:
        """Iterate over (topic, key hash) of each message."""
        keys = self.keys if len(self.keys) == len(self.topics) else self.keys * len(self.topics)
        return zip(self.topics, keys, strict=True)


def collapse_equal_keys(keys: tuple[bytes | None, ...]) -> tuple[bytes | None, ...]:
    """Return the key hashes of all messages as an index stores them: a single one if all are equal."""
    return keys[:1] if len(set(keys)) == 1 else keys


@lru_cache(maxsize=1024)
def _shared(topics: tuple[str, ...]) -> tuple[str, ...]:
    return topics


class Pending(msgspec.Struct, kw_only=True, gc=False):
    """A pending transaction without its payload. The fields after `op_offset` live in memory only."""

    id: str
    group: str
    offset: int
    prepared_at: int
    since: int
    fingerprint: bytes
    check_after_ms: int | None
    origin: Origin
    size: int
    index: MessageIndex
    checks: int
    """The number of checks sent since `since`."""
    checked_at: int | None
    """When the last attempt to check ended, ms since the epoch."""
    commit_verdict: bool
    """Whether a caller, an operator or a check said commit: the policy never rolls it back."""
    remark: str | None
    barrier: int
    op_offset: int | None = None
    attempts: int = 0
    """The number of checks that were sent or could not be sent; only for the back-off."""
    last_error: str | None = None
    leased_check: int = 0
    """The number of the last check that this owner leased; 0 if it has leased none."""
    leased_until: int | None = None
    """When the lease of the last check ends, ms since the epoch: 0 if the check was answered, None if only a former
    owner of the shard knows."""
    checked_here: bool = False
    """True if this owner of the shard has sent a check, and has missed none since: a former one may have died with its
    own answer."""
    offered_at: int | None = None
    """When this owner last tried to queue a check, ms since the epoch."""
    offered_since: int | None = None
    """When this owner first tried to queue a check, ms since the epoch."""
    look_at: int | None = None
    """When the scan next looks at it, ms since the epoch: 0 for as soon as possible, None if no look is planned."""
    state: ClassVar[State] = State.PREPARED

    def ask_afresh(self) -> None:
        """Let the policy roll it back only after another check was sent: earlier answers may be out of date."""
        self.checked_here = False
        self.offered_at = self.offered_since = None

    @classmethod
    def of(cls, offset: int, half: Half) -> Pending:
        """Build the entry of the half record at `offset`."""
        return cls(
            id=half.id,
            group=intern(half.group),
            offset=offset,
            prepared_at=half.prepared_at,
            since=half.prepared_at if half.since == half.prepared_at else half.since,
            fingerprint=half.fingerprint,
            check_after_ms=half.check_after_ms,
            origin=half.origin,
            size=size_of(half.messages),
            index=_index_of(half),
            checks=half.checks,
            checked_at=half.checked_at,
            commit_verdict=half.commit_verdict,
            remark=half.remark,
            barrier=half.barrier,
            attempts=half.checks,
        )


class ParkedEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A parked transaction without its payload. `offset` is the offset of its record in parked[s]."""

    id: str
    group: str
    offset: int
    prepared_at: int
    parked_at: int
    fingerprint: bytes
    size: int
    index: MessageIndex
    checks: int
    reason: str
    commit_verdict: bool
    remark: str | None
    state: ClassVar[State] = State.PARKED

    @classmethod
    def of(cls, offset: int, parked: Parked) -> ParkedEntry:
        half = parked.half
        return cls(
            id=half.id,
            group=intern(half.group),
            offset=offset,
            prepared_at=half.prepared_at,
            parked_at=parked.parked_at,
            fingerprint=half.fingerprint,
            size=size_of(half.messages),
            index=_index_of(half),
            checks=parked.checks,
            reason=parked.reason,
            commit_verdict=half.commit_verdict,
            remark=half.remark,
        )


class Ended(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An ended transaction. `tombstone` is the offset of its tombstone in half[s], once it is known."""

    id: str
    state: State
    group: str
    cause: Cause
    at: int
    prepared_at: int
    checks: int
    half_offset: int
    fingerprint: bytes
    index: MessageIndex
    remark: str | None
    tombstone: int | None = None

    @classmethod
    def from_op(cls, op: Op, tombstone: int | None) -> Ended:
        """Build the outcome of a final op marker."""
        if len(op.messages) == 1:  # most transactions have one message
            (message,) = op.messages
            index = MessageIndex((message.topic,), (message.key_hash and message.key_hash[:KEY_BYTES],))
        else:
            keys = tuple([message.key_hash and message.key_hash[:KEY_BYTES] for message in op.messages])
            index = MessageIndex(tuple([message.topic for message in op.messages]), collapse_equal_keys(keys))
        return cls(
            id=op.id,
            state=_COMMITTED if op.kind is _MARKS_COMMIT else _ROLLED_BACK,
            group=op.group,
            cause=op.cause,
            at=op.at,
            prepared_at=op.prepared_at,
            checks=op.checks,
            half_offset=op.half_offset,
            fingerprint=op.fingerprint,
            index=index,
            remark=op.remark,
            tombstone=tombstone,
        )

    @property
    def op(self) -> Op:
        """Its op marker, as far as it is remembered: the digests of the messages are not."""
        return Op(
            kind=OpKind.COMMITTED if self.state is State.COMMITTED else OpKind.ROLLED_BACK,
            id=self.id,
            group=self.group,
            half_offset=self.half_offset,
            cause=self.cause,
            prepared_at=self.prepared_at,
            at=self.at,
            fingerprint=self.fingerprint,
            checks=self.checks,
            remark=self.remark,
        )


Unresolved = Pending | ParkedEntry
Entry = Unresolved | Ended


class OpTotals(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The totals in the last op marker of an id that has no outcome."""

    offset: int
    at: int
    resumed: bool
    checks: int
    checked_at: int | None
    commit_verdict: bool
    remark: str | None

    @classmethod
    def of(cls, offset: int, op: Op) -> OpTotals:
        return cls(
            offset=offset,
            at=op.at,
            resumed=op.kind is OpKind.RESUMED,
            checks=op.checks,
            checked_at=op.checked_at,
            commit_verdict=op.commit_verdict,
            remark=op.remark,
        )


def _index_of(half: Half) -> MessageIndex:
    if len(half.messages) == 1:  # most transactions have one message
        (message,) = half.messages
        return MessageIndex(_shared((intern(message.topic),)), (short_key_hash(message.key),))
    hashes = {key: short_key_hash(key) for key in {message.key for message in half.messages}}
    return MessageIndex.of((message.topic, hashes[message.key]) for message in half.messages)


def short_key_hash(key: bytes | None) -> bytes | None:
    hashed = key_digest(key)
    return None if hashed is None else hashed[:KEY_BYTES]


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
