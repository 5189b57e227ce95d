"""Fixtures of the integration tests."""

import pytest

from halfway.kafka.clients.config import KafkaConfig
from tests.support.brokers.fixtures import Kafka
from tests.support.ownership.cluster_harness import config_for, create_internal_topics, create_topics
from tests.support.pipeline.ledgers import Topics


@pytest.fixture
def topics(kafka: Kafka) -> Topics:
    return Topics(kafka.bootstrap_servers)


@pytest.fixture
def config(kafka: Kafka) -> KafkaConfig:
    """Return the configuration of a new prefix, with its internal topics and one real topic."""
    made = config_for(kafka.bootstrap_servers)
    create_internal_topics(made)
    create_topics(made, {made.prefix + "orders": 1})
    return made
