"""All ports of one instance in memory, over one log."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypedDict

from halfway.domain.records import Half
from halfway.domain.transaction import State
from halfway.memory.faults import Faults
from halfway.memory.half_log import MemoryHalfLog
from halfway.memory.history import MemoryHistory
from halfway.memory.lane import MemoryLane
from halfway.memory.log import MemoryLog, RealTopic, Record, half_headers
from halfway.memory.membership import MemoryMembership
from halfway.memory.peers import MemoryOwners, MemoryPeers
from halfway.memory.stores import MemoryCursors, MemoryGroups, MemoryKeys, MemoryTopics
from halfway.memory.surroundings import ManualClock, MemoryAuditTrail, RecordingObserver, ScriptedCaller
from halfway.service.access.access import OpenAccess
from halfway.service.check_ports import CheckCaller
from halfway.service.ports import (
    AuditTrail,
    Authority,
    Clock,
    CursorStore,
    GroupStore,
    HalfLog,
    History,
    Lane,
    Observer,
    Owners,
    Peers,
    TopicFacts,
    Topics,
)

MIB = 1024 * 1024


class Ports(TypedDict):
    """The ports by their parameter names in `halfway.service.coordinator.Coordinator`."""

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

    `Coordinator(limits=..., **memory.ports)`, then `await memory.membership.start(coordinator.listener)`. Several
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
        self.history = MemoryHistory(self.log, self.faults, self.audit_trail)
        self.cursors = MemoryCursors(self.log, self.faults)
        self.groups = MemoryGroups(self.log, self.faults)
        self.keys = MemoryKeys(self.log, self.faults)
        self.topics = MemoryTopics(self.log, self.faults)
        url = self.log.new_url()
        self.owners = MemoryOwners(self.log, url)
        self.peers = MemoryPeers(self.log, url)
        self.membership = MemoryMembership(
            self.log, self.lane, self.cursors, self.clock, outcome_horizon_s=outcome_horizon_s, url=url, owns=owns
        )
        self._owns = owns
        self._settings = outcome_horizon_s, max_record_bytes, lane_capacity

    @property
    def ports(self) -> Ports:
        """Return the ports for a coordinator."""
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
        """Delete a real topic and its records."""
        del self.log.topics[name]

    def records(self, name: str) -> Sequence[Record]:
        """Return the records of a real topic that `read_committed` consumers see, in the order of the commits."""
        return tuple(self.log.topics[name].records)

    # --- writes of other instances

    def foreign_prepare(self, shard: int, half: Half) -> int:
        """Append a prepare as a paused former owner does: only the tail of this instance sees it."""
        return self.log.shards[shard].half.append(half.id, half, half_headers(half, State.PREPARED))
