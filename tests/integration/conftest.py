"""What the integration tests are given."""

import pytest

from tests.fixtures_kafka import Kafka
from tests.integration.ledgers import Topics


@pytest.fixture
def topics(kafka: Kafka) -> Topics:
    return Topics(kafka.bootstrap_servers)
