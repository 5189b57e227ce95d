"""What the integration tests are given."""

import pytest

from tests.support.brokers.fixtures import Kafka
from tests.support.pipeline.ledgers import Topics


@pytest.fixture
def topics(kafka: Kafka) -> Topics:
    return Topics(kafka.bootstrap_servers)
