"""An admin client, whose requests are answered before they return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

from confluent_kafka import (
    ConsumerGroupState,
    ConsumerGroupType,
    IsolationLevel,
    KafkaError,
    Node,
    TopicCollection,
    TopicPartition,
    TopicPartitionInfo,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined] # public, but not for mypy
    AclOperation,
    ConfigEntry,
    ConfigResource,
    ConsumerGroupDescription,
    ListOffsetsResultInfo,
    MemberAssignment,
    MemberDescription,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
    TopicDescription,
)

from halfway.simulated.client import HOST, PORT, Client, failure
from halfway.simulated.cluster import MAX_TRANSACTION_TIMEOUT_MS
from halfway.simulated.log import DEFAULTS, RefusedError

Key = TypeVar("Key")
T = TypeVar("T")

_OPERATIONS: Final = (AclOperation.READ, AclOperation.WRITE, AclOperation.DESCRIBE)
_LATEST: Final = type(OffsetSpec.latest())  # type: ignore[no-untyped-call]
_BROKER: Final = {
    "transaction.max.timeout.ms": str(MAX_TRANSACTION_TIMEOUT_MS),
    "transaction.partition.verification.enable": "true",
}


class SimulatedAdmin(Client):
    """The methods of `confluent_kafka.admin.AdminClient` that halfway and its tests use, with the same errors."""

    def poll(self, timeout: float = -1) -> int:
        """Serve nothing: every request is answered at once."""
        return 0

    def _answers(
        self, keys: Iterable[Key], answer: Callable[[Key], T], request_timeout: float = 60
    ) -> dict[Key, Future[T]]:
        futures: dict[Key, Future[T]] = {}
        with self._schedule:
            for key in keys:
                future = futures[key] = Future[T]()
                if self._host.is_cut:
                    late = failure(KafkaError._TIMED_OUT)
                    self._schedule.after(request_timeout, partial(_fail, future, late))
                    continue
                try:
                    future.set_result(answer(key))
                except RefusedError as refused:
                    future.set_exception(failure(refused.code))
        return futures

    # --- topics

    def create_topics(self, new_topics: Sequence[NewTopic], **options: Any) -> dict[str, Future[None]]:
        """Create topics; with `validate_only` only look whether they could be created."""
        by_name = {new.topic: new for new in new_topics}

        def create(name: str) -> None:
            new = by_name[name]
            dry = bool(options.get("validate_only"))
            self._cluster.create(name, new.num_partitions, new.replication_factor, new.config or {}, dry=dry)

        return self._answers(by_name, create, _timeout(options))

    def delete_topics(self, topics: Sequence[str], **options: Any) -> dict[str, Future[None]]:
        """Delete topics."""
        return self._answers(topics, self._cluster.delete, _timeout(options))

    def create_partitions(self, new_partitions: Sequence[NewPartitions], **options: Any) -> dict[str, Future[None]]:
        """Add partitions."""
        counts = {new.topic: new.new_total_count for new in new_partitions}
        return self._answers(counts, lambda name: self._cluster.grow(name, counts[name]), _timeout(options))

    def describe_topics(self, topics: TopicCollection, **options: Any) -> dict[str, Future[TopicDescription]]:
        """Describe topics, with the operations that are allowed."""
        return self._answers(topics.topic_names, self._describe, _timeout(options))

    def _describe(self, name: str) -> TopicDescription:
        topic = self._cluster.topic(name)
        return TopicDescription(
            name,
            topic.id,
            False,
            [
                TopicPartitionInfo(
                    number,
                    _node(-1 if one.leader is None else one.leader),
                    list(map(_node, one.replicas)),
                    list(map(_node, one.isr)),
                )
                for number, one in enumerate(topic.partitions)
            ],
            self._allowed("topic", name),
        )

    def _allowed(self, kind: str, name: str) -> list[Any]:
        return [one for one in _OPERATIONS if (one.name.title(), kind, name) not in self._cluster.denied]

    # --- settings

    def describe_configs(
        self, resources: Sequence[ConfigResource], **options: Any
    ) -> dict[ConfigResource, Future[Mapping[str, Any]]]:
        """Return the settings of topics and brokers."""
        return self._answers(resources, self._settings, _timeout(options))

    def _settings(self, resource: ConfigResource) -> Mapping[str, Any]:
        if resource.restype == ResourceType.TOPIC:
            self._cluster.require("DescribeConfigs", "topic", resource.name, KafkaError.TOPIC_AUTHORIZATION_FAILED)
            settings: Mapping[str, str] = self._cluster.topic(resource.name).settings
        else:
            self._cluster.require("DescribeConfigs", "cluster", "", KafkaError.CLUSTER_AUTHORIZATION_FAILED)
            settings = _BROKER
        return {name: ConfigEntry(name, value) for name, value in settings.items()}

    def incremental_alter_configs(
        self, resources: Sequence[ConfigResource], **options: Any
    ) -> dict[ConfigResource, Future[None]]:
        """Set settings of topics."""
        return self._answers(resources, self._alter, _timeout(options))

    def _alter(self, resource: ConfigResource) -> None:
        changes = {entry.name: entry.value or "" for entry in resource.incremental_configs}
        if not changes.keys() <= DEFAULTS.keys():
            raise RefusedError(KafkaError.INVALID_CONFIG)
        self._cluster.topic(resource.name).settings.update(changes)

    # --- offsets and groups

    def list_offsets(
        self,
        topic_partition_offsets: Mapping[TopicPartition, OffsetSpec],
        *,
        isolation_level: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
        request_timeout: float = 60,
    ) -> dict[TopicPartition, Future[ListOffsetsResultInfo]]:
        """Return first or last offsets."""

        def offset(place: TopicPartition) -> ListOffsetsResultInfo:
            try:
                partition = self._cluster.led((place.topic, place.partition), "Describe")
            except RefusedError as refused:
                unknown = refused.code == KafkaError.UNKNOWN_TOPIC_OR_PART
                raise RefusedError(KafkaError._NOENT if unknown else refused.code) from None
            end = partition.end if isolation_level == IsolationLevel.READ_UNCOMMITTED else partition.stable
            latest = isinstance(topic_partition_offsets[place], _LATEST)
            return ListOffsetsResultInfo(end if latest else partition.start, -1, -1)

        return self._answers(topic_partition_offsets, offset, request_timeout)

    def delete_records(self, topic_partition_offsets: Sequence[TopicPartition], **options: Any) -> dict[Any, Any]:
        """Delete the records before offsets."""

        def delete(place: TopicPartition) -> None:
            self._cluster.led((place.topic, place.partition), "Delete").delete_before(place.offset)

        return self._answers(topic_partition_offsets, delete, _timeout(options))

    def describe_consumer_groups(
        self, group_ids: Sequence[str], **options: Any
    ) -> dict[str, Future[ConsumerGroupDescription]]:
        """Describe groups; one that nobody has used is dead."""
        return self._answers(group_ids, self._describe_group, _timeout(options))

    def _describe_group(self, name: str) -> ConsumerGroupDescription:
        self._cluster.require("Describe", "group", name, KafkaError.GROUP_AUTHORIZATION_FAILED)
        group = self._cluster.groups.get(name)
        members = [
            MemberDescription(
                one.id, one.client, HOST, MemberAssignment([TopicPartition(*place) for place in sorted(one.owned)])
            )
            for one in (group.members if group is not None else ())
        ]
        state = ConsumerGroupState.DEAD if group is None else ConsumerGroupState.EMPTY
        return ConsumerGroupDescription(
            name,
            not members,
            members,
            "cooperative-sticky" if members else "",
            ConsumerGroupState.STABLE if members else state,
            _node(self._cluster.brokers[0]),
            self._allowed("group", name),
            ConsumerGroupType.CLASSIC,
        )


def _node(number: int) -> Node:
    return Node(number, HOST, PORT)


def _fail(future: Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _timeout(options: Mapping[str, Any]) -> float:
    return float(options.get("request_timeout", 60))
