"""The simulated cluster: topics, what clients may do, and what a test or a seed does to them."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

from confluent_kafka import KafkaError, Uuid

from halfway.simulated.coordinators import Group, Transactions
from halfway.simulated.log import DEFAULTS, Batch, Partition, Place, RefusedError
from halfway.simulated.schedule import Clock, MachineClock, Schedule

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,249}\Z")
_CLEAN_S: Final = 15.0
MAX_TRANSACTION_TIMEOUT_MS: Final = 900_000
SESSION_TIMEOUTS_MS: Final = (6_000, 1_800_000)


@dataclass(kw_only=True, eq=False)
class Topic:
    """A topic; its partitions share `settings`, which may change."""

    id: Uuid
    settings: dict[str, str]
    partitions: list[Partition]


class Cluster:
    """What the clients of one simulated cluster share. All methods need a `with` block of `schedule`."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        seed: int | None = None,
        brokers: int = 1,
        latency_s: tuple[float, float] = (0.0, 0.0),
        markers_s: tuple[float, float] = (0.0, 0.002),
        expiry_interval_s: float = 10.0,
    ) -> None:
        """Start without topics.

        `latency_s` is how long a producer's request, and its answer, is on the way, `markers_s` how long a marker takes
        after its transaction is decided, and `expiry_interval_s` how often the coordinator looks for transactions that
        have timed out.
        """
        self.random = Random(seed)  # noqa: S311 - a seed must give the same run
        self.schedule = Schedule(clock or MachineClock(), self.random)
        self._latency_s = latency_s
        self.brokers = list(range(1, brokers + 1))
        self.topics: dict[str, Topic] = {}
        self.groups: defaultdict[str, Group] = defaultdict(lambda: Group(self.places))
        self.denied: set[tuple[str, str, str]] = set()
        """What the clients may not do: operation, kind and name of the resource, as in ("Write", "topic", "orders")."""
        self.transactions = Transactions(
            self.schedule, self.partition, self.changed, markers_s=markers_s, expiry_interval_s=expiry_interval_s
        )
        self._watching: defaultdict[Place, dict[threading.Condition, None]] = defaultdict(dict)
        self.schedule.after(_CLEAN_S, self._clean_again)

    def latency(self) -> float:
        """Return how long the next request, or answer, is on the way."""
        return self.random.uniform(*self._latency_s) if self._latency_s[1] else 0.0

    def _uuid(self) -> Uuid:
        return Uuid(self.random.getrandbits(62), self.random.getrandbits(62))

    # --- topics

    def create(self, name: str, partitions: int, replication: int, settings: Mapping[str, str], *, dry: bool) -> None:
        """Create a topic, or raise RefusedError; if `dry`, only look whether it could be created."""
        self.require("Create", "topic", name, KafkaError.TOPIC_AUTHORIZATION_FAILED)
        if _NAME.match(name) is None or name in (".", ".."):
            raise RefusedError(KafkaError.TOPIC_EXCEPTION)
        if name in self.topics:
            raise RefusedError(KafkaError.TOPIC_ALREADY_EXISTS)
        count, replicas = (1 if given == -1 else given for given in (partitions, replication))
        if count < 1:
            raise RefusedError(KafkaError.INVALID_PARTITIONS)
        if not 1 <= replicas <= len(self.brokers):
            raise RefusedError(KafkaError.INVALID_REPLICATION_FACTOR)
        if not settings.keys() <= DEFAULTS.keys():
            raise RefusedError(KafkaError.INVALID_CONFIG)
        if dry:
            return
        topic = Topic(id=self._uuid(), settings={**DEFAULTS, **settings}, partitions=[])
        self._grow(topic, count, replicas)
        self.topics[name] = topic
        self._topics_changed()

    def grow(self, name: str, partitions: int) -> None:
        """Add partitions to a topic, so that it has this many."""
        topic = self.topic(name)
        if partitions <= len(topic.partitions):
            raise RefusedError(KafkaError.INVALID_PARTITIONS)
        self._grow(topic, partitions, len(topic.partitions[0].replicas))
        self._topics_changed()

    def _grow(self, topic: Topic, partitions: int, replicas: int) -> None:
        for number in range(len(topic.partitions), partitions):
            at = [self.brokers[(number + place) % len(self.brokers)] for place in range(replicas)]
            topic.partitions.append(Partition(topic.settings, at[0], at))

    def delete(self, name: str) -> None:
        """Delete a topic with its records and the groups' offsets."""
        self.topic(name)
        del self.topics[name]
        for group in self.groups.values():
            group.forget(name)
        self._topics_changed()

    def _topics_changed(self) -> None:
        for group in self.groups.values():
            group.rebalance()
        for place in list(self._watching):
            self.changed(place)

    def topic(self, name: str, operation: str = "Describe") -> Topic:
        """Return a topic, or raise RefusedError."""
        self.require(operation, "topic", name, KafkaError.TOPIC_AUTHORIZATION_FAILED)
        if name not in self.topics:
            legal = _NAME.match(name) is not None
            raise RefusedError(KafkaError.UNKNOWN_TOPIC_OR_PART if legal else KafkaError.TOPIC_EXCEPTION)
        return self.topics[name]

    def partition(self, place: Place) -> Partition | None:
        topic = self.topics.get(place[0])
        return topic.partitions[place[1]] if topic is not None and place[1] < len(topic.partitions) else None

    def led(self, place: Place, operation: str) -> Partition:
        """Return a partition that has a leader, or raise RefusedError."""
        self.topic(place[0], operation)
        partition = self.partition(place)
        if partition is None:
            raise RefusedError(KafkaError.UNKNOWN_TOPIC_OR_PART)
        if partition.leader is None:
            raise RefusedError(KafkaError.LEADER_NOT_AVAILABLE)
        return partition

    def places(self, names: Iterable[str]) -> list[Place]:
        return [
            (name, number)
            for name in sorted(names)
            if name in self.topics
            for number in range(len(self.topics[name].partitions))
        ]

    # --- records

    def append(self, place: Place, batch: Batch, transactional_id: str | None) -> int:
        """Append a batch and return its base offset, or raise RefusedError."""
        partition = self.led(place, "Write")
        if transactional_id is not None and batch.producer not in partition.transactions:
            self.transactions.verify(transactional_id, batch.producer, batch.epoch, place)
        base = partition.append(batch, self.schedule.clock.now_ms())
        self.changed(place)
        return base

    def watch(self, place: Place, condition: threading.Condition) -> None:
        """Notify a condition when a partition changes."""
        self._watching[place][condition] = None

    def unwatch(self, place: Place, condition: threading.Condition) -> None:
        self._watching[place].pop(condition, None)

    def changed(self, place: Place) -> None:
        """Wake those who read a partition."""
        for condition in self._watching.get(place, ()):
            condition.notify_all()

    def clean(self) -> None:
        """Compact and delete, as the topics' settings say; it also happens at an interval."""
        for topic in self.topics.values():
            for partition in topic.partitions:
                partition.clean(self.schedule.clock.now_ms())

    def _clean_again(self) -> None:
        self.clean()
        self.schedule.after(_CLEAN_S, self._clean_again)

    # --- permissions

    def require(self, operation: str, kind: str, name: str, code: int) -> None:
        """Raise RefusedError with this code if an operation on a resource is denied."""
        if (operation, kind, name) in self.denied:
            raise RefusedError(code)

    def require_transactional_id(self, name: str) -> None:
        self.require("Write", "transactional-id", name, KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)

    def group(self, name: str) -> Group:
        """Return a group that may be used, or raise RefusedError."""
        self.require("Read", "group", name, KafkaError.GROUP_AUTHORIZATION_FAILED)
        return self.groups[name]
