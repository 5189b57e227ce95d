"""The log in memory: internal partitions with offsets, real topics, groups, cursors, owners, and injected faults.

It outlives the instances that use it, as Kafka does: a restart is a new instance on the same log.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Generic, TypeVar

import msgspec

from halfway.coordinator.cluster.forward import PeerHandler
from halfway.coordinator.ports import Appended, Cursors, LoggedOp, OpsRead, OwnerHint, PlacesRead, TopicFacts
from halfway.protocol.errors import (
    KafkaUnavailableError,
    MessageTooLargeError,
    NotAuthorisedError,
    OutcomeUnknownError,
    OverloadedError,
)
from halfway.protocol.ids import partition_for_key
from halfway.protocol.keys import Key, KeyTable
from halfway.protocol.records import NO_BARRIER, Barrier, Group, Half, Message, Op, Parked
from halfway.protocol.transactions import State

BARRIER_KEY = "!barrier"
"""The key of a barrier; no transaction id can be equal to it."""


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
        self.records: list[InternalRecord[V]] = []
        self.end = 0
        self._watchers: list[Callable[[], None]] = []

    def append(self, key: str, value: V | Barrier | None, headers: Headers) -> int:
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
        self.half: Partition[Half] = Partition()
        self.op: Partition[Op] = Partition()
        self.parked: Partition[Parked] = Partition()
        self.owner: int | None = None
        """The incarnation that may write: all others are fenced."""


class RealTopic:
    """A real topic: its facts and its committed records."""

    def __init__(self, facts: TopicFacts) -> None:
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
        self.instances: dict[str, PeerHandler] = {}
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


class Faults:
    """Each requested fault happens once, in order; a switch stays on until it is turned off."""

    def __init__(self) -> None:
        self.unavailable = False
        """Kafka does not answer: topics, groups, cursors and reads fail."""
        self.denied_topics: set[str] = set()
        """Real topics that the lane may not write to."""
        self._appends: deque[bool] = deque()
        self._batches: deque[bool] = deque()
        self._holds = 0
        self._answer_holds = 0

    def next_append_ambiguous(self, *, stored: bool) -> None:
        """Leave the caller of the next prepare without an answer; `stored`: the record is stored."""
        self._appends.append(stored)

    def lose_next_batch(self, *, written: bool) -> None:
        """End the incarnation with the lane's next Kafka transaction; `written`: the transaction is committed."""
        self._batches.append(written)

    @contextmanager
    def lane_held(self) -> Iterator[None]:
        """Hold the lane inside this block: submitted writes wait, and are then written as one batch."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    @property
    def holds_lane(self) -> bool:
        return self._holds > 0

    @contextmanager
    def answers_held(self) -> Iterator[None]:
        """Delay the lane's answers until the end of this block; it commits inside the block."""
        self._answer_holds += 1
        try:
            yield
        finally:
            self._answer_holds -= 1

    @property
    def holds_answers(self) -> bool:
        """Whether answers of committed transactions are held."""
        return self._answer_holds > 0

    def take_append(self) -> bool | None:
        """Return whether the next append, which gets no answer, is stored; None if it is answered as usual."""
        return self._appends.popleft() if self._appends else None

    def take_batch(self) -> bool | None:
        """Return whether the next batch, which ends the incarnation, is written; None if it does not end it."""
        return self._batches.popleft() if self._batches else None


T = TypeVar("T")


