"""The lane and the membership of one instance, put together."""

from __future__ import annotations

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.lane.lane import KafkaLane
from halfway.kafka.lane.preflight import Destinations
from halfway.kafka.ownership.acquisition import CursorLoader
from halfway.kafka.ownership.membership import KafkaMembership
from halfway.service.ports import Observer


class KafkaCluster:
    """Give the service `lane`, and `membership` a listener: `await cluster.membership.start(service)`."""

    def __init__(
        self, config: KafkaConfig, observer: Observer, destinations: Destinations, cursors: CursorLoader
    ) -> None:
        """Nothing is asked of Kafka before `membership.start`; the topics must have been ensured by then."""
        self.lane = KafkaLane()
        self.membership = KafkaMembership(config, self.lane, observer, destinations, cursors)
