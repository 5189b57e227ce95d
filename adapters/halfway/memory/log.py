"""The log in memory: internal partitions with offsets, real topics, groups, cursors and owners.

It outlives the instances that use it, as Kafka does: a restart is a new instance on the same log.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Generic, Protocol, TypeVar

import msgspec

from halfway.domain.ids import partition_for_key
from halfway.domain.keys import KeyTable
from halfway.domain.principal import Principal
from halfway.domain.records import NO_BARRIER, Barrier, Group, Half, Message, Op, Parked
from halfway.service.ports import Cursors, OwnerHint, TopicFacts
from halfway.service.records.peer_calls import PeerCall

BARRIER_KEY = "!barrier"
"""The key of a barrier; no transaction id can be equal to it."""


class CallHandler(Protocol):
    """Answers calls of other instances: `Coordinator.peer_handler`."""

    async def answer(self, call: PeerCall, *, deadline: float, principal: Principal) -> msgspec.Struct:
        """Carry out a call and return its answer."""


Headers = tuple[tuple[str, bytes | None], ...]
V = TypeVar("V")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A record of a real topic, as a `read_committed` consumer sees it; `timestamp` in ms since the epoch."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp: int


class InternalRecord(msgspec.Struct, Generic[V], frozen=True, kw_only=True):
    """A record of an internal partition; the value None is a tombstone."""

    offset: int
    key: str
    value: V | Barrier | None
    headers: Headers


class Partition(Generic[V]):
    """One internal partition: records by offset, with gaps in place of Kafka's control records."""

    def __init__(self) -> None:
        """Start empty."""
        self.records: list[InternalRecord[V]] = []
        self.end = 0
        self._watchers: list[Callable[[], None]] = []

    def append(self, key: str, value: V | Barrier | None, headers: Headers) -> int:
        """Append one record and return its offset."""
        offset = self.end
        self.records.append(InternalRecord(offset=offset, key=key, value=value, headers=headers))
        self.end = offset + 1
        for watcher in tuple(self._watchers):
            watcher()
        return offset

    def mark(self) -> None:
        """Use one offset for the control record that ends a Kafka transaction."""
        self.end += 1

    def since(self, offset: int) -> list[InternalRecord[V]]:
        """Return the records from an offset on."""
        return self.records[bisect_left(self.records, offset, key=lambda record: record.offset) :]

    def at(self, offset: int) -> InternalRecord[V] | None:
        """Return the record at an offset, None if there is none."""
        following = self.since(offset)[:1]
        return following[0] if following and following[0].offset == offset else None

    def compact(self, before: int) -> None:
        """Of the records below an offset, keep only the last one of each key, as the broker's log cleaner does."""
        last = {record.key: record.offset for record in self.records if record.offset < before}
        self.records = [
            record for record in self.records if record.offset >= before or last[record.key] == record.offset
        ]

    def watch(self, watcher: Callable[[], None]) -> Callable[[], None]:
        """Call `watcher` after each append; return a function that stops this."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)


class ShardLog:
    """half[s], op[s] and parked[s]."""

    def __init__(self) -> None:
        """Start empty, without an owner."""
        self.half: Partition[Half] = Partition()
        self.op: Partition[Op] = Partition()
        self.parked: Partition[Parked] = Partition()
        self.owner: int | None = None
        """The incarnation that may write: all others are fenced."""


class RealTopic:
    """A real topic: its facts and its committed records."""

    def __init__(self, facts: TopicFacts) -> None:
        """Start empty."""
        self.facts = facts
        self.records: list[Record] = []
        self._ends = [0] * facts.partitions
        self._keyless = count()

    def append(self, topic: str, message: Message, headers: Headers, timestamp: int) -> None:
        """Append a message to its own partition, else to that of its key as in the Java client, else in turn."""
        partition = message.partition
        if partition is None and message.key is not None:
            partition = partition_for_key(message.key, self.facts.partitions)
        elif partition is None:
            partition = next(self._keyless) % self.facts.partitions
        self.records.append(
            Record(
                topic=topic,
                partition=partition,
                offset=self._ends[partition],
                key=message.key,
                value=message.value,
                headers=headers,
                timestamp=timestamp,
            )
        )
        self._ends[partition] += 1


class MemoryLog:
    """Everything that Kafka would store."""

    def __init__(self, shards: int, topics: Mapping[str, TopicFacts]) -> None:
        """Create the internal topics and the given real ones, empty."""
        self.shards = [ShardLog() for _ in range(shards)]
        self.topics = {name: RealTopic(facts) for name, facts in topics.items()}
        self.groups: dict[str, Group] = {}
        self.keys = KeyTable()
        self.cursors: dict[int, Cursors] = {}
        self.owners: dict[int, OwnerHint] = {}
        """The owner of each shard, according to the owner records."""
        self.instances: dict[str, CallHandler] = {}
        """The handlers of calls from other instances, by URL."""
        self._incarnations = count(1)
        self._urls = count(1)

    def new_url(self) -> str:
        """Return a new, unique URL."""
        return f"memory://{next(self._urls)}"

    def new_incarnation(self) -> int:
        """Return a new, unique incarnation id."""
        return next(self._incarnations)


def kept_headers(kind: str, group: str, state: str) -> Headers:
    """Return the headers of every internal record (docs/protocol.md#topics)."""
    return (("halfway-kind", kind.encode()), ("halfway-group", group.encode()), ("halfway-state", state.encode()))


def half_headers(half: Half, state: str) -> Headers:
    """Return the headers of a half record (docs/protocol.md#topics)."""
    headers = (*kept_headers("half", half.group, state), ("halfway-prepared-at", str(half.prepared_at).encode()))
    return headers if half.barrier == NO_BARRIER else (*headers, ("halfway-barrier", str(half.barrier).encode()))


def real_headers(own: Iterable[tuple[str, bytes | None]], transaction_id: str, place: str, prepared_at: int) -> Headers:
    """Return the headers of a real message: its own, then those of docs/protocol.md#topics; `place` is `i/n`."""
    return (
        *own,
        ("halfway-transaction-id", transaction_id.encode()),
        ("halfway-message", place.encode()),
        ("halfway-prepared-at", str(prepared_at).encode()),
        ("halfway-prefix", b"memory."),
    )