class MemoryHalfLog:
    """The port `service.ports.HalfLog`."""

    def __init__(self, log: MemoryLog, faults: Faults, *, max_record_bytes: int) -> None:
        """Refuse halves with a payload above `max_record_bytes`."""
        self._log = log
        self._faults = faults
        self._max_record_bytes = max_record_bytes

    def append(self, shard: int, halves: Sequence[tuple[Half, T]], appended: Appended[T], *, deadline: float) -> None:
        """Append half records; their offsets come later; errors as in the port."""
        loop = asyncio.get_running_loop()
        refused: list[tuple[T, int | Exception]] = []
        for half, token in halves:
            if half.size > self._max_record_bytes:
                detail = f"the transaction takes {half.size} bytes, {self._max_record_bytes} at most: send less"
                refused.append((token, MessageTooLargeError(detail)))
            elif loop.time() >= deadline:
                refused.append((token, OverloadedError("no time was left to write")))
            else:
                task = loop.create_task(self._append(shard, half))
                task.add_done_callback(partial(_pass_on, token, appended))
        if refused:
            appended(refused)

    async def _append(self, shard: int, half: Half) -> int:
        ambiguous = self._faults.take_append()
        await asyncio.sleep(0)
        if ambiguous is False:
            raise OutcomeUnknownError("the prepare was not confirmed", id=half.id)
        headers = half_headers(half, State.PREPARED)
        offset = self._log.shards[shard].half.append(half.id, half, headers)
        await asyncio.sleep(0)
        if ambiguous:
            raise OutcomeUnknownError("the prepare was not confirmed", id=half.id)
        return offset

    async def read_half(self, shard: int, offset: int, transaction_id: str, *, deadline: float) -> Half:
        """Read the half record at an offset, after verifying its key; errors as in the port."""
        await self._answering(deadline)
        record = self._log.shards[shard].half.at(offset)
        if record is None or record.key != transaction_id or not isinstance(record.value, Half):
            raise KafkaUnavailableError(f"half[{shard}]@{offset} does not hold {transaction_id!r}")
        return record.value

    async def read_parked(self, shard: int, offset: int, transaction_id: str, *, deadline: float) -> Parked:
        """Read the parked record at an offset, after verifying its key; errors as in the port."""
        await self._answering(deadline)
        record = self._log.shards[shard].parked.at(offset)
        if record is None or record.key != transaction_id or not isinstance(record.value, Parked):
            raise KafkaUnavailableError(f"parked[{shard}]@{offset} does not hold {transaction_id!r}")
        return record.value

    async def half_end(self, shard: int, *, deadline: float) -> int:
        await self._answering(deadline)
        return self._log.shards[shard].half.end

    async def _answering(self, deadline: float) -> None:
        await asyncio.sleep(0)
        if self._faults.unavailable or asyncio.get_running_loop().time() >= deadline:
            raise KafkaUnavailableError("Kafka did not answer in time")


def _pass_on(token: T, appended: Appended[T], done: asyncio.Task[int]) -> None:
    if done.cancelled():
        return
    error = done.exception()
    if error is None:
        appended([(token, done.result())])
    elif isinstance(error, Exception):
        appended([(token, error)])


class MemoryHistory:
    """The port `service.ports.History`; it reads everything, without limits."""

    def __init__(self, log: MemoryLog, faults: Faults) -> None:
        self._log = log
        self._faults = faults

    async def ops(self, shard: int, transaction_id: str, *, starts: Sequence[int], deadline: float) -> OpsRead:
        await self._check_available(deadline)
        return OpsRead(
            ops=tuple(
                LoggedOp(offset=record.offset, timestamp=record.value.at, op=record.value)
                for record in self._log.shards[shard].op.since(0)
                if record.key == transaction_id
                and isinstance(record.value, Op)
                and record.value.at >= min(starts, default=0)
            ),
            complete=True,
        )

    async def places(self, transaction_id: str, topics: Sequence[str], *, at_ms: int, deadline: float) -> PlacesRead:
        """Find the messages of a commit."""
        await self._check_available(deadline)
        places = {}
        for name in dict.fromkeys(topics):
            topic = self._log.topics.get(name)
            for record in () if topic is None else topic.records:
                headers = dict(record.headers)
                if headers.get("halfway-transaction-id") == transaction_id.encode() and record.timestamp >= at_ms:
                    number = int((headers["halfway-message"] or b"").partition(b"/")[0])
                    places[number] = (record.partition, record.offset)
        lost = len(topics) - len(places)
        return PlacesRead(places=places, detail=f"{lost} messages were not found" if lost else None)

    async def _check_available(self, deadline: float) -> None:
        await asyncio.sleep(0)
        if self._faults.unavailable or asyncio.get_running_loop().time() >= deadline:
            raise KafkaUnavailableError("Kafka did not answer in time")


