"""The Kafka adapter of one instance on a simulated broker, in virtual time: what `World` runs a coordinator on.

Threads and timers are those of `tests.simulation.machine`; the wall clock stands still until a test moves it.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, MutableSet, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from itertools import count
from types import SimpleNamespace
from typing import Any, Final, TypeVar

from confluent_kafka import KafkaError, KafkaException

from halfway.coordinator.access import OpenAccess
from halfway.coordinator.cluster.forward import PeerHandler
from halfway.coordinator.ports import Authority, LaneAnswers, LaneWrite, TopicFacts
from halfway.kafka.clients import threads
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.seam import Clients
from halfway.kafka.clients.transactional_producer import ProducerFailedError
from halfway.kafka.log.compacted_table import KafkaOwners
from halfway.kafka.log.cursors import KafkaCursors
from halfway.kafka.log.half_log import KafkaHalfLog
from halfway.kafka.log.history import KafkaHistory
from halfway.kafka.log.registries import KafkaGroups, KafkaKeys
from halfway.kafka.ownership.membership import KafkaCluster
from halfway.kafka.records.codec import (
    BARRIER_KEY,
    decode_barrier,
    decode_half,
    decode_op,
    decode_parked,
    encode_half,
    half_headers,
)
from halfway.kafka.topics.metadata import TopicMetadata
from halfway.kafka.topics.provisioning import InternalTopics
from halfway.protocol.records import Half
from halfway.protocol.transactions import State
from halfway.simulated import SimulatedHost, SimulatedKafka
from halfway.simulated.coordinators import Group
from halfway.simulated.log import Batch, NewRecord, Place
from halfway.simulated.log import Record as Stored
from halfway.simulated.producer import SimulatedProducer
from tests.simulation.machine import PROCESS, Process
from tests.support.peers.encoded import EncodedPeers
from tests.support.service.machines import SEED, BrokersClock, machine
from tests.support.surroundings import MemoryAuditTrail, RecordingObserver, ScriptedCaller

_DECODE: Final[Mapping[str, Callable[[bytes | None], Any]]] = {
    "half": decode_half,
    "op": decode_op,
    "parked": decode_parked,
}
T = TypeVar("T")
MIB: Final = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Record:
    """A record as a `read_committed` consumer sees it; `value` of an internal topic is decoded."""

    topic: str
    partition: int
    offset: int
    key: Any
    value: Any
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp: int


class PinnedGroup(Group):
    """A group in which instances can have shards of their own."""

    def rebalance(self) -> None:
        super().rebalance()
        for member in self.members:
            if member.client.startswith("owns "):
                owned = json.loads(member.client.removeprefix("owns "))
                member.target = {place for place in self._places(member.topics) if place[1] in owned}


class Kafka(SimulatedKafka):
    """A cluster that remembers the order of its batches."""

    def __init__(self) -> None:
        super().__init__(clock=BrokersClock(), seed=SEED, markers_s=(0.0, 0.0))
        self._order = count()
        self._batches: dict[tuple[Place, int], int] = {}
        self.groups = defaultdict(lambda: PinnedGroup(self.places))
        self.started = 0
        """How many instances were started."""
        self.handlers: dict[str, PeerHandler] = {}
        """What answers other instances, by URL."""

    def append(self, place: Place, batch: Batch, transactional_id: str | None) -> int:
        base = super().append(place, batch, transactional_id)
        number = next(self._order)
        self._batches.update({(place, base + at): number for at in range(len(batch.records))})
        return base

    def committed(self, name: str) -> Iterator[tuple[int, Stored]]:
        """Yield the committed records of a topic with their partitions, in the order in which they were appended."""
        found = [
            (self._batches[(name, number), record.offset], number, record)
            for number, partition in enumerate(self.topics[name].partitions)
            for record in partition.records
            if record.control is None and not record.aborted and record.offset < partition.stable
        ]
        for _, number, record in sorted(found, key=lambda one: (one[0], one[1], one[2].offset)):
            yield number, record

    def write(self, place: Place, *records: NewRecord) -> int:
        """Append records as another client does."""
        producer, epoch = self.transactions.new_producer()
        batch = Batch(records=records, producer=producer, epoch=epoch, sequence=0, transactional=False)
        return self.append(place, batch, None)


def topic(partitions: int = 3, *, max_message_bytes: int = 1_048_588, compacted: bool = False) -> TopicFacts:
    """Return facts of a real topic; the defaults are those of a Kafka broker, with three partitions."""
    return TopicFacts(partitions=partitions, max_message_bytes=max_message_bytes, compacted=compacted)


class Internal:
    """A partition of an internal topic."""

    def __init__(self, kafka: Kafka, config: KafkaConfig, kind: str, shard: int) -> None:
        self._kafka, self._kind, self._place = kafka, kind, (config.topic(kind), shard)

    @property
    def _partition(self) -> Any:
        return self._kafka.topics[self._place[0]].partitions[self._place[1]]

    @property
    def end(self) -> int:
        return int(self._partition.end)

    @property
    def records(self) -> list[Record]:
        return [
            self._decoded(record)
            for number, record in self._kafka.committed(self._place[0])
            if number == self._place[1]
        ]

    def _decoded(self, record: Stored) -> Record:
        value: Any = None
        if record.value is not None:
            value = decode_barrier(record.value) if record.key == BARRIER_KEY else _DECODE[self._kind](record.value)
        return Record(
            topic=self._place[0],
            partition=self._place[1],
            offset=record.offset,
            key=(record.key or b"").decode(),
            value=value,
            headers=tuple(record.headers),
            timestamp=record.timestamp,
        )

    def append(self, half: Half) -> int:
        """Append a prepare as another instance does."""
        headers: Any = half_headers(half, State.PREPARED)
        record = NewRecord(half.id.encode(), encode_half(half), list(headers), machine().clock.now_ms())
        return self._kafka.write(self._place, record)

    def compact(self, before: int) -> None:
        """Of the records below an offset, keep only the last one of each key, as the broker's log cleaner does."""
        partition = self._partition
        last = {record.key: record.offset for record in partition.records if record.offset < before}
        partition.records[:] = [
            record for record in partition.records if record.offset >= before or last[record.key] == record.offset
        ]


