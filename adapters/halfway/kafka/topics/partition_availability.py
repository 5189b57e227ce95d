"""The partitions of a topic that take no records now: a Kafka transaction with one of them in it cannot end.

A partition without a leader takes nothing. One with fewer replicas in sync than `min.insync.replicas` takes neither
records (acks=all) nor the marker with which a Kafka transaction ends, so its writers are held up until its
brokers are back.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfway.domain.ids import partition_for_key


@dataclass(frozen=True, slots=True)
class WritablePartitions:
    """Where messages for a topic may go now."""

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
        """Choose a partition for a message that may go to any; there must be one that is open."""
        return random.choice([one for one in range(self.partitions) if one not in self.closed])  # noqa: S311 - it spreads load


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionHealth:
    """The partitions of a topic, from one description of it."""

    partitions: int
    leaderless: frozenset[int] = frozenset()
    short: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Partitions with a replica out of sync: how many are in sync, of how many."""

    @classmethod
    def of(cls, described: Sequence[Any]) -> PartitionHealth:
        """Read confluent-kafka's `TopicPartitionInfo`s."""
        return cls(
            partitions=len(described),
            leaderless=frozenset(one.id for one in described if one.leader is None or one.leader.id < 0),
            short={one.id: (len(one.isr), len(one.replicas)) for one in described if len(one.isr) < len(one.replicas)},
        )

    def writable(self, topic: str, min_insync: int) -> WritablePartitions:
        """Return where messages may go; `min_insync` is asked only of partitions with a replica out of sync."""
        closed: dict[int, str] = {}
        for partition, (in_sync, replicas) in self.short.items():
            needed = min(min_insync, replicas)  # a broker does not demand more than there are
            if in_sync < needed:
                closed[partition] = f"has {in_sync} replicas in sync, and min.insync.replicas asks for {needed}"
        return WritablePartitions(topic, self.partitions, closed | dict.fromkeys(self.leaderless, "has no leader"))
