"""A Kafka cluster in memory behind the client's own seam: halfway's Kafka adapter runs on it unchanged.

A `SimulatedHost` makes clients with the methods of confluent-kafka's that halfway uses
(`halfway.kafka.clients.seam`), and its network can be cut. Time comes from one clock, chance from one generator, and
the cluster has no threads. `tests/contract/test_simulated_kafka.py` runs the same cases on it and on a real broker.

Where it is simpler than a real cluster with librdkafka:

- Only a producer's requests take time, where a cluster has a latency, with one batch of a partition on the way.
  Requests, or only their answers, are lost where a test cuts off a host, all of them until it heals. An admin client's
  futures are done at once otherwise.
- Properties of clients are not validated; statistics, logs, throttling and `error_cb` do not exist.
- A fetch returns at once: `fetch.min.bytes`, `fetch.wait.max.ms` and the sizes of fetches and queues do not matter.
- Leaders and replicas in sync change only where a test sets them, leader epochs do not exist, and a producer or
  consumer sees such a change at once. A produced topic's metadata are refreshed only where librdkafka must.
- Sizes of batches are estimated, without compression. `segment.bytes`, `retention.bytes`, `segment.jitter.ms` and the
  ratio of dirty records do not matter: segments are rolled by time, and all that may be compacted is, every 15 s.
- The search for a time looks at records, not at batches and index entries.
- After a record of a transaction was refused, its producer can be used again once it has aborted. librdkafka's fails
  once more ("skipped sequence numbers").
- Transactions are those of a client without KIP-890 part 2; producer ids do not expire. Offsets cannot be part of one.
- A member of a group lives while its consumer does; a session ends where a test ends it. Every group is rebalanced
  cooperatively and at once, whatever its strategy. Committed offsets do not expire. There are no static members.
- Permissions are what `denied` contains, for all clients alike. There are no quotas, no regular expressions in
  subscriptions, no other kinds of resources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfway.simulated.client import Host, SimulatedAdmin
from halfway.simulated.cluster import Cluster
from halfway.simulated.consumer import SimulatedConsumer
from halfway.simulated.producer import SimulatedProducer
from halfway.simulated.schedule import Clock, MachineClock

__all__ = ["Clock", "MachineClock", "SimulatedHost", "SimulatedKafka"]


class SimulatedHost(Host):
    """Makes the clients of one process."""

    def producer(self, properties: Mapping[str, Any]) -> SimulatedProducer:
        return SimulatedProducer(self, properties)

    def consumer(self, properties: Mapping[str, Any]) -> SimulatedConsumer:
        return SimulatedConsumer(self, properties)

    def admin(self, properties: Mapping[str, Any]) -> SimulatedAdmin:
        return SimulatedAdmin(self, properties)


class SimulatedKafka(Cluster):
    """One cluster, which lives while it is referenced. `Cluster` has its parameters, and what may be done to it."""

    def host(self) -> SimulatedHost:
        """Return what makes the clients of another process."""
        return SimulatedHost(self)
