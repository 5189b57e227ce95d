"""The controller fences the only broker, as after a stall, and it comes back."""

import time
from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaException

from halfway.embedded import EmbeddedConfig, EmbeddedKafka
from halfway.kafka.topics.admin_requests import AdminRequests
from tests.support.brokers.jvm import STARTED_WITHIN_S, short_lived
from tests.support.ownership.cluster_harness import PATIENCE_S, config_of


@pytest.fixture
def flapping() -> Iterator[EmbeddedKafka]:
    """Return a broker whose heartbeats are later than its session allows: it is fenced again and again."""
    late = {"broker.session.timeout.ms": "2000", "broker.heartbeat.interval.ms": "4000"}
    config = EmbeddedConfig(jvm_options=short_lived(), properties=late, startup_timeout_s=STARTED_WITHIN_S)
    with EmbeddedKafka(config) as kafka:
        yield kafka


def test_the_brokers_are_counted_when_one_is_alive_again(flapping: EmbeddedKafka) -> None:
    """Describing the cluster then would abort the process: librdkafka asserts that there is a broker."""
    requests = AdminRequests(
        config_of(flapping.bootstrap_servers), time.monotonic() + 2 * PATIENCE_S, cancelled=lambda: False
    )
    assert requests.brokers() == [1]
    while not fenced(requests):
        assert time.monotonic() < requests.deadline, "it was never fenced"
    assert requests.brokers() == [1]


def fenced(requests: AdminRequests) -> bool:
    try:
        return not requests.admin.list_topics("__consumer_offsets", timeout=5).brokers
    except KafkaException:
        return False
