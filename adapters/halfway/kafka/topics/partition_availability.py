"""The partitions of a topic that accept no records now: a Kafka transaction that contains one of them cannot end.

A partition without a leader accepts nothing. One with fewer in-sync replicas than `min.insync.replicas` accepts neither
records (acks=all) nor the marker that ends a Kafka transaction, so its writers wait until its brokers are back.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfway.domain.ids import partition_for_key


@dataclass(frozen=True, slots=True)
class WritablePartitions:
    """The partitions of a topic that can be written now; `closed` maps each of the others to the reason."""

    topic: str
    partitions: int
    closed: Mapping[int, str] = field(default_factory=dict)

    def refusal(self, partition: int | None, key: bytes | None) -> str | None:
        """Return why a message cannot be written now; None if it can."""
        if partition is None:
            if not self.closed:
                return None
            if key is None:
                partition = next(iter(self.closed)) if len(self.closed) >= self.partitions else None
            else:
                partition = partition_for_key(key, self.partitions)
        elif partition >= self.partitions:
            return (
                f"topic {self.topic!r} has no partition {partition}, only {self.partitions}: "
                "add partitions, and the end can be done"
            )
        reason = None if partition is None else self.closed.get(partition)
        if reason is None:
            return None
        return (
            f"partition {partition} of topic {self.topic!r} {reason}: bring its brokers back, and the end can be done"
        )

    def any_open(self) -> int:
        """Return a random open partition, for a message that may go to any; there must be one."""
        return random.choice([number for number in range(self.partitions) if number not in self.closed])  # noqa: S311 - it spreads load


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionHealth:
    """The partitions of a topic, from one description of it."""

    partitions: int
    leaderless: frozenset[int] = frozenset()
    short: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """The partitions with a replica out of sync, each with its in-sync replicas and all of its replicas."""

    @classmethod
    def of(cls, described: Sequence[Any]) -> PartitionHealth:
        """Read confluent-kafka's `TopicPartitionInfo`s."""
        return cls(
            partitions=len(described),
            leaderless=frozenset(info.id for info in described if info.leader is None or info.leader.id < 0),
            short={
                info.id: (len(info.isr), len(info.replicas)) for info in described if len(info.isr) < len(info.replicas)
            },
        )

    def writable(self, topic: str, min_insync: int) -> WritablePartitions:
        """Return the writable partitions; `min_insync` matters only for partitions with a replica out of sync."""
        closed: dict[int, str] = {}
        for partition, (in_sync, replicas) in self.short.items():
            needed = min(min_insync, replicas)  # a broker does not require more replicas than there are
            if in_sync < needed:
                closed[partition] = f"has {in_sync} replicas in sync, and min.insync.replicas asks for {needed}"
        return WritablePartitions(topic, self.partitions, closed | dict.fromkeys(self.leaderless, "has no leader"))
