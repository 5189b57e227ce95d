"""What halfway uses of confluent-kafka's clients, and the one place that makes them.

Whatever has these methods can take the place of librdkafka: `halfway.simulated` is a broker in memory behind them.
Records, errors and results are confluent-kafka's own classes in either case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import confluent_kafka
from confluent_kafka import IsolationLevel, Message, TopicCollection, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined] # public, but not for mypy
    AdminClient,
    ClusterMetadata,
    ConfigResource,
    ListOffsetsResultInfo,
    NewTopic,
    OffsetSpec,
)

Properties = dict[str, Any]
Delivered = Callable[[Any, Any], None]
"""A delivery report: the error or None, and the message."""
Rebalanced = Callable[[Any, list[TopicPartition]], None]
"""A change of a group's assignment: the consumer and the partitions."""


class KnowsTopics(Protocol):
    """Any client."""

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> ClusterMetadata:
        """Return the metadata of one topic or of all, or raise KafkaException."""


class Producer(KnowsTopics, Protocol):
    """An idempotent producer, with a transactional id or without."""

    def __len__(self) -> int:
        """Return how many records have not been delivered, and reports not been served."""

    def produce(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        partition: int = -1,
        callback: Delivered | None = None,
        on_delivery: Delivered | None = None,
        timestamp: int = 0,
        headers: Any = None,
    ) -> None:
        """Queue a record; raise KafkaException or BufferError if it cannot be queued."""

    def poll(self, timeout: float = -1) -> int:
        """Serve events for up to `timeout` seconds; a fatal error is raised once."""

    def flush(self, timeout: float = -1) -> int:
        """Deliver what is queued; return how much is left after `timeout` seconds."""

    def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:  # noqa: FBT001, FBT002 - confluent-kafka's signature
        """Fail what is queued."""

    def init_transactions(self, timeout: float = -1) -> None:
        """Fence the id's former users."""

    def begin_transaction(self) -> None:
        """Begin a transaction locally."""

    def commit_transaction(self, timeout: float = -1) -> None:
        """Flush and commit."""

    def abort_transaction(self, timeout: float = -1) -> None:
        """Purge and abort."""

    def close(self) -> bool:
        """End the client's threads; return whether they have ended."""


class Consumer(KnowsTopics, Protocol):
    """A consumer that assigns itself partitions, is a member of a group, or only commits offsets."""

    def subscribe(
        self,
        topics: list[str],
        on_assign: Rebalanced | None = None,
        on_revoke: Rebalanced | None = None,
        on_lost: Rebalanced | None = None,
    ) -> None:
        """Join the group."""

    def unsubscribe(self) -> None:
        """Leave the group."""

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        """Fetch these partitions too."""

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        """Fetch these partitions no more."""

    def pause(self, partitions: list[TopicPartition]) -> None:
        """Fetch nothing of these partitions."""

    def poll(self, timeout: float = -1) -> Message | None:
        """Return the next record or error; serve the callbacks."""

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        """Return several records and errors."""

    def commit(self, *, offsets: list[TopicPartition], asynchronous: Literal[True]) -> None:
        """Commit offsets to the group; `on_commit` gets the answer."""

    def committed(self, partitions: list[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        """Return the committed offsets."""

    def offsets_for_times(self, partitions: list[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        """Return the first offset since a time; the time stands in the partition's `offset`."""

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float = -1) -> tuple[int, int]:
        """Return the first offset and the end, which is the LSO under read_committed."""

    def close(self) -> None:
        """Leave the group and end the client's threads."""


class Admin(KnowsTopics, Protocol):
    """An admin client. Each request returns futures that librdkafka's thread completes."""

    def poll(self, timeout: float = -1) -> int:
        """Serve events."""

    def create_topics(self, new_topics: list[NewTopic], **options: Any) -> Mapping[str, Future[None]]:
        """Create topics."""

    def describe_topics(self, topics: TopicCollection, **options: Any) -> Mapping[str, Future[Any]]:
        """Return a `TopicDescription` for each topic."""

    def describe_configs(
        self, resources: list[ConfigResource], **options: Any
    ) -> Mapping[ConfigResource, Future[Mapping[str, Any]]]:
        """Return a `ConfigEntry` for each setting of a topic or broker."""

    def describe_consumer_groups(self, group_ids: list[str], **options: Any) -> Mapping[str, Future[Any]]:
        """Return a `ConsumerGroupDescription` for each group."""

    def list_offsets(
        self,
        topic_partition_offsets: dict[TopicPartition, OffsetSpec],
        *,
        isolation_level: IsolationLevel = ...,
        request_timeout: float = ...,
    ) -> Mapping[TopicPartition, Future[ListOffsetsResultInfo]]:
        """Return the first or the last offset of each partition."""


@dataclass(frozen=True, kw_only=True)
class Clients:
    """Makes clients from librdkafka's properties; raises KafkaException if a property is refused."""

    producer: Callable[[Properties], Producer] = confluent_kafka.Producer
    consumer: Callable[[Properties], Consumer] = confluent_kafka.Consumer
    admin: Callable[[Properties], Admin] = AdminClient
