"""The database servers of the tests: each is started when a test first asks for it, once for each worker.

Every process of pytest imports this module, so the drivers are imported only where a server is started.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.databases.servers import Server


@pytest.fixture(scope="session")
def postgresql_server() -> "Iterator[Server]":
    from tests.support.databases.servers import run_postgresql

    with run_postgresql() as server:
        yield server


@pytest.fixture(scope="session")
def mariadb_server() -> "Iterator[Server]":
    """Give MariaDB; MySQL itself if HALFWAY_TEST_MYSQL is set (`make barrier MYSQL=1`)."""
    from tests.support.databases.servers import run_mariadb, run_mysql

    run = run_mysql if os.environ.get("HALFWAY_TEST_MYSQL") else run_mariadb
    with run() as server:
        yield server


@pytest.fixture
def servers(postgresql_server: "Server", mariadb_server: "Server") -> "dict[str, Server]":
    return {"postgresql": postgresql_server, "mysql": mariadb_server}
