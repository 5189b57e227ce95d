"""The ports' contract on a broker, real or simulated; all tests of a run share the internal topics of one prefix."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final
from uuid import uuid4

from halfway.coordinator.ports import CursorStore, GroupStore, HalfLog, Lane, Owners, Topics
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.seam import Clients
from halfway.kafka.log.compacted_table import KafkaOwners
from halfway.kafka.log.cursors import KafkaCursors
from halfway.kafka.log.half_log import KafkaHalfLog
from halfway.kafka.log.registries import KafkaGroups
from halfway.kafka.ownership.membership import KafkaCluster, KafkaMembership
from halfway.kafka.records.codec import KIND_HALF, decode_half, decode_op, decode_parked, encode_half, record_headers
from halfway.kafka.topics.metadata import TopicMetadata
from halfway.kafka.topics.provisioning import InternalTopics
from halfway.protocol.errors import KafkaUnavailableError
from halfway.protocol.ids import shard_of
from halfway.protocol.records import Half, Op, Parked
from halfway.protocol.transactions import State
from halfway.simulated import SimulatedKafka
from tests.support.coordinator.topics import Cluster
from tests.support.surroundings import RecordingObserver

PATIENCE_S = 60.0
SHARDS = 2
DECODE: Final[Mapping[str, Callable[[bytes | None], Half | Op | Parked]]] = {
    "half": decode_half,
    "op": decode_op,
    "parked": decode_parked,
}


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


@dataclass(frozen=True, kw_only=True)
class Ports:
    """What an adapter provides to one instance."""

    lane: Lane
    half_log: HalfLog
    cursors: CursorStore
    groups: GroupStore
    topics: Topics
    owners: Owners
    membership: KafkaMembership


def new_id(name: str = "t", *, shard: int = 0) -> str:
    """Make an id that no other test has and that belongs to a shard."""
    while True:
        made = f"{name}-{uuid4().hex[:12]}"
        if shard_of(made, SHARDS) == shard:
            return made


def simulated(seed: int) -> Clients:
    """Return what makes clients of a new simulated broker."""
    host = SimulatedKafka(seed=seed).host()
    return Clients(producer=host.producer, consumer=host.consumer, admin=host.admin)


def new_config(bootstrap_servers: str, clients: Clients) -> KafkaConfig:
    return KafkaConfig(
        properties={"bootstrap.servers": bootstrap_servers},
        prefix=f"_contract{uuid4().hex[:8]}.",
        shards=SHARDS,
        max_prepare_bytes=1_000_000,
        clients=clients,
    )


def prepare(config: KafkaConfig, shard: int, *halves: Half) -> list[int]:
    """Append half records as a half writer does; return their offsets."""
    offsets: list[int] = []
    producer = config.make_producer()
    for one in halves:
        producer.produce(
            config.half_topic,
            encode_half(one),
            one.id.encode(),
            shard,
            headers=record_headers(KIND_HALF, one.group, State.PREPARED.value),
            on_delivery=lambda _error, message: offsets.append(message.offset() or 0),
        )
    producer.flush(PATIENCE_S)
    assert len(offsets) == len(halves)
    return offsets


class Backend:
    """A log that outlives instances, and what stands in it."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._instances = 0
        self._cluster = Cluster(config.properties["bootstrap.servers"], config.clients)

    async def ensure(self) -> None:
        """Create the internal topics; a broker that has just started may need a moment for its consumer groups."""
        topics = InternalTopics(self._config)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        return await topics.ensure()
                    except KafkaUnavailableError:
                        await asyncio.sleep(0.2)
        finally:
            topics.close()

    @asynccontextmanager
    async def ports(self) -> AsyncIterator[Ports]:
        """Start the ports of one instance, all but its membership."""
        self._instances += 1
        config = replace(self._config, instance_url=f"http://127.0.0.1:{self._instances}")
        observer = RecordingObserver()
        async with AsyncExitStack() as stack:
            owners = KafkaOwners(config, observer.skipped_record)
            stack.push_async_callback(owners.stop)
            await owners.start()
            groups = KafkaGroups(config, observer)
            stack.push_async_callback(groups.stop)
            await groups.start(deadline=asyncio.get_running_loop().time() + PATIENCE_S)
            half_log = KafkaHalfLog(config, observer)
            stack.push_async_callback(half_log.stop)
            await half_log.start()
            cursors = KafkaCursors(config, observer)
            stack.push_async_callback(cursors.stop)
            await cursors.start()
            destinations = TopicMetadata(config)
            cluster = KafkaCluster(config, observer, destinations, cursors)
            yield Ports(
                lane=cluster.lane,
                half_log=half_log,
                cursors=cursors,
                groups=groups,
                topics=destinations,
                owners=owners,
                membership=cluster.membership,
            )

    async def create_topic(self, label: str, partitions: int = 3, *, compacted: bool = False) -> str:
        """Create a real topic and return its name; `max.message.bytes` is 100,000."""
        name = new_id(label)
        settings = {"max.message.bytes": "100000", "cleanup.policy": "compact" if compacted else "delete"}
        await self._cluster.make_exactly(name, partitions=partitions, config=settings)
        return name

    async def delete_topic(self, name: str) -> None:
        await self._cluster.delete_topic(name)

    async def records(self, name: str) -> Sequence[Seen]:
        """Read a real topic; the order holds within each partition."""
        return [
            Seen(record.partition, record.key, record.value, record.headers, record.timestamp_ms)
            for record in await self._cluster.read(name)
        ]

    async def stored(self, kind: str, shard: int, transaction_id: str) -> Sequence[Stored]:
        """Read the records of an id in `half`, `op` or `parked` of a shard."""
        return [
            Stored(
                record.offset,
                transaction_id,
                None if record.value is None else DECODE[kind](record.value),
                {name: content or b"" for name, content in record.headers},
            )
            for record in await self._cluster.read(self._config.topic(kind))
            if (record.partition, record.key) == (shard, transaction_id.encode())
        ]

    async def foreign_prepare(self, shard: int, half: Half) -> int:
        """Append a prepare as another instance does."""
        [offset] = await asyncio.to_thread(prepare, self._config, shard, half)
        return offset

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000
