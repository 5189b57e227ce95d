"""One instance as the contract tests see it: the ports, and a listener that keeps the folds as the service does."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

from halfway.coordinator import changes
from halfway.coordinator.changes import OpFields
from halfway.coordinator.ports import (
    CursorStore,
    GroupStore,
    HalfLog,
    Lane,
    LaneWrite,
    LogLoss,
    Owners,
    ShardListener,
    TopicFacts,
    Topics,
    Written,
)
from halfway.protocol.entries import Ended, ParkedEntry, Pending
from halfway.protocol.ids import shard_of
from halfway.protocol.records import Foreign, Half, Message, Op, Parked, fingerprint
from halfway.protocol.shard import ShardState
from halfway.protocol.transactions import Cause
from tests.support.replies import appended, submitted
from tests.support.waiting import until_true

PATIENCE_S = 60.0
SHARDS = 2
GROUP = "shop"


@dataclass(frozen=True)
class Seen:
    """A record of a real topic as a `read_committed` consumer got it; `timestamp` in ms since the epoch."""

    partition: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp: int


@dataclass(frozen=True)
class Stored:
    """A committed record of an internal topic; `value` None is a tombstone."""

    offset: int
    key: str
    value: Half | Op | Parked | None
    headers: dict[str, bytes]


class Membership(Protocol):
    """An instance as a member of the cluster: it acquires shards (docs/protocol.md#ownership)."""

    async def start(self, listener: ShardListener) -> None:
        """Join, and acquire the assigned shards; return when that is in progress."""

    async def stop(self, *, deadline: float) -> None:
        """Release every shard and leave; drop work that is not finished by the deadline."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """What an adapter provides to one instance."""

    lane: Lane
    half_log: HalfLog
    cursors: CursorStore
    groups: GroupStore
    topics: Topics
    owners: Owners
    membership: Membership


class Backend(Protocol):
    """A log that outlives instances, and what stands in it."""

    def ports(self) -> AbstractAsyncContextManager[Ports]:
        """Start the ports of one instance, all but its membership."""

    async def create_topic(self, label: str, partitions: int = 3, *, compacted: bool = False) -> str:
        """Create a real topic and return its name; `max.message.bytes` is 100,000."""

    async def delete_topic(self, name: str) -> None:
        """Delete a real topic."""

    async def records(self, name: str) -> Sequence[Seen]:
        """Read a real topic; the order holds within each partition."""

    async def stored(self, kind: str, shard: int, transaction_id: str) -> Sequence[Stored]:
        """Read the records of an id in `half`, `op` or `parked` of a shard."""

    async def foreign_prepare(self, shard: int, half: Half) -> int:
        """Append a prepare as another instance does."""

    def now_ms(self) -> int:
        """The time that new records get."""


@dataclass
class Listener:
    """What the service does with shards, less everything else."""

    states: dict[int, ShardState] = field(default_factory=dict)
    events: list[tuple[str, int]] = field(default_factory=list)
    not_current: set[str] = field(default_factory=set)
    may_finish: asyncio.Event = field(default_factory=asyncio.Event)
    """What `revoked` waits for."""

    def __post_init__(self) -> None:
        self.may_finish.set()

    def compare(self, shard: int, state: ShardState, *, suspect: bool) -> bool:
        """Keep no former fold."""
        return False

    def known_log(self, _shard: int) -> None:
        """Know nothing of the log."""

    def log_lost(self, shard: int, loss: LogLoss) -> None:
        self.events.append((f"lost records of {loss.topic}", shard))

    def forget(self, shard: int) -> None:
        """Keep nothing."""

    def acquired(self, shard: int, state: ShardState) -> None:
        self.states[shard] = state
        self.events.append(("acquired", shard))

    def has_applied(self, shard: int, offset: int, key: bytes | None) -> bool:
        entry = self.states[shard].unresolved((key or b"").decode()) if shard in self.states else None
        return isinstance(entry, Pending) and entry.offset == offset

    def appended(self, shard: int, records: Sequence[tuple[int, str, Half | Foreign | None]], position: int) -> None:
        state = self.states[shard]
        for offset, transaction_id, half in records:
            state.apply_half(offset, transaction_id, half)
        state.half_tail = position

    def may_still_be_written(self, write: LaneWrite) -> bool:
        return write.id not in self.not_current

    async def revoked(self, shard: int) -> None:
        self.events.append(("revoking", shard))
        await self.may_finish.wait()
        self.events.append(("revoked", shard))

    def lost(self, shard: int) -> None:
        self.states.pop(shard, None)
        self.events.append(("lost", shard))


class Instance:
    """One running instance."""

    def __init__(self, ports: Ports, backend: Backend) -> None:
        self.lane = ports.lane
        self.half_log = ports.half_log
        self.cursors = ports.cursors
        self.groups = ports.groups
        self.topics = ports.topics
        self.owners = ports.owners
        self.membership = ports.membership
        self.listener = Listener()
        self._backend = backend
        self._stopped = False

    @property
    def states(self) -> dict[int, ShardState]:
        return self.listener.states

    @staticmethod
    def deadline(seconds: float = PATIENCE_S) -> float:
        return asyncio.get_running_loop().time() + seconds

    async def start(self) -> None:
        await self.membership.start(self.listener)
        await until_true(lambda: len(self.states) == SHARDS, f"all shards are acquired: {self.listener.events}")

    async def stop(self, seconds: float = PATIENCE_S) -> None:
        if not self._stopped:
            self._stopped = True
            await self.membership.stop(deadline=self.deadline(seconds))

    async def wait_for_tail(self, shard: int) -> None:
        """Wait until the tail has read what stands in half[s] now."""
        end = await self.half_log.half_end(shard, deadline=self.deadline())
        await until_true(lambda: self.states[shard].half_tail >= end, f"half[{shard}] is tailed to {end}")

    def entry(self, shard: int, transaction_id: str) -> Pending | ParkedEntry:
        entry = self.states[shard].find(transaction_id)
        assert entry is not None, f"{transaction_id} is not known"
        assert not isinstance(entry, Ended), f"{transaction_id} is {entry.state}"
        return entry

    def pending(self, shard: int, transaction_id: str) -> Pending:
        entry = self.entry(shard, transaction_id)
        assert isinstance(entry, Pending), f"{transaction_id} is parked"
        return entry

    def ended(self, shard: int, transaction_id: str) -> Ended:
        entry = self.states[shard].find(transaction_id)
        assert isinstance(entry, Ended), f"{transaction_id} is {entry}"
        return entry

    # --- what the service does, by its own records

    async def prepare(self, shard: int, half: Half) -> int:
        """Append a first prepare and apply it."""
        offset = await appended(self.half_log, shard, half, deadline=self.deadline())
        self.states[shard].apply_half(offset, half.id, half)
        return offset

    async def write(self, write: LaneWrite) -> Written:
        """Write through the lane, and apply what was written."""
        async with asyncio.timeout(PATIENCE_S):
            written = await submitted(self.lane, write)
        state = self.states[write.shard]
        if write.op is not None:
            assert written.op is not None
            state.apply_op(written.op, write.op)
        if write.half is not None:
            assert written.half is not None
            state.apply_half(written.half, write.id, write.half if isinstance(write.half, Half) else None)
        if write.parked is not None:
            assert written.parked is not None
            state.apply_parked(written.parked, write.id, write.parked if isinstance(write.parked, Parked) else None)
        return written

    def told(self, **fields: object) -> OpFields:
        values: dict[str, object] = {
            "cause": Cause.PRODUCER,
            "at": self._backend.now_ms(),
            "deadline": self.deadline(),
            "checks": 0,
        }
        return OpFields(**(values | fields))  # type: ignore[arg-type]

    def commit_of(self, shard: int, half: Half, **fields: object) -> LaneWrite:
        return changes.committed(shard, self.entry(shard, half.id), half, self.told(**fields))

    async def park(self, shard: int, half: Half, *, reason: str, checks: int = 0) -> Written:
        told = self.told(cause=Cause.POLICY, remark=reason, checks=checks)
        return await self.write(changes.parked(shard, self.pending(shard, half.id), half, told))

    async def resume(self, shard: int, half: Half) -> Written:
        entry = self.entry(shard, half.id)
        assert isinstance(entry, ParkedEntry)
        told = self.told(cause=Cause.OPERATOR)
        return await self.write(changes.resumed(shard, entry, half, told, since=told.at))


@asynccontextmanager
async def running(backend: Backend) -> AsyncIterator[Instance]:
    """Run an instance that serves all shards, until the end of the block."""
    async with backend.ports() as ports:
        instance = Instance(ports, backend)
        try:
            await instance.start()
            yield instance
        finally:
            instance.listener.may_finish.set()
            await instance.stop()


def new_id(name: str = "t", *, shard: int = 0) -> str:
    """Make an id that no other test has and that belongs to a shard."""
    while True:
        made = f"{name}-{uuid4().hex[:12]}"
        if shard_of(made, SHARDS) == shard:
            return made


def half_of(transaction_id: str, messages: Iterable[Message] = (), *, at: int = 1_760_000_000_000) -> Half:
    """Make the half of a first prepare."""
    content = tuple(messages)
    return Half(
        id=transaction_id,
        group=GROUP,
        messages=content,
        prepared_at=at,
        since=at,
        fingerprint=fingerprint(GROUP, content, None),
    )


def facts(partitions: int = 3, *, compacted: bool = False) -> TopicFacts:
    """The facts of a topic as `create_topic` makes it."""
    return TopicFacts(partitions=partitions, max_message_bytes=100_000, compacted=compacted)
