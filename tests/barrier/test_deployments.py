"""Processes of a service that start, beside each other and beside those that work, on real databases."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from halfway.client.barrier import AsyncBarrier, Barrier, sqlite_transactions
from halfway.client.consumer import Inbox
from tests.barrier.test_drivers import Servers, async_driver, url
from tests.support.databases.starting import connect_to
from tests.unit.client.test_sync import run

pytestmark = [pytest.mark.xdist_group("databases"), pytest.mark.timeout(1800)]

PROCESSES = 8
TABLES = 5
STARTS = 2
"""The first start finds an empty database, the second one finds the tables there."""
DIALECTS = ["postgresql", "mysql", "sqlite"]


def address(servers: Servers, dialect: str, folder: Path) -> str:
    if dialect == "sqlite":
        return str(folder / "shop.sqlite")
    return str(servers["postgresql"].folder) if dialect == "postgresql" else servers["mysql"].socket


@pytest.mark.parametrize("dialect", DIALECTS)
def test_processes_that_start_together_create_the_tables_without_an_error(
    servers: Servers, dialect: str, tmp_path: Path
) -> None:
    starting = [dialect, address(servers, dialect, tmp_path), *map(str, (PROCESSES, TABLES, STARTS))]
    told = subprocess.run(
        [sys.executable, "-m", "tests.support.databases.starting", *starting],
        capture_output=True,
        check=True,
        text=True,
    )
    assert json.loads(told.stdout) == []
    connect = connect_to(dialect, address(servers, dialect, tmp_path))
    with connect() as connection:
        cursor = connection.cursor()
        for table in (f"{kind}_{number}" for kind in ("starts", "starts_inbox") for number in range(TABLES)):
            cursor.execute(f"SELECT COUNT(*) FROM {table}")  # noqa: S608 - a name of this test
            assert cursor.fetchone()[0] == PROCESSES * STARTS + (table.count("_") == 1)  # the barrier's own row
            cursor.execute(f"DROP TABLE {table}")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_process_that_starts_waits_for_no_local_transaction_and_delays_none(
    servers: Servers, dialect: str, tmp_path: Path
) -> None:
    """It returns while a transaction that has written is open; whatever it waited for would end it with an error."""
    connect: Callable[[], AbstractContextManager[Any]] = connect_to(dialect, address(servers, dialect, tmp_path))
    impatient = connect
    if dialect == "postgresql":
        impatient = lambda: servers["postgresql"].psycopg("-c lock_timeout=2000")  # noqa: E731
    elif dialect == "sqlite":
        impatient = sqlite_transactions(tmp_path / "shop.sqlite", busy_s=0.2)
    barrier, inbox = Barrier(dialect, connect, table="busy"), Inbox(dialect, connect, table="busy_inbox")
    barrier.create()
    inbox.create()
    with connect() as connection:
        barrier.insert(connection, uuid4().hex)
        inbox.insert(connection, "points", uuid4().hex)
        Barrier(dialect, impatient, table="busy").create()
        Inbox(dialect, impatient, table="busy_inbox").create()


@pytest.mark.parametrize("driver", ["asyncpg", "postgresql+asyncpg", "mysql+asyncmy"])
async def test_tasks_that_start_together_create_the_table_without_an_error(servers: Servers, driver: str) -> None:
    """The connections of asyncpg's own pool commit each statement."""
    async with async_driver(servers, driver) as (connect, begin):
        name = f"starts_{driver.replace('+', '_')}"
        barrier = AsyncBarrier("mysql" if "my" in driver else "postgresql", connect, table=name)
        await asyncio.gather(*(barrier.create() for _ in range(PROCESSES)))
        async with begin() as connection:
            await barrier.insert(connection, uuid4().hex)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_table_of_a_release_without_the_row_that_identifies_it_gets_the_row(
    servers: Servers, dialect: str, tmp_path: Path
) -> None:
    connect = connect_to(dialect, address(servers, dialect, tmp_path))
    barrier = Barrier(dialect, connect, table="without_mark")
    with connect() as connection:
        for sql in barrier.migration()[:-1]:
            connection.cursor().execute(sql)
    assert barrier.look("#table") is None
    barrier.create()
    assert barrier.look("#table") is not None


FORKED = """
import os, sys
from sqlalchemy import create_engine, text
from halfway.client.barrier import Barrier

def session():
    with engine.begin() as connection:
        return connection.execute(text(sys.argv[3])).scalar_one()

engine = create_engine(sys.argv[1])
barrier = Barrier(sys.argv[2], engine.begin, table="forked")
barrier.create()
own = session()
child = os.fork()
if child == 0:
    sys.exit(session() == own)  # with all of Python's clean-up
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child uses the parent's session"
assert session() == own  # nor has it ended that
"""


@pytest.mark.parametrize("driver", ["postgresql+psycopg", "postgresql+psycopg2", "mysql+pymysql"])
async def test_the_child_of_a_fork_leaves_the_connections_of_an_engine_to_its_parent(
    servers: Servers, driver: str
) -> None:
    """With gunicorn's --preload, the tables are created and the client is started before the fork."""
    dialect = driver.partition("+")[0]
    told = "SELECT pg_backend_pid()" if dialect == "postgresql" else "SELECT CONNECTION_ID()"
    assert await run(FORKED, url(servers, driver), dialect, told) == (0, "")
