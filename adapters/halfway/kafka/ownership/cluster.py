"""The lane and the membership of one instance."""

from __future__ import annotations

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.lane.lane import KafkaLane
from halfway.kafka.lane.preflight import Destinations
from halfway.kafka.ownership.acquisition import CursorLoader
from halfway.kafka.ownership.membership import KafkaMembership
from halfway.service.ports import Observer


class KafkaCluster:
    """The lane and the membership of one instance. Start it by `await cluster.membership.start(service)`."""

    def __init__(
        self, config: KafkaConfig, observer: Observer, destinations: Destinations, cursors: CursorLoader
    ) -> None:
        """Create both parts. They connect in `membership.start`, which needs the internal topics to exist."""
        self.lane = KafkaLane()
        self.membership = KafkaMembership(config, self.lane, observer, destinations, cursors)