@dataclass(frozen=True)
class Shard:
    half: Internal
    op: Internal
    parked: Internal


class Denied(MutableSet[str]):
    """The real topics that halfway may not write to."""

    def __init__(self, kafka: Kafka, forget: Callable[[], None]) -> None:
        self._denied = kafka.denied
        self._forget = forget

    def __contains__(self, name: object) -> bool:
        return ("Write", "topic", name) in self._denied

    def __iter__(self) -> Iterator[str]:
        return (name for operation, _, name in list(self._denied) if operation == "Write")

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def add(self, value: str) -> None:
        self._denied.update({("Write", "topic", value), ("Describe", "topic", value)})
        self._forget()

    def discard(self, value: str) -> None:
        self._denied.difference_update({("Write", "topic", value), ("Describe", "topic", value)})
        self._forget()


class Faults:
    """Each requested fault happens once, in order; a switch stays on until it is turned off."""

    def __init__(self, kafka: Kafka, host: SimulatedHost, forget: Callable[[], None]) -> None:
        self._host = host
        self.denied_topics = Denied(kafka, forget)
        self.appends: deque[bool] = deque()
        self.batches: deque[bool] = deque()
        self.lane = Held()
        self.answers = Held()

    @property
    def unavailable(self) -> bool:
        """Kafka does not answer."""
        return self._host.is_cut

    @unavailable.setter
    def unavailable(self, value: bool) -> None:
        self._host.cut() if value else self._host.heal()

    def next_append_ambiguous(self, *, stored: bool) -> None:
        """Lose the answer to the next prepare, or the whole request."""
        self.appends.append(stored)

    def lose_next_batch(self, *, written: bool) -> None:
        """Fence the lane before or after its next commit."""
        self.batches.append(written)

    @contextmanager
    def lane_held(self) -> Iterator[None]:
        """Keep writes from the lane inside this block."""
        with self.lane.block():
            yield

    @contextmanager
    def answers_held(self) -> Iterator[None]:
        """Delay the lane's answers until the end of this block."""
        with self.answers.block():
            yield


class Held:
    """Calls that wait for the end of a block."""

    def __init__(self) -> None:
        self._blocks = 0
        self._calls: list[Callable[[], None]] = []

    def call(self, call: Callable[[], None]) -> None:
        self._calls.append(call) if self._blocks else call()

    @contextmanager
    def block(self) -> Iterator[None]:
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            calls, self._calls = self._calls, []
            for call in calls:
                self.call(call)


