"""What all simulated clients share: properties, metadata, and waiting."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import count
from typing import Any, Final
from weakref import WeakValueDictionary

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined] # public, but not for mypy
    BrokerMetadata,
    ClusterMetadata,
    PartitionMetadata,
    TopicMetadata,
)

from halfway.simulated.cluster import Cluster
from halfway.simulated.groups import Member
from halfway.simulated.log import RefusedError

HOST: Final = "simulated.invalid"
PORT: Final = 9092


class Host:
    """The network between one process and the cluster. A process that is killed is one that is cut off for good."""

    def __init__(self, cluster: Cluster) -> None:
        """Start with a network that works."""
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
    """Return what a client raises."""
    return KafkaException(KafkaError(code, reason, False, retriable, requires_abort))
