"""The contract's backend on a real broker; all tests of a run share the internal topics of one prefix."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Final, cast
from uuid import uuid4

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.log.compacted_table import KafkaOwners
from halfway.kafka.log.cursors import KafkaCursors
from halfway.kafka.log.half_log import KafkaHalfLog
from halfway.kafka.log.registries import KafkaGroups
from halfway.kafka.ownership.membership import KafkaCluster
from halfway.kafka.records.codec import KIND_HALF, decode_half, decode_op, decode_parked, encode_half, record_headers
from halfway.kafka.topics.metadata import TopicMetadata
from halfway.kafka.topics.provisioning import InternalTopics
from halfway.memory import RecordingObserver
from halfway.protocol.errors import KafkaUnavailableError
from halfway.protocol.records import Half, Op, Parked
from halfway.protocol.transactions import State
from tests.support.brokers.offsets import end_of
from tests.support.contract.instance import PATIENCE_S, SHARDS, Ports, Seen, Stored, new_id

DECODE: Final[Mapping[str, Callable[[bytes | None], Half | Op | Parked]]] = {
    "half": decode_half,
    "op": decode_op,
    "parked": decode_parked,
}


def new_config(bootstrap_servers: str) -> KafkaConfig:
    return KafkaConfig(
        properties={"bootstrap.servers": bootstrap_servers},
        prefix=f"_contract{uuid4().hex[:8]}.",
        shards=SHARDS,
        max_prepare_bytes=1_000_000,
    )


class KafkaBackend:
    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._instances = 0
        self._servers = config.properties["bootstrap.servers"]
        self._admin = AdminClient({"bootstrap.servers": self._servers})

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
        name = new_id(label)
        settings = {"max.message.bytes": "100000", "cleanup.policy": "compact" if compacted else "delete"}
        futures = self._admin.create_topics([NewTopic(name, partitions, 1, config=settings)])
        await asyncio.wrap_future(futures[name])
        await asyncio.to_thread(self._wait_for, name)
        return name

    async def delete_topic(self, name: str) -> None:
        await asyncio.wrap_future(self._admin.delete_topics([name])[name])

    async def records(self, name: str) -> Sequence[Seen]:
        return [_seen(message) for message in await asyncio.to_thread(self._read, name, None)]

    async def stored(self, kind: str, shard: int, transaction_id: str) -> Sequence[Stored]:
        messages = await asyncio.to_thread(self._read, self._config.topic(kind), shard)
        decode = DECODE[kind]
        return [
            Stored(
                message.offset() or 0,
                transaction_id,
                None if (value := message.value()) is None else decode(value),
                {name: content or b"" for name, content in _headers(message)},
            )
            for message in messages
            if message.key() == transaction_id.encode()
        ]

    async def foreign_prepare(self, shard: int, half: Half) -> int:
        return await asyncio.to_thread(self._produce, shard, half)

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def _wait_for(self, name: str) -> None:
        """Wait until the broker lists a topic: it answers the creation earlier."""
        until = time.monotonic() + PATIENCE_S
        while name not in self._admin.list_topics(timeout=PATIENCE_S).topics:
            assert time.monotonic() < until, f"topic {name} did not appear"
            time.sleep(0.02)

    def _produce(self, shard: int, half: Half) -> int:
        offsets: list[int | None] = []
        producer = Producer(self._config.producer())
        producer.produce(
            self._config.half_topic,
            encode_half(half),
            half.id.encode(),
            shard,
            headers=record_headers(KIND_HALF, half.group, State.PREPARED.value),
            on_delivery=lambda _error, message: offsets.append(message.offset()),
        )
        assert producer.flush(PATIENCE_S) == 0
        [offset] = offsets
        assert offset is not None
        return offset

    def _read(self, topic: str, partition: int | None) -> list[Message]:
        """Read to the end that `read_uncommitted` gives, as `read_committed` shows it."""
        options = {"bootstrap.servers": self._servers, "group.id": "contract-reader", "enable.auto.commit": False}
        raw = Consumer({**options, "isolation.level": "read_uncommitted"})
        consumer = Consumer({**options, "isolation.level": "read_committed", "enable.partition.eof": True})
        try:
            numbers = (
                [partition]
                if partition is not None
                else list(raw.list_topics(topic, PATIENCE_S).topics[topic].partitions)
            )
            ends = {number: end_of(raw, TopicPartition(topic, number)) for number in numbers}
            consumer.assign([TopicPartition(topic, number, 0) for number in numbers])
            return _read_until(consumer, ends)
        finally:
            raw.close()
            consumer.close()


def _read_until(consumer: Consumer, ends: Mapping[int, int]) -> list[Message]:
    positions, found = dict.fromkeys(ends, 0), list[Message]()
    until = time.monotonic() + PATIENCE_S
    while any(positions[number] < end for number, end in ends.items()):
        assert time.monotonic() < until, f"not read to the end: {positions} of {ends}"
        message = consumer.poll(0.1)
        if message is None:
            continue
        partition, offset, error = message.partition() or 0, message.offset() or 0, message.error()
        if error is None:
            found.append(message)
            offset += 1
        else:
            assert error.code() == KafkaError._PARTITION_EOF, error
        positions[partition] = max(positions[partition], offset)
    return found


def _seen(message: Message) -> Seen:
    headers = tuple(_headers(message))
    return Seen(message.partition() or 0, message.key(), message.value(), headers, message.timestamp()[1])


def _headers(message: Message) -> list[tuple[str, bytes | None]]:
    # The stub allows for what `produce` takes; what was consumed is always a list of pairs.
    return cast("list[tuple[str, bytes | None]]", message.headers() or [])
