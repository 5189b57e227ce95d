"""What the tests of the barrier share: database servers, and a coordinator over ports in memory."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.barrier.databases import Server, run_mariadb, run_postgresql
from tests.support.rest.client import RestWorld


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[Server]:
    with run_postgresql() as server:
        yield server


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[Server]:
    with run_mariadb() as server:
        yield server


@pytest.fixture
def servers(postgresql_server: Server, mariadb_server: Server) -> dict[str, Server]:
    return {"postgresql": postgresql_server, "mysql": mariadb_server}


@pytest.fixture
async def world() -> AsyncIterator[RestWorld]:
    async with RestWorld() as world:
        await world.put_shop()
        yield world
