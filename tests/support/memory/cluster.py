"""The ports of one instance without Kafka, over one log: it acquires every shard by folding its log, and tails half.

See docs/protocol.md#ownership.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypedDict

from halfway.coordinator.access import OpenAccess
from halfway.coordinator.ports import (
    AuditTrail,
    Authority,
    CheckCaller,
    Clock,
    Cursors,
    CursorStore,
    GroupStore,
    HalfLog,
    History,
    Lane,
    Observer,
    OwnerHint,
    Owners,
    Peers,
    ShardListener,
    TopicFacts,
    Topics,
)
from halfway.protocol.ids import BORN_AFTER_END_MS
from halfway.protocol.records import Barrier, Half, Op, Parked
from halfway.protocol.shard import ShardState
from halfway.protocol.transactions import State
from tests.support.memory.lane import Incarnation, MemoryLane
from tests.support.memory.log import (
    BARRIER_KEY,
    Faults,
    MemoryCursors,
    MemoryGroups,
    MemoryHalfLog,
    MemoryHistory,
    MemoryKeys,
    MemoryLog,
    MemoryOwners,
    MemoryTopics,
    RealTopic,
    Record,
    ShardLog,
    half_headers,
    kept_headers,
)
from tests.support.peers.encoded import EncodedPeers
from tests.support.surroundings import ManualClock, MemoryAuditTrail, RecordingObserver, ScriptedCaller


class MemoryMembership:
    """The membership of an instance that owns every shard, or the shards in `owns`."""

    def __init__(
        self,
        log: MemoryLog,
        lane: MemoryLane,
        cursors: MemoryCursors,
        clock: Clock,
        *,
        outcome_horizon_s: float,
        url: str,
        owns: Collection[int] | None = None,
    ) -> None:
        """Keep the parts; no shard is owned before `start`. Other instances call this one at `url`."""
        self._url = url
        self._owns = range(len(log.shards)) if owns is None else sorted(owns)
        self._log = log
        self._lane = lane
        self._cursors = cursors
        self._clock = clock
        self._horizon_ms = round(outcome_horizon_s * 1000)
        self._listener: ShardListener | None = None
        self._incarnation: Incarnation | None = None
        self._tails: dict[int, _Tail] = {}

    async def start(self, listener: ShardListener) -> None:
        """Acquire every shard in the next turn of the loop."""
        self._listener = listener
        asyncio.get_running_loop().call_soon(self._begin)

    async def stop(self, *, deadline: float) -> None:
        """Wait until the listener has finished each shard, then release it; drop a shard that is late."""
        listener, incarnation, self._listener = self._listener, self._incarnation, None
        if listener is None or incarnation is None:
            return
        for shard in sorted(incarnation.shards):
            try:
                async with asyncio.timeout_at(deadline):
                    await listener.revoked(shard)
            except TimeoutError:
                listener.lost(shard)
        self.kill()

    def kill(self) -> None:
        """End as kill -9 does: finish nothing and notify nothing."""
        incarnation, self._incarnation, self._listener = self._incarnation, None, None
        self._lane.detach()
        for tail in self._tails.values():
            tail.stop()
        self._tails.clear()
        if incarnation is not None:
            for number, shard in enumerate(self._log.shards):
                if shard.owner == incarnation.number:
                    shard.owner = None
                    self._log.owners.pop(number, None)

    def lose(self) -> None:
        """End the incarnation as fencing or an ambiguous commit does: lose every shard, then acquire it again."""
        listener = self._listener
        incarnation = self._incarnation
        if listener is None or incarnation is None:
            return  # there is no incarnation, or the next one is about to begin
        self.kill()
        for shard in sorted(incarnation.shards):
            listener.lost(shard)
        self._listener = listener
        asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        listener = self._listener
        if listener is None or self._incarnation is not None:
            return
        incarnation = Incarnation(
            number=self._log.new_incarnation(), shards=set(), listener=listener, on_lost=self.lose
        )
        self._incarnation = incarnation
        self._lane.attach(incarnation)
        for shard in self._owns:
            self._acquire(shard, incarnation, listener)

    def _acquire(self, shard: int, incarnation: Incarnation, listener: ShardListener) -> None:
        log, now = self._log.shards[shard], self._clock.now_ms()
        log.owner = incarnation.number
        self._log.owners[shard] = OwnerHint(incarnation=str(incarnation.number), url=self._url)
        barrier = Barrier(incarnation=str(incarnation.number), at=now)
        headers = kept_headers("barrier", "", "acquired")
        position = log.half.append(BARRIER_KEY, barrier, headers) + 1
        log.op.append(BARRIER_KEY, barrier, headers)
        log.parked.append(BARRIER_KEY, barrier, headers)
        for partition in (log.half, log.op, log.parked):
            partition.mark()
        state = fold(
            shard,
            log,
            self._cursors.load(shard),
            remember_since=now - self._horizon_ms - BORN_AFTER_END_MS,
            horizon_ms=self._horizon_ms,
        )
        state.barrier = position - 1
        state.half_tail = position
        state.acquired_at = now
        state.complete_fold(now - self._horizon_ms)
        state.forget(now - self._horizon_ms)
        incarnation.shards.add(shard)
        listener.acquired(shard, state)
        self._tails[shard] = _Tail(log, position, lambda: self._tail(shard, incarnation))
        self._tails[shard].wake()

    def _tail(self, shard: int, incarnation: Incarnation) -> None:
        """Pass on the records appended to half[s]; if another incarnation owns the shard, it is lost."""
        tail, listener = self._tails.get(shard), self._listener
        if tail is None or listener is None or incarnation is not self._incarnation:
            return
        if self._log.shards[shard].owner != incarnation.number:
            self._tails.pop(shard).stop()
            incarnation.shards.discard(shard)
            listener.lost(shard)
            return
        records, position = tail.read()
        listener.appended(shard, records, position)


class _Tail:
    """The tail of one half partition; it reads in a later turn of the loop."""

    def __init__(self, log: ShardLog, position: int, read: Callable[[], None]) -> None:
        self._half = log.half
        self._position = position
        self._read = read
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self.stop = log.half.watch(self.wake)

    def wake(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        self._read()

    def read(self) -> tuple[list[tuple[int, str, Half | None]], int]:
        appended = self._half.since(self._position)
        self._position = self._half.end
        records = [
            (record.offset, record.key, record.value) for record in appended if not isinstance(record.value, Barrier)
        ]
        return records, self._position


def fold(
    shard: int, log: ShardLog, cursors: Cursors, *, remember_since: int, horizon_ms: int | None = None
) -> ShardState:
    """Fold half and op from their cursors, op also from `remember_since` (ms) for its outcomes, and all of parked."""
    state = ShardState(shard, horizon_ms=horizon_ms)
    for parked in log.parked.records:
        if parked.value is None or isinstance(parked.value, Parked):
            state.apply_parked(parked.offset, parked.key, parked.value)
    ops = [(record.offset, record.value) for record in log.op.records if isinstance(record.value, Op)]
    remembered = next((offset for offset, op in ops if op.at >= remember_since), log.op.end)
    state.op_start, state.op_recent = min(cursors.op, remembered), remembered
    for offset, op in ops:
        if offset >= state.op_start:
            state.apply_op(offset, op)
    for half in log.half.since(cursors.half):
        if half.value is None or isinstance(half.value, Half):
            state.apply_half(half.offset, half.key, half.value)
    state.op_tail = log.op.end
    return state


MIB = 1024 * 1024


class Ports(TypedDict):
    """The ports by their parameter names in `halfway.coordinator.coordinator.Coordinator`."""

    lane: Lane
    half_log: HalfLog
    cursors: CursorStore
    groups: GroupStore
    topics: Topics
    caller: CheckCaller
    authority: Authority
    clock: Clock
    observer: Observer
    owners: Owners
    peers: Peers
    audit_trail: AuditTrail
    history: History


def topic(partitions: int = 3, *, max_message_bytes: int = 1_048_588, compacted: bool = False) -> TopicFacts:
    """Return facts of a real topic; the defaults are those of a Kafka broker, with three partitions."""
    return TopicFacts(partitions=partitions, max_message_bytes=max_message_bytes, compacted=compacted)


class Memory:
    """Kafka with halfway's ports on it, in this process.

    `Coordinator(limits=..., **memory.ports)`, then `await memory.membership.start(coordinator.shards)`. Several
    instances can share one log, each with the shards in its `owns`, and `memory.peers.serve(coordinator.peer_handler)`.
    """

    def __init__(
        self,
        *,
        shards: int = 8,
        topics: Mapping[str, TopicFacts | int] | None = None,
        outcome_horizon_s: float = 900,
        max_record_bytes: int = 16 * MIB,
        lane_capacity: int = 10_000,
        clock: ManualClock | None = None,
        log: MemoryLog | None = None,
        owns: Collection[int] | None = None,
    ) -> None:
        """Create the log, unless it is given, and the ports on it.

        `topics` are the real topics by name: their facts, or just their number of partitions. `owns` are the shards
        that this instance acquires; None means all.
        """
        facts = {name: topic(value) if isinstance(value, int) else value for name, value in (topics or {}).items()}
        self.log = MemoryLog(shards, facts) if log is None else log
        self.faults = Faults()
        self.clock = ManualClock() if clock is None else clock
        self.observer = RecordingObserver()
        self.caller = ScriptedCaller()
        self.authority: Authority = OpenAccess()
        self.audit_trail = MemoryAuditTrail()
        self.lane = MemoryLane(self.log, self.faults, self.clock, self.observer, capacity=lane_capacity)
        self.half_log = MemoryHalfLog(self.log, self.faults, max_record_bytes=max_record_bytes)
        self.history = MemoryHistory(self.log, self.faults)
        self.cursors = MemoryCursors(self.log, self.faults)
        self.groups = MemoryGroups(self.log, self.faults)
        self.keys = MemoryKeys(self.log, self.faults)
        self.topics = MemoryTopics(self.log, self.faults)
        url = self.log.new_url()
        self.owners = MemoryOwners(self.log, url)
        self.peers = EncodedPeers(self.log.instances, url, lambda owner: owner in self.log.owners.values())
        self.membership = MemoryMembership(
            self.log, self.lane, self.cursors, self.clock, outcome_horizon_s=outcome_horizon_s, url=url, owns=owns
        )
        self._owns = owns
        self._settings = outcome_horizon_s, max_record_bytes, lane_capacity

    @property
    def ports(self) -> Ports:
        return Ports(
            lane=self.lane,
            half_log=self.half_log,
            cursors=self.cursors,
            groups=self.groups,
            topics=self.topics,
            caller=self.caller,
            authority=self.authority,
            clock=self.clock,
            observer=self.observer,
            owners=self.owners,
            peers=self.peers,
            audit_trail=self.audit_trail,
            history=self.history,
        )

    def restarted(self) -> Memory:
        """Kill this instance, as kill -9 does, and return the ports of the next one on the same log and clock."""
        self.membership.kill()
        outcome_horizon_s, max_record_bytes, lane_capacity = self._settings
        return Memory(
            outcome_horizon_s=outcome_horizon_s,
            max_record_bytes=max_record_bytes,
            lane_capacity=lane_capacity,
            clock=self.clock,
            log=self.log,
            owns=self._owns,
        )

    # --- the real topics, as producers and consumers see them

    def create_topic(self, name: str, facts: TopicFacts | int = 3) -> None:
        """Create a real topic with these facts, or with this number of partitions."""
        self.log.topics[name] = RealTopic(topic(facts) if isinstance(facts, int) else facts)

    def delete_topic(self, name: str) -> None:
        del self.log.topics[name]

    def records(self, name: str) -> Sequence[Record]:
        """Return the records of a real topic that `read_committed` consumers see, in the order of the commits."""
        return tuple(self.log.topics[name].records)

    # --- writes of other instances

    def foreign_prepare(self, shard: int, half: Half) -> int:
        """Append a prepare as a paused former owner does: only the tail of this instance sees it."""
        return self.log.shards[shard].half.append(half.id, half, half_headers(half, State.PREPARED))
