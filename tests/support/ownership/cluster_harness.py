"""A small service on KafkaCluster, and a reader with the view of users."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from uuid import uuid4

from confluent_kafka import OFFSET_END, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from halfway.coordinator.ports import TOMBSTONE, LaneWrite, Written
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.log.cursors import KafkaCursors
from halfway.kafka.ownership.membership import KafkaCluster
from halfway.kafka.records.codec import Headers
from halfway.kafka.topics.metadata import TopicMetadata
from halfway.protocol.errors import LaneLostError, MessageTooLargeError, NotWrittenError, TopicUnavailableError
from halfway.protocol.ids import shard_of
from halfway.protocol.records import Foreign, Half, Message, MessageDigest, Op, OpKind, fingerprint
from halfway.protocol.transactions import Cause, State
from tests.support.contract.instance import Listener
from tests.support.coordinator.topics import Cluster, Record
from tests.support.domain.states import state_of
from tests.support.replies import submitted
from tests.support.surroundings import RecordingObserver
from tests.support.waiting import until_true

PATIENCE_S = 180.0


def config_for(bootstrap_servers: str, **fields: object) -> KafkaConfig:
    """Return a configuration with its own topics."""
    settings: dict[str, object] = {
        "prefix": f"_t{uuid4().hex[:8]}.",
        "shards": 2,
        "max_prepare_bytes": 1_000_000,
        "session_timeout_s": 12,  # on a slow machine a live one is silent for seconds
    }
    settings |= fields
    return KafkaConfig(properties={"bootstrap.servers": bootstrap_servers}, **settings)  # type: ignore[arg-type]


def admin_of(config: KafkaConfig) -> AdminClient:
    return AdminClient({"bootstrap.servers": config.properties["bootstrap.servers"]})


def config_of(bootstrap_servers: str, **fields: Any) -> KafkaConfig:
    """Return a configuration with a prefix that no other test uses."""
    settings: dict[str, Any] = {
        "properties": {"bootstrap.servers": bootstrap_servers},
        "prefix": f"_k{uuid4().hex[:8]}.",
        "shards": 3,
        "max_prepare_bytes": 1_000_000,
    }
    return KafkaConfig(**(settings | fields))


def delete_all(config: KafkaConfig) -> None:
    """Delete every topic that starts with the configuration's prefix."""
    admin = admin_of(config)
    names = [name for name in admin.list_topics(timeout=PATIENCE_S).topics if name.startswith(config.prefix)]
    for future in admin.delete_topics(names).values() if names else ():
        future.result(PATIENCE_S)


def produce(
    config: KafkaConfig,
    topic: str,
    partition: int,
    key: bytes | None,
    value: bytes | None,
    headers: Headers | None = None,
) -> int:
    """Append a record as any client could, and return its offset."""
    offsets: list[int] = []

    def delivered(error: object, message: Any) -> None:
        assert error is None, error
        offsets.append(message.offset())

    producer = Producer({"bootstrap.servers": config.properties["bootstrap.servers"]})
    producer.produce(topic, value, key, partition, on_delivery=delivered, headers=headers)
    assert producer.flush(PATIENCE_S) == 0
    return offsets[0]


def create_topics(config: KafkaConfig, names: Mapping[str, int], **settings: str) -> None:
    """Create topics by name with a number of partitions each."""
    admin = admin_of(config)
    futures = admin.create_topics(
        [NewTopic(name, partitions, 1, config=settings) for name, partitions in names.items()]
    )
    for future in futures.values():
        future.result(PATIENCE_S)
    # The controller has them; the broker learns of them a moment later.
    until = time.monotonic() + PATIENCE_S
    while not names.keys() <= admin.list_topics(timeout=PATIENCE_S).topics.keys():
        assert time.monotonic() < until, f"{[*names]} do not come up"
        time.sleep(0.02)


def add_partitions(config: KafkaConfig, name: str, count: int) -> None:
    """Add partitions to a topic, as any client with the right to alter it can."""
    admin = admin_of(config)
    admin.create_partitions([NewPartitions(name, count)])[name].result(PATIENCE_S)
    until = time.monotonic() + PATIENCE_S
    while len(admin.list_topics(name, timeout=PATIENCE_S).topics[name].partitions) < count:
        assert time.monotonic() < until, f"{name} does not grow"
        time.sleep(0.05)


def create_internal_topics(config: KafkaConfig) -> None:
    """Create the internal topics that the lane and acquisitions need."""
    names = (config.half_topic, config.op_topic, config.parked_topic, config.owners_topic)
    create_topics(config, dict.fromkeys(names, config.shards), **{"max.message.bytes": "2000000"})


def delete_records(config: KafkaConfig, topics: Iterable[str]) -> None:
    """Delete every record that is in these topics now, as a short retention does."""
    admin = admin_of(config)
    ends = [TopicPartition(topic, number, OFFSET_END) for topic in topics for number in range(config.shards)]
    for future in admin.delete_records(ends).values():
        future.result(PATIENCE_S)


