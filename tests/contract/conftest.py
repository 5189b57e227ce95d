"""One suite for the ports' contract, on memory and on a real broker, with the same test ids."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from tests.contract.instance import Backend, Instance, running
from tests.contract.on_memory import MemoryBackend

if TYPE_CHECKING:
    from halfway.kafka.config import KafkaConfig
    from tests.fixtures_kafka import Kafka


@pytest.fixture(scope="session")
def contract_config(kafka: "Kafka") -> "KafkaConfig":
    """Give the configuration whose internal topics this run's contract tests share."""
    from tests.contract.on_kafka import new_config

    return new_config(kafka.bootstrap_servers)


@pytest.fixture(params=["memory", "kafka"])
async def backend(request: pytest.FixtureRequest) -> Backend:
    """Give a log for instances."""
    if request.param == "memory":
        return MemoryBackend()
    from tests.contract.on_kafka import KafkaBackend

    kafka_backend = KafkaBackend(request.getfixturevalue("contract_config"))
    await kafka_backend.ensure()
    return kafka_backend


@pytest.fixture
async def instance(backend: Backend) -> AsyncIterator[Instance]:
    """Give an instance that serves all shards."""
    async with running(backend) as one:
        yield one
