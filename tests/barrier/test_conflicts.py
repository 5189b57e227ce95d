"""What real servers answer to a transaction that another one stands in the way of: a repeat may succeed."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from inspect import isawaitable
from typing import Any

import pytest
from sqlalchemy import text

from halfway.client import Halfway, Message, MissingRowError
from halfway.client.barrier import AsyncBarrier, Barrier
from halfway.client.messages import is_conflict, may_have_committed
from tests.barrier.test_drivers import Servers, async_driver, raised, sync_driver
from tests.support.rest.client import RestWorld

pytestmark = [pytest.mark.xdist_group("databases"), pytest.mark.timeout(1800)]

UPDATE_1 = "UPDATE conflicts SET n = 1 WHERE id = 1"
UPDATE_2 = "UPDATE conflicts SET n = 2 WHERE id = 1"
ROWS = (UPDATE_1, "UPDATE conflicts SET n = 1 WHERE id = 2")

Execute = Callable[[str], Any]


@contextmanager
def two(servers: Servers, dialect: str, *settings: str) -> Iterator[tuple[Execute, Execute]]:
    """Give a table with the rows 1 and 2, and two connections, of which the second has these settings."""
    with ExitStack() as stack:
        server = servers[dialect]
        connect: Callable[[], Any] = server.psycopg if dialect == "postgresql" else server.pymysql
        first, second = (stack.enter_context(connect()) for _ in range(2))
        execute, execute_second = (one.cursor().execute for one in (first, second))
        engine = " ENGINE=InnoDB" if dialect == "mysql" else ""
        for sql in (
            "DROP TABLE IF EXISTS conflicts",
            f"CREATE TABLE conflicts (id int PRIMARY KEY, n int){engine}",
            "INSERT INTO conflicts VALUES (1, 0), (2, 0)",
        ):
            execute(sql)
        first.commit()
        for sql in settings:
            execute_second(sql)
        second.commit()
        yield execute, execute_second
        first.rollback()
        second.rollback()
        execute("DROP TABLE conflicts")
        first.commit()


def demand_conflict(error: BaseException, expected: str | int) -> None:
    """Compare PostgreSQL's SQLSTATE or MySQL's number."""
    assert (getattr(error, "sqlstate", None) if isinstance(expected, str) else error.args[0]) == expected
    assert is_conflict(error)
    assert not may_have_committed(error)


def of_a_deadlock(executes: Sequence[Execute]) -> BaseException:
    """Return the error of the one that the server has chosen; the other one goes on when that is rolled back."""

    def attempt(execute: Execute, sql: str) -> BaseException | None:
        try:
            execute(sql)
        except Exception as error:  # noqa: BLE001 - any driver's
            execute("ROLLBACK")
            return error
        return None

    for number, execute in enumerate(executes):
        assert attempt(execute, ROWS[number]) is None
    with ThreadPoolExecutor(2) as pool:
        tried = [pool.submit(attempt, execute, ROWS[1 - number]) for number, execute in enumerate(executes)]
        errors = [error for one in tried if (error := one.result()) is not None]
    (error,) = errors
    return error


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_postgresqls_outdated_snapshot(servers: Servers, level: str) -> None:
    begin = f"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {level}"
    with two(servers, "postgresql", begin) as (first, second):
        second("SELECT * FROM conflicts")
        first(UPDATE_1)
        first("COMMIT")
        demand_conflict(raised(lambda: second(UPDATE_2)), "40001")


def test_postgresqls_deadlock(servers: Servers) -> None:
    with two(servers, "postgresql") as (first, second):
        demand_conflict(of_a_deadlock([first, second]), "40P01")


@pytest.mark.parametrize("setting, ending", [("SET lock_timeout = 50", ""), ("SET lock_timeout = 0", " NOWAIT")])
def test_a_lock_that_postgresql_does_not_give(servers: Servers, setting: str, ending: str) -> None:
    with two(servers, "postgresql", setting) as (first, second):
        first(UPDATE_1)
        locking = f"SELECT * FROM conflicts WHERE id = 1 FOR UPDATE{ending}"  # noqa: S608 - no input
        demand_conflict(raised(lambda: second(locking)), "55P03")


def test_a_lock_that_mariadb_does_not_give(servers: Servers) -> None:
    with two(servers, "mysql", "SET innodb_lock_wait_timeout = 1") as (first, second):
        first(UPDATE_1)
        demand_conflict(raised(lambda: second(UPDATE_2)), 1205)


def test_mariadbs_deadlock(servers: Servers) -> None:
    with two(servers, "mysql") as (first, second):
        demand_conflict(of_a_deadlock([first, second]), 1213)


def test_mariadbs_outdated_snapshot(servers: Servers) -> None:
    """Of its snapshots as they are by default from 11.6 on; MySQL has no such setting, and updates what is newest."""
    with two(servers, "mysql") as (first, second):
        if "MariaDB" not in version(servers):
            second("SELECT * FROM conflicts")
            first(UPDATE_1)
            first("COMMIT")
            second(UPDATE_2)
            return
        second("SET SESSION innodb_snapshot_isolation = ON")
        second("ROLLBACK")
        second("SELECT * FROM conflicts")
        first(UPDATE_1)
        first("COMMIT")
        demand_conflict(raised(lambda: second(UPDATE_2)), 1020)


def version(servers: Servers) -> str:
    with servers["mysql"].pymysql() as connection, connection.cursor() as cursor:
        cursor.execute("SELECT VERSION()")
        return str((cursor.fetchone() or [""])[0])


async def place(client: Halfway, begin: Any, value: str, *statements: str) -> None:
    """Execute statements in a block, on a connection of any driver, and catch their errors."""
    async with client.transaction([Message(topic="orders", key="1", value=value)], begin) as connection:
        of_sqlalchemy = type(connection).__module__.startswith("sqlalchemy")
        for sql in statements:
            with suppress(Exception):
                executed = connection.execute(text(sql) if of_sqlalchemy else sql)
                if isawaitable(executed):
                    await executed


@pytest.mark.parametrize("driver", ["psycopg", "postgresql+psycopg", "asyncpg", "postgresql+asyncpg"])
async def test_a_block_that_catches_an_error_of_postgresql_sends_nothing(
    servers: Servers, world: RestWorld, driver: str
) -> None:
    """COMMIT of a transaction in which a statement failed is a rollback without an error."""
    async with AsyncExitStack() as stack:
        connect, begin = (
            await stack.enter_async_context(async_driver(servers, driver))
            if "asyncpg" in driver
            else stack.enter_context(sync_driver(servers, driver))
        )
        barrier: Any = (AsyncBarrier if "asyncpg" in driver else Barrier)("postgresql", connect, table="caught")
        created = barrier.create()
        if isawaitable(created):
            await created
        async with Halfway(world.url, "shop", barrier=barrier) as client:
            await place(client, begin, "kept", "SELECT 1")  # from now on `begin` is trusted
            with pytest.raises(Exception, match="aborted") as told:
                await place(client, begin, "lost", "SELECT 1 / 0")
            assert "savepoint" in told.value.__notes__[0]
    assert [record.value for record in world.memory.records("orders")] == [b"kept"]


async def test_a_block_that_goes_on_after_a_rollback_of_mariadb_sends_nothing(
    servers: Servers, world: RestWorld
) -> None:
    """As after a deadlock: the server has rolled back, and begins a new transaction."""
    with sync_driver(servers, "mysql+pymysql") as (connect, begin):
        barrier = Barrier("mysql", connect, table="caught")
        barrier.create()
        async with Halfway(world.url, "shop", barrier=barrier) as client:
            with pytest.raises(MissingRowError, match="savepoint"):
                await place(client, begin, "lost", "ROLLBACK", "SELECT 1")
    assert not world.memory.records("orders")
