"""One instance as the contract tests see it: the ports, and a listener that keeps the folds as the service does."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from halfway.coordinator import changes
from halfway.coordinator.changes import OpFields
from halfway.coordinator.ports import LaneWrite, LogLoss, TopicFacts, Written
from halfway.protocol.entries import Ended, ParkedEntry, Pending
from halfway.protocol.records import Foreign, Half, Message, Parked, fingerprint
from halfway.protocol.shard import ShardState
from halfway.protocol.transactions import Cause
from tests.support.contract.backend import PATIENCE_S, SHARDS, Backend, Ports
from tests.support.replies import appended, submitted
from tests.support.waiting import until_true

GROUP = "shop"


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