class Producer(SimulatedProducer):
    """A producer whose answers a test can lose."""

    def __init__(self, host: SimulatedHost, properties: Mapping[str, Any], faults: Faults) -> None:
        super().__init__(host, properties)
        self._faults = faults
        writer, _, name = str(properties.get("transactional.id")).rpartition(".")
        self._is_lane = name in {"0", "1", "q"} and not writer.endswith("owner")

    def produce(self, topic: str, *args: Any, **options: Any) -> None:
        faults = self._faults
        if self._id is not None or not topic.endswith("half") or not faults.appends:
            return super().produce(topic, *args, **options)
        arguments = signature(super().produce).bind(topic, *args, **options).arguments
        report = arguments.pop("callback", None) or arguments.pop("on_delivery", None)

        def lose(_: object, message: Any) -> None:
            report(KafkaError(KafkaError._MSG_TIMED_OUT), message)

        stored = faults.appends.popleft()
        if stored:
            return super().produce(**{**arguments, "callback": lose})
        key = arguments["key"]
        self._events.append(lambda: lose(None, SimpleNamespace(key=lambda: key, topic=lambda: topic)))
        self._condition.notify_all()
        return None

    def fence(self) -> None:
        self._set_fatal(KafkaError._FENCED)

    def commit_transaction(self, timeout: float = -1) -> None:
        if not self._is_lane or not self._faults.batches:
            return super().commit_transaction(timeout)
        if self._faults.batches.popleft():
            super().commit_transaction(timeout)
        self.fence()
        raise KafkaException(self._fatal)


