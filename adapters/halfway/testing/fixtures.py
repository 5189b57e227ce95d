"""Fixtures of pytest; enable them in the top `conftest.py` with `pytest_plugins = ["halfway.testing.fixtures"]`.

`halfway_server` is a MemoryServer, with `pytest --halfway=kafka` a KafkaServer: run the suite against the first all
day, and against the second before a release. Each lives as long as the run, so let tests call `new_topic`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halfway.testing.kafka import KafkaServer
from halfway.testing.memory import MemoryServer
from halfway.testing.server import Server


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that chooses the server."""
    parser.getgroup("halfway").addoption(
        "--halfway",
        choices=("memory", "kafka"),
        default="memory",
        help="what the fixture halfway_server runs on: memory (default), or kafka, an embedded broker",
    )


@pytest.fixture(scope="session")
def halfway_memory() -> Iterator[MemoryServer]:
    """Give a coordinator over ports in memory."""
    with MemoryServer() as server:
        yield server


@pytest.fixture(scope="session")
def halfway_kafka() -> Iterator[KafkaServer]:
    """Give a coordinator over an embedded Kafka broker."""
    with KafkaServer() as server:
        yield server


@pytest.fixture(scope="session")
def halfway_server(request: pytest.FixtureRequest) -> Server:
    """Give the coordinator that `--halfway` names."""
    chosen: Server = request.getfixturevalue(f"halfway_{request.config.getoption('--halfway')}")
    return chosen
