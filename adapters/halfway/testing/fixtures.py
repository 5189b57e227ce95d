"""Pytest fixtures. Enable them in the top-level `conftest.py` with `pytest_plugins = ["halfway.testing.fixtures"]`.

`halfway_server` is a MemoryServer, or a KafkaServer with `pytest --halfway=kafka`. Use the first for daily work, and
the second before a release. A server runs for the whole session, so tests should call `new_topic`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halfway.testing.server import KafkaServer, MemoryServer, Server


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that chooses the server."""
    parser.getgroup("halfway").addoption(
        "--halfway",
        choices=("memory", "kafka"),
        default="memory",
        help="the server of the fixture halfway_server: memory (default), or kafka for an embedded broker",
    )


@pytest.fixture(scope="session")
def halfway_memory() -> Iterator[MemoryServer]:
    """Provide a coordinator in memory."""
    with MemoryServer() as server:
        yield server


@pytest.fixture(scope="session")
def halfway_kafka() -> Iterator[KafkaServer]:
    """Provide a coordinator on an embedded Kafka broker."""
    with KafkaServer() as server:
        yield server


@pytest.fixture(scope="session")
def halfway_server(request: pytest.FixtureRequest) -> Server:
    """Provide the coordinator that `--halfway` selects."""
    server: Server = request.getfixturevalue(f"halfway_{request.config.getoption('--halfway')}")
    return server
