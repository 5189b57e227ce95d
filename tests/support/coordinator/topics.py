"""Real and internal topics as consumers see them.

The end of a partition is its end offset under read_uncommitted; a reader has come to it when the broker says so
under read_committed. Offsets are never counted: transactions leave gaps.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # they are there
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from halfway.kafka.clients.seam import Clients, Consumer
from halfway.kafka.records import codec
from halfway.protocol.records import Half, Op, OpKind, Parked
from tests.support.waiting import eventually

READ_WITHIN_S = 180.0
_ANSWER_WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Record:
    """One record as a consumer gets it; `timestamp_ms` is what the broker holds."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int

    def header(self, name: str) -> bytes | None:
        """Give the last value of a header."""
        return dict(self.headers).get(name)

    @property
    def transaction_id(self) -> str:
        return (self.header("halfway-transaction-id") or b"").decode()


class Cluster:
    """Makes topics with names of their own and reads topics."""

    def __init__(self, bootstrap_servers: str, clients: Clients | None = None) -> None:
        self.bootstrap_servers = bootstrap_servers
        self._clients = clients or Clients()
        self._admin: Any = self._clients.admin({"bootstrap.servers": bootstrap_servers})

    async def make_topic(
        self, name: str = "orders", *, partitions: int = 3, config: Mapping[str, str] | None = None
    ) -> str:
        """Make a topic whose name begins with `name`, and give its whole name."""
        (made,) = await self.make_topics(name, partitions=partitions, config=config)
        return made

    async def make_topics(
        self, *names: str, partitions: int = 3, config: Mapping[str, str] | None = None
    ) -> tuple[str, ...]:
        whole = tuple(f"{name}-{uuid4().hex[:10]}" for name in names)
        await self.make_exactly(*whole, partitions=partitions, config=config)
        return whole

    async def make_exactly(self, *names: str, partitions: int = 3, config: Mapping[str, str] | None = None) -> None:
        """Make topics of just these names."""
        new = [
            NewTopic(name, num_partitions=partitions, replication_factor=1, config=dict(config or {})) for name in names
        ]
        for done in self._admin.create_topics(new, operation_timeout=_ANSWER_WITHIN_S).values():
            await asyncio.to_thread(done.result, _ANSWER_WITHIN_S)
        # The controller has it; the broker that is asked learns of it a moment later.
        await eventually(self.topic_names, lambda there: there.issuperset(names))

    async def delete_topic(self, name: str) -> None:
        for done in self._admin.delete_topics([name], operation_timeout=_ANSWER_WITHIN_S).values():
            await asyncio.to_thread(done.result, _ANSWER_WITHIN_S)
        # The controller has deleted it; until the broker hears of it, the topic takes records.
        await eventually(self.topic_names, lambda names: name not in names)

    async def config(self, name: str) -> dict[str, str | None]:
        """Give every setting of a topic."""
        (told,) = self._admin.describe_configs([ConfigResource(ResourceType.TOPIC, name)]).values()
        entries = await asyncio.to_thread(told.result, _ANSWER_WITHIN_S)
        return {setting: entry.value for setting, entry in entries.items()}

    async def set_config(self, topic: str, name: str, value: str) -> None:
        """Set one setting of a topic."""
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        for done in self._admin.incremental_alter_configs([resource]).values():
            await asyncio.to_thread(done.result, _ANSWER_WITHIN_S)
        # The controller has it; the broker learns of it a moment later.
        await eventually(lambda: self.config(topic), lambda found: found[name] == value)

    async def members(self, group: str) -> int:
        """Count the members of a consumer group."""
        (told,) = self._admin.describe_consumer_groups([group], request_timeout=_ANSWER_WITHIN_S).values()
        return len((await asyncio.to_thread(told.result, _ANSWER_WITHIN_S)).members)

    async def brokers(self) -> list[str]:
        """Give the id of every broker."""
        metadata = await asyncio.to_thread(self._admin.list_topics, timeout=_ANSWER_WITHIN_S)
        return [str(broker) for broker in metadata.brokers]

    async def topic_names(self) -> set[str]:
        metadata = await asyncio.to_thread(self._admin.list_topics, timeout=_ANSWER_WITHIN_S)
        return set(metadata.topics)

    async def read(self, *topics: str) -> list[Record]:
        """Give every record of topics that a read_committed consumer gets, up to their ends as they are now."""
        return await asyncio.to_thread(self.read_now, topics)

    def read_now(self, topics: Sequence[str]) -> list[Record]:
        """Read as `read` does, on the caller's own thread."""
        consumer = self._clients.consumer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "group.id": f"reader-{uuid4().hex}",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 20,
            }
        )
        try:
            return _read_to_the_end(consumer, self.ends(topics))
        finally:
            consumer.close()

    def ends(self, topics: Iterable[str]) -> dict[tuple[str, int], int]:
        """Give the end offset of every partition, open and aborted transactions included."""
        deadline = time.monotonic() + _ANSWER_WITHIN_S
        while True:
            try:
                metadata = self._admin.list_topics(timeout=_ANSWER_WITHIN_S).topics
                wanted = [TopicPartition(topic, number) for topic in topics for number in metadata[topic].partitions]
                answers = self._admin.list_offsets(
                    dict.fromkeys(wanted, OffsetSpec.latest()),  # type: ignore[no-untyped-call]
                    isolation_level=IsolationLevel.READ_UNCOMMITTED,
                    request_timeout=_ANSWER_WITHIN_S,
                )
                return {
                    (partition.topic, partition.partition): answer.result(_ANSWER_WITHIN_S).offset
                    for partition, answer in answers.items()
                }
            except (KeyError, KafkaException):  # a topic that was made a moment ago
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def _read_to_the_end(consumer: Consumer, ends: Mapping[tuple[str, int], int]) -> list[Record]:
    records: list[Record] = []
    missing = {place: end for place, end in ends.items() if end > 0}
    if not missing:
        return records
    consumer.incremental_assign([TopicPartition(topic, number, 0) for topic, number in missing])
    deadline = time.monotonic() + READ_WITHIN_S
    while missing:
        if time.monotonic() > deadline:
            raise AssertionError(f"read_committed readers do not get to the end of {missing}")
        for message in consumer.consume(500, timeout=0.2):
            error = message.error()
            place = _place(message)
            if error is None:
                if _offset(message) < ends[place]:
                    records.append(_record(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                if _offset(message) >= ends[place]:
                    missing.pop(place, None)
            else:
                raise KafkaException(error)
    return sorted(records, key=lambda record: (record.topic, record.partition, record.offset))


def _place(message: Message) -> tuple[str, int]:
    topic, partition = message.topic(), message.partition()
    assert topic is not None
    assert partition is not None
    return topic, partition


def _offset(message: Message) -> int:
    offset = message.offset()
    assert offset is not None
    return offset


def _record(message: Message) -> Record:
    topic, partition = _place(message)
    headers: Any = message.headers() or ()  # a list of pairs, whatever the types say
    return Record(
        topic=topic,
        partition=partition,
        offset=_offset(message),
        key=_bytes(message.key()),
        value=_bytes(message.value()),
        headers=tuple((name, _bytes(value)) for name, value in headers),
        timestamp_ms=message.timestamp()[1],
    )


def _bytes(data: str | bytes | None) -> bytes | None:
    return data.encode() if isinstance(data, str) else data


class InternalTopics:
    """What one coordinator has written down, decoded."""

    def __init__(self, cluster: Cluster, prefix: str) -> None:
        self._cluster = cluster
        self._prefix = prefix

    async def ops(self, transaction_id: str | None = None) -> list[Op]:
        """Give every op marker in the order in which they stand, or those of one transaction."""
        return [codec.decode_op(value) for _, value in await self._values("op", transaction_id) if value is not None]

    async def kinds(self, transaction_id: str) -> list[tuple[OpKind, str]]:
        """Give what each op marker of a transaction says happened, and because of whom."""
        return [(op.kind, op.cause.value) for op in await self.ops(transaction_id)]

    async def halves(self, transaction_id: str) -> list[Half | None]:
        """Give each record of half of one transaction, None for a tombstone."""
        values = await self._values("half", transaction_id)
        return [None if value is None else codec.decode_half(value) for _, value in values]

    async def parked(self, transaction_id: str) -> list[Parked | None]:
        """Give each record of parked of one transaction, None for a tombstone."""
        values = await self._values("parked", transaction_id)
        return [None if value is None else codec.decode_parked(value) for _, value in values]

    async def records(self, kind: str) -> list[Record]:
        return await self._cluster.read(self._prefix + kind)

    async def _values(self, kind: str, transaction_id: str | None) -> list[tuple[Record, bytes | None]]:
        return [
            (record, record.value)
            for record in await self.records(kind)
            if record.header("halfway-kind") != b"barrier"
            and (transaction_id is None or record.key == transaction_id.encode())
        ]
