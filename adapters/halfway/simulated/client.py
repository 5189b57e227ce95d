"""What all simulated clients share (properties, metadata, waiting), and an admin client.

The admin client's requests are answered before they return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from confluent_kafka import (
    ConsumerGroupState,
    ConsumerGroupType,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Node,
    TopicCollection,
    TopicPartition,
    TopicPartitionInfo,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined] # public, but not for mypy
    AclOperation,
    BrokerMetadata,
    ClusterMetadata,
    ConfigEntry,
    ConfigResource,
    ConsumerGroupDescription,
    ListOffsetsResultInfo,
    MemberAssignment,
    MemberDescription,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    PartitionMetadata,
    ResourceType,
    TopicDescription,
    TopicMetadata,
)

from halfway.simulated.cluster import MAX_TRANSACTION_TIMEOUT_MS, Cluster
from halfway.simulated.coordinators import Member
from halfway.simulated.log import DEFAULTS, RefusedError

HOST: Final = "simulated.invalid"
PORT: Final = 9092


class Host:
    """The network between one process and the cluster. A process that is killed is one that is cut off for good."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.clients: WeakValueDictionary[int, Client] = WeakValueDictionary()
        """In the order in which they were made."""
        self.numbers = count()
        self.loses_requests = False
        self.loses_answers = False
        self._cuts = 0

    @property
    def is_cut(self) -> bool:
        return self.loses_requests or self.loses_answers

    def cut(self, *, answers_only: bool = False) -> None:
        """Lose all requests and answers from now on; with `answers_only` requests still arrive."""
        with self.cluster.schedule:
            self.loses_requests, self.loses_answers = not answers_only, True
            self._cuts += 1
            for client in list(self.clients.values()):
                if client.member is not None:
                    expire = partial(self._end_session, client, client.member, self._cuts)
                    self.cluster.schedule.after(client.session_s, expire)

    def heal(self) -> None:
        """Let requests and answers arrive again. What still waits in the clients is sent."""
        with self.cluster.schedule:
            self.loses_requests = self.loses_answers = False
            for client in list(self.clients.values()):
                client.wake()

    def _end_session(self, client: Client, member: Member, cuts: int) -> None:
        if self.is_cut and self._cuts == cuts and client.member is member:
            client.end_session()


class Client:
    """A client of a simulated cluster."""

    member: Member | None = None
    """Its membership of a group."""

    def __init__(self, host: Host, properties: Mapping[str, Any]) -> None:
        """Keep librdkafka's properties; unknown ones are ignored."""
        self._host = host
        self._cluster = host.cluster
        self._schedule = host.cluster.schedule
        self._properties = properties
        self._condition = self._schedule.condition()
        with self._schedule:
            host.clients[next(host.numbers)] = self

    @property
    def session_s(self) -> float:
        """How long the group waits for a sign of life."""
        return self._number("session.timeout.ms", 45_000) / 1000

    def wake(self) -> None:
        """Look again at what there is to do."""
        self._condition.notify_all()

    def end_session(self) -> None:
        """Leave the group without a word; only a consumer is in one."""

    def _reach(self, timeout: float) -> None:
        """Wait until a request is answered; raise KafkaException after `timeout` seconds."""
        reached = self._schedule.wait(self._condition, timeout, lambda: None if self._host.is_cut else True)
        if reached is None:
            raise failure(KafkaError._TIMED_OUT, retriable=True)

    def _number(self, name: str, default: float) -> float:
        return float(self._properties.get(name, default))

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        """Return the metadata of one topic or of all; a topic that is not there has an error."""
        with self._schedule:
            self._reach(timeout)
            metadata: Any = ClusterMetadata()
            metadata.brokers = {number: self._broker(number) for number in self._cluster.brokers}
            metadata.topics = {
                name: self._topic(name) for name in (sorted(self._cluster.topics) if topic is None else [topic])
            }
            return metadata

    @staticmethod
    def _broker(number: int) -> Any:
        broker: Any = BrokerMetadata()
        broker.id, broker.host, broker.port = number, HOST, PORT
        return broker

    def _topic(self, name: str) -> Any:
        metadata: Any = TopicMetadata()
        metadata.topic = name
        try:
            topic = self._cluster.topic(name)
        except RefusedError as refused:
            metadata.error = KafkaError(refused.code)
            return metadata
        for number, partition in enumerate(topic.partitions):
            one: Any = PartitionMetadata()
            one.id, one.leader = number, -1 if partition.leader is None else partition.leader
            one.replicas, one.isrs = list(partition.replicas), list(partition.isr)
            metadata.partitions[number] = one
        return metadata


def failure(
    code: int, reason: str | None = None, *, retriable: bool = False, requires_abort: bool = False
) -> Exception:
    return KafkaException(KafkaError(code, reason, False, retriable, requires_abort))


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
        return self._answers(topics, self._cluster.delete, _timeout(options))

    def create_partitions(self, new_partitions: Sequence[NewPartitions], **options: Any) -> dict[str, Future[None]]:
        counts = {new.topic: new.new_total_count for new in new_partitions}
        return self._answers(counts, lambda name: self._cluster.grow(name, counts[name]), _timeout(options))

    def describe_topics(self, topics: TopicCollection, **options: Any) -> dict[str, Future[TopicDescription]]:
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
