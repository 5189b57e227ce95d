"""The servers that the tests of the barrier share."""

from collections.abc import Iterator

import pytest

from tests.barrier.databases import Server, run_mariadb, run_postgresql


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[Server]:
    with run_postgresql() as server:
        yield server


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[Server]:
    with run_mariadb() as server:
        yield server