class Memory:
    """The ports of one instance. `await memory.open()` first."""

    def __init__(
        self,
        *,
        shards: int = 2,
        topics: Mapping[str, int | TopicFacts] | None = None,
        outcome_horizon_s: float = 900,
        lane_capacity: int = 10_000,
        owns: Collection[int] | None = None,
        beside: Memory | None = None,
    ) -> None:
        """Create the cluster, unless the instance is to run `beside` or after another one.

        `owns` are the shards that the group gives to this instance; None means its part of all.
        """
        self._machine = machine()
        self._machine.run(self)
        self.clock = self._machine.clock
        if beside is not None:
            self.clock.set(beside.clock.now_ms())  # it may have been that of another machine
        self.kafka: Kafka = Kafka() if beside is None else beside.kafka
        self.kafka.started += 1
        self.url = f"http://i{self.kafka.started}.invalid"
        client_id = {} if owns is None else {"client.id": f"owns {sorted(owns)}"}
        self._host = self.kafka.host()
        self.faults = Faults(self.kafka, self._host, self._forget_topics)
        clients = Clients(
            producer=lambda properties: Producer(self._host, properties, self.faults),
            consumer=self._host.consumer,
            admin=self._host.admin,
        )
        self.config = KafkaConfig(
            clients=clients,
            properties={"bootstrap.servers": "simulated.invalid:9092", **client_id},
            instance_url=self.url,
            lane_queue=lane_capacity,
            prefix="_halfway.",
            shards=shards,
            outcome_horizon_s=outcome_horizon_s,
            max_prepare_bytes=16 * MIB,
            session_timeout_s=6,
            replication_factor=1,
        )
        self._is_new = beside is None
        self._has_joined = False
        self.owns = owns
        self._stack = AsyncExitStack()
        self._process = Process("instance")
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self._process)
        self._process.globals["closer"] = self.context.run(threads.ClientCloser)
        self.observer = RecordingObserver()
        self.caller = ScriptedCaller()
        self.authority: Authority = OpenAccess()
        self.audit_trail = MemoryAuditTrail()
        self.peers = EncodedPeers(self.kafka.handlers, self.url)
        self.keys = KafkaKeys(self.config, self.observer)
        self.topics = TopicMetadata(self.config)
        self.log = Log(self)
        for name, facts in (topics or {}).items():
            self.create_topic(name, facts)

    async def open(self) -> None:
        """Start the ports, in the process of this instance."""
        with self._machine.hurry():
            await self.within(self._open())

    async def _open(self) -> None:
        has_keys = not isinstance(self.authority, OpenAccess)
        config = self.config
        stack, observer = self._stack, self.observer
        if self._is_new:
            internal = InternalTopics(replace(config, has_keys=has_keys))
            await internal.ensure()
            internal.close()
        self.owners = KafkaOwners(config, observer.skipped_record)
        stack.push_async_callback(self.owners.stop)
        await self.owners.start()
        if has_keys:
            stack.push_async_callback(self.keys.stop)
            await self.keys.start(deadline=asyncio.get_running_loop().time() + 30)
        self.groups = KafkaGroups(config, observer)
        stack.push_async_callback(self.groups.stop)
        await self.groups.start(deadline=asyncio.get_running_loop().time() + 30)
        self.half_log = KafkaHalfLog(config, observer)
        stack.push_async_callback(self.half_log.stop)
        await self.half_log.start()
        self.cursors = KafkaCursors(config, observer)
        stack.push_async_callback(self.cursors.stop)
        await self.cursors.start()
        self.history = KafkaHistory(config)
        cluster = KafkaCluster(config, observer, self.topics, self.cursors)
        self.half_log.on_lost_sequence = cluster.membership.lost_records
        self.lane, self.membership = cluster.lane, cluster.membership
        self._hold(cluster.lane)

    def _hold(self, lane: Any) -> None:
        submit, answer = lane.submit, lane.answer

        def submit_later(writes: Sequence[LaneWrite]) -> None:
            self.faults.lane.call(lambda: submit(list(writes)))

        def answer_later(answers: LaneAnswers) -> None:
            self.faults.answers.call(lambda: answer(answers))

        lane.submit, lane.answer = submit_later, answer_later

    @property
    def ports(self) -> dict[str, Any]:
        """The ports by their parameter names in `Coordinator`."""
        return {
            "lane": self.lane,
            "half_log": self.half_log,
            "cursors": self.cursors,
            "groups": self.groups,
            "topics": self.topics,
            "caller": self.caller,
            "authority": self.authority,
            "clock": self.clock,
            "observer": self.observer,
            "owners": self.owners,
            "peers": self.peers,
            "audit_trail": self.audit_trail,
            "history": self.history,
        }

    async def start(self, listener: Any) -> None:
        """Join the group, and wait until the shards of this instance are served."""
        self._has_joined = True
        expected = self.config.shards if self.owns is None else len(self.owns)
        with self._machine.hurry():
            await self.within(self.membership.start(listener))
            while len(listener.served) != expected:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.001)

    async def within(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something in the process of this instance."""
        return await asyncio.get_running_loop().create_task(work, context=self.context)

    async def stop(self, *, deadline: float) -> None:
        """Leave the group, and stop the ports."""

        async def stop() -> None:
            if self._has_joined:
                await self.membership.stop(deadline=deadline)
            await self._stack.aclose()

        with self._machine.hurry():
            await self.within(stop())
        self._machine.leave(self)

    @property
    def is_dead(self) -> bool:
        return self._process.paused

    def lose(self) -> None:
        """End the incarnation as fencing or an ambiguous commit does: lose every shard, then acquire it again."""
        incarnation = self.membership._incarnation
        if incarnation is not None:
            incarnation.fail(ProducerFailedError("lane", "a test lost it"))

    def kill(self) -> None:
        """End as kill -9 does."""
        self._machine.kill(self._process)
        self.kafka.handlers.pop(self.url, None)
        self._host.cut()
        for client in list(self._host.clients.values()):
            client.end_session()
        self._machine.leave(self)

    def restarted(self) -> Memory:
        """Kill this instance, and return the next one on the same cluster."""
        horizon_s = self.config.outcome_horizon_s
        after = Memory(shards=self.config.shards, outcome_horizon_s=horizon_s, owns=self.owns, beside=self)
        self.kill()
        return after

    # --- the topics

    def create_topic(self, name: str, facts: TopicFacts | int = 3) -> None:
        """Create a topic, or change the settings of one."""
        one = topic(facts) if isinstance(facts, int) else facts
        settings = {
            "max.message.bytes": str(one.max_message_bytes),
            "cleanup.policy": "compact" if one.compacted else "delete",
        }
        if name in self.kafka.topics:
            self.kafka.topics[name].settings.update(settings)
        else:
            self.kafka.create(name, one.partitions, 1, settings, dry=False)
        self._forget_topics()

    def delete_topic(self, name: str) -> None:
        self.kafka.delete(name)
        self._forget_topics()

    def _forget_topics(self) -> None:
        """Let the topics be described anew, as they are after half a minute."""
        known = self.topics
        for table in (known._existence, known._facts, known._describing, known._configuring):
            table.clear()

    def records(self, name: str) -> Sequence[Record]:
        """Return the records that `read_committed` consumers see, in the order of the commits."""
        return [
            Record(
                topic=name,
                partition=number,
                offset=record.offset,
                key=record.key,
                value=record.value,
                headers=tuple(record.headers),
                timestamp=record.timestamp,
            )
            for number, record in self.kafka.committed(name)
        ]

    def foreign_prepare(self, shard: int, half: Half) -> int:
        """Append a prepare as a paused former owner does: only the tail of this instance sees it."""
        return self.log.shards[shard].half.append(half)


class Log:
    """The internal topics."""

    def __init__(self, memory: Memory) -> None:
        self.shards = [
            Shard(*(Internal(memory.kafka, memory.config, kind, number) for kind in ("half", "op", "parked")))
            for number in range(memory.config.shards)
        ]
