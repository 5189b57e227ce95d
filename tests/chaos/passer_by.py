"""A member that joins the coordinators' group, gets shards, and leaves before it serves any."""

from __future__ import annotations

import time

from confluent_kafka import Consumer, TopicPartition

_POLL_S = 0.2


class PasserBy:
    """A member of `<prefix>members` like an instance, but it never acquires its shards."""

    name = "passer-by"

    def __init__(self, bootstrap_servers: str, prefix: str, session_s: float) -> None:
        self._topic = f"{prefix}half"
        self._properties: dict[str, str | int | float | bool] = {
            "bootstrap.servers": bootstrap_servers,
            "group.id": f"{prefix}members",
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": round(session_s * 1000),
            "log_level": 0,
        }

    def join_and_leave(self, within_s: float) -> list[int]:
        """Join, wait until shards are assigned, and leave at once; return them, none if it took too long."""
        got: list[int] = []

        def assigned(consumer: Consumer, partitions: list[TopicPartition]) -> None:
            got.extend(partition.partition for partition in partitions)
            consumer.incremental_assign([])

        consumer = Consumer(self._properties)
        consumer.subscribe([self._topic], on_assign=assigned)
        deadline = time.monotonic() + within_s
        try:
            while not got and time.monotonic() < deadline:
                consumer.poll(_POLL_S)
        finally:
            consumer.close()
        return got
