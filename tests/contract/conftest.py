"""One suite for the ports' contract, on a simulated and on a real broker, with the same test ids."""

import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.seam import Clients
from tests.support.brokers.fixtures import Kafka
from tests.support.contract.backend import Backend, new_config, simulated
from tests.support.contract.instance import Instance, running

_CONFIGS = {"simulated": "simulated_config", "kafka": "contract_config"}


@pytest.fixture(scope="session")
def contract_config(kafka: Kafka) -> KafkaConfig:
    """Return the configuration whose internal topics the contract tests of this run share."""
    return new_config(kafka.bootstrap_servers, Clients())


@pytest.fixture(scope="session")
def simulated_config() -> KafkaConfig:
    """Return the configuration of a simulated broker; a failure shows the seed of its broker."""
    seed = random.randrange(2**32)
    return new_config(f"simulated-{seed}.invalid:9092", simulated(seed))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["simulated", "kafka"])
async def backend(request: pytest.FixtureRequest) -> Backend:
    """Return a log for the instances of a module."""
    backend = Backend(request.getfixturevalue(_CONFIGS[request.param]))
    await backend.ensure()
    return backend


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def instance(backend: Backend) -> AsyncIterator[Instance]:
    """Return an instance that serves all shards to all tests of a module: each has its own ids and topics.

    A module whose tests start instances themselves does not use it, because they would share the shards.
    """
    async with running(backend) as one:
        yield one