def delete_topics(config: KafkaConfig, names: Iterable[str]) -> None:
    admin = admin_of(config)
    for future in admin.delete_topics(list(names)).values():
        future.result(PATIENCE_S)


@dataclass
class SmallService(Listener):
    """The same, with shards that it may refuse, hold or have lost."""

    refuse: Callable[[LaneWrite], bool] = lambda _write: False
    hold: asyncio.Event | None = None
    errors: list[str] = field(default_factory=list)

    def appended(self, shard: int, records: Sequence[tuple[int, str, Half | Foreign | None]], position: int) -> None:
        if shard not in self.states:
            self.errors.append(f"appended to shard {shard}, which is not served")
            return
        super().appended(shard, records, position)

    def may_still_be_written(self, write: LaneWrite) -> bool:
        return not self.refuse(write)

    async def revoked(self, shard: int) -> None:
        if self.hold is not None:
            await self.hold.wait()
        del self.states[shard]
        self.events.append(("revoked", shard))


class Instance:
    """One halfway instance without REST."""

    def __init__(self, config: KafkaConfig) -> None:
        self.config = config
        self.observer = RecordingObserver()
        self.service = SmallService()
        self.cursors = KafkaCursors(config, self.observer)
        self.destinations = TopicMetadata(config)
        self._stopped = False
        self.cluster = KafkaCluster(config, self.observer, self.destinations, self.cursors)

    @property
    def incarnation(self) -> str | None:
        return self.cluster.membership.status.incarnation

    async def start(self) -> None:
        await self.cursors.start()
        await self.cluster.membership.start(self.service)

    async def stop(self, seconds: float = 20) -> None:
        if self._stopped:
            return
        self._stopped = True
        await self.cluster.membership.stop(deadline=asyncio.get_running_loop().time() + seconds)
        await self.cursors.stop()

    async def serves(self, shards: Iterable[int]) -> None:
        """Wait until exactly these shards are served."""
        wanted = set(shards)
        await until_true(lambda: set(self.service.states) == wanted, f"serving {wanted}")

    async def write(self, write: LaneWrite) -> Written:
        """Write once, and apply the write."""
        async with asyncio.timeout(PATIENCE_S):
            written = await submitted(self.cluster.lane, write)
        state = self.service.states.get(write.shard)
        if state is not None and written.op is not None and write.op is not None:
            state.apply_op(written.op, write.op)
        if state is not None and written.half is not None:
            state.apply_half(written.half, write.id, None)
        return written

    async def write_until_known(self, write: LaneWrite) -> Written:
        """Write, and retry after a lost lane while the transaction is pending, as the service does."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    return await self.write(write)
                except (LaneLostError, NotWrittenError):
                    await until_true(lambda: write.shard in self.service.states, f"serving {write.shard}")
                    if state_of(self.service.states[write.shard], write.id) is State.COMMITTED:
                        return Written()
                    await asyncio.sleep(0.02)

    async def write_until_taken(self, write: LaneWrite) -> Written:
        """Write, and retry while it is refused with a retryable error."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    return await self.write_until_known(write)
                except (TopicUnavailableError, MessageTooLargeError):
                    await asyncio.sleep(0.1)


@asynccontextmanager
async def running(config: KafkaConfig, *, serving: Iterable[int] | None = None) -> AsyncIterator[Instance]:
    """Run an instance until the end of the block; it serves all shards (or `serving`) at the start."""
    instance = Instance(config)
    await instance.start()
    try:
        await instance.serves(range(config.shards) if serving is None else serving)
        yield instance
    finally:
        await instance.stop()
    assert instance.service.errors == []


def in_shard(shard: int, name: str, *, shards: int = 2) -> str:
    """Return an id that begins with `name` and belongs to a shard."""
    return next(candidate for candidate in (f"{name}.{n}" for n in count()) if shard_of(candidate, shards) == shard)


def half(transaction_id: str, *messages: Message) -> Half:
    now = time.time_ns() // 1_000_000
    return Half(
        id=transaction_id,
        group="orders",
        messages=messages,
        prepared_at=now,
        since=now,
        fingerprint=fingerprint("orders", messages, None),
    )


def commit_of(shard: int, one: Half, half_offset: int, *, within: float = PATIENCE_S) -> LaneWrite:
    """The write that commits a prepared transaction."""
    return LaneWrite(
        shard=shard,
        id=one.id,
        group=one.group,
        state=State.COMMITTED,
        prepared_at=one.prepared_at,
        messages=one.messages,
        half=TOMBSTONE,
        op=Op(
            kind=OpKind.COMMITTED,
            id=one.id,
            group=one.group,
            half_offset=half_offset,
            cause=Cause.PRODUCER,
            prepared_at=one.prepared_at,
            at=time.time_ns() // 1_000_000,
            messages=tuple(MessageDigest.of(message) for message in one.messages),
        ),
        deadline=asyncio.get_running_loop().time() + within,
    )


def read_topic(config: KafkaConfig, topic: str) -> list[Record]:
    """Read a topic up to its present end, as users see it."""
    return Cluster(config.properties["bootstrap.servers"]).read_now([topic])