class MemoryCursors:
    """The port `service.ports.CursorStore`, and reads of the committed cursors."""

    def __init__(self, log: MemoryLog, faults: Faults) -> None:
        self._log = log
        self._faults = faults

    async def commit(self, cursors: Mapping[int, Cursors]) -> None:
        """Commit the cursors of shards; do nothing while Kafka is unavailable."""
        await asyncio.sleep(0)
        if not self._faults.unavailable:
            self._log.cursors.update(cursors)

    def load(self, shard: int) -> Cursors:
        """Return the cursors of a shard, both 0 if none were committed."""
        return self._log.cursors.get(shard, Cursors(half=0, op=0))


class MemoryGroups:
    """The port `service.ports.GroupStore`."""

    def __init__(self, log: MemoryLog, faults: Faults) -> None:
        self._log = log
        self._faults = faults

    def get(self, name: str) -> Group | None:
        return self._log.groups.get(name)

    def all(self) -> Sequence[Group]:
        return [self._log.groups[name] for name in sorted(self._log.groups)]

    async def change(self, name: str, decide: Callable[[Group | None], Group | None], *, deadline: float) -> None:
        """Write the decided group, or raise KafkaUnavailableError past the deadline."""
        await self._check_available(deadline)
        group = decide(self._log.groups.get(name))
        if group is None:
            self._log.groups.pop(name, None)
        else:
            self._log.groups[name] = group

    async def refresh(self, *, deadline: float) -> None:
        """Do nothing, because writes are visible at once; KafkaUnavailableError past the deadline."""
        await self._check_available(deadline)

    async def _check_available(self, deadline: float) -> None:
        await asyncio.sleep(0)
        if self._faults.unavailable or asyncio.get_running_loop().time() >= deadline:
            raise KafkaUnavailableError("the groups' topic did not answer in time")


class MemoryTopics:
    """The port `service.ports.Topics`."""

    def __init__(self, log: MemoryLog, faults: Faults) -> None:
        self._log = log
        self._faults = faults

    def known(self, names: Collection[str]) -> Mapping[str, TopicFacts] | None:
        """Return facts by name if all of the topics are visible; None otherwise."""
        facts = {name: self._log.topics[name].facts for name in names if name in self._log.topics}
        if self._faults.unavailable or len(facts) < len(names) or self._faults.denied_topics.intersection(names):
            return None
        return facts

    async def describe(self, names: Sequence[str], *, deadline: float) -> Mapping[str, TopicFacts | None]:
        """Return facts by name, None for a topic that does not exist; see the port for the errors."""
        await asyncio.sleep(0)
        if self._faults.unavailable or asyncio.get_running_loop().time() >= deadline:
            raise KafkaUnavailableError("Kafka did not describe the topics in time")
        denied = self._faults.denied_topics.intersection(names)
        if denied:
            raise NotAuthorisedError(f"halfway may not see topic {min(denied)!r}", topic=min(denied))
        topics = {name: self._log.topics.get(name) for name in names}
        return {name: None if topic is None else topic.facts for name, topic in topics.items()}


class MemoryKeys:
    """The port `service.ports.KeyStore`."""

    def __init__(self, log: MemoryLog, faults: Faults) -> None:
        self._log = log
        self._faults = faults

    @property
    def table(self) -> KeyTable:
        return self._log.keys

    async def put(self, key: Key, *, deadline: float) -> None:
        """Write a key; KafkaUnavailableError past the deadline."""
        await self.refresh(deadline=deadline)
        self._log.keys.apply(key.id, key)

    async def delete(self, key_id: str, *, deadline: float) -> None:
        """Delete a key; KafkaUnavailableError past the deadline."""
        await self.refresh(deadline=deadline)
        self._log.keys.apply(key_id, None)

    async def refresh(self, *, deadline: float) -> None:
        """Do nothing, because writes are visible at once; KafkaUnavailableError past the deadline."""
        await asyncio.sleep(0)
        if self._faults.unavailable or asyncio.get_running_loop().time() >= deadline:
            raise KafkaUnavailableError("the keys' topic did not answer in time")


class MemoryOwners:
    """The port `service.ports.Owners`."""

    def __init__(self, log: MemoryLog, url: str) -> None:
        self._log = log
        self._url = url

    def find(self, shard: int) -> OwnerHint | None:
        """Return the owner of a shard; None if there is none or if it is this instance."""
        hint = self._log.owners.get(shard)
        return None if hint is None or hint.url == self._url else hint
