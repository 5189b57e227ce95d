"""The inbox on real servers: of two transactions that take note of one message, one is first."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import psycopg
import pytest
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

from halfway.client.barrier import UncommittedConnectionError
from halfway.client.consumer import AsyncInbox, Inbox
from tests.barrier.test_drivers import Servers, url

pytestmark = [pytest.mark.xdist_group("databases"), pytest.mark.timeout(1800)]

GENEROUS_S = 180.0
AGE = {
    "postgresql": "UPDATE {table} SET processed_at = processed_at - interval '16 days'",
    "mysql": "UPDATE {table} SET processed_at = processed_at - INTERVAL 16 DAY",
}


def inbox_of(servers: Servers, driver: str, name: str) -> Inbox:
    dialect = driver.partition("+")[0]
    connect: Callable[[], AbstractContextManager[Any]]
    connect = servers["postgresql"].psycopg
    if driver != "postgresql":
        connect = sessionmaker(
            create_engine(url(servers, driver), isolation_level="READ COMMITTED", poolclass=NullPool)
        ).begin
    inbox = Inbox(dialect, connect, table=name)
    inbox.create()
    return inbox


@pytest.mark.parametrize("driver", ["postgresql", "postgresql+psycopg", "mysql+pymysql"])
@pytest.mark.parametrize("commits", [True, False])
def test_a_second_consumer_of_a_message_waits_for_the_first(servers: Servers, driver: str, commits: bool) -> None:
    """It passes over the message if the first one commits, and takes it if that one fails."""
    inbox = inbox_of(servers, driver, f"inbox_{'c' if commits else 'f'}")
    message = f"{driver}-{commits}/1".replace("+", "-")
    noted: list[bool] = []

    def second() -> None:
        with inbox.connect() as connection:
            noted.append(inbox.insert(connection, "points", message))

    other = threading.Thread(target=second)
    with suppress(ZeroDivisionError), inbox.connect() as connection:
        assert inbox.insert(connection, "points", message)
        other.start()
        other.join(0.2)
        assert noted == []
        1 / int(commits)
    other.join(GENEROUS_S)
    assert noted == [not commits]


async def test_a_transaction_that_the_database_has_rolled_back_has_no_row(servers: Servers) -> None:
    """PostgreSQL refuses to look after an error; MariaDB has begun another transaction, as after a deadlock."""
    inbox = inbox_of(servers, "postgresql", "inbox_caught")
    with inbox.connect() as connection:
        assert inbox.insert(connection, "points", "1")
        assert inbox.still_has(connection, "points", "1")
        with suppress(psycopg.Error):
            connection.execute("SELECT 1 / 0")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            inbox.still_has(connection, "points", "1")
    inbox = inbox_of(servers, "mysql+pymysql", "inbox_caught")
    with inbox.connect() as session:
        assert inbox.insert(session, "points", "1")
        session.execute(text("ROLLBACK"))
        assert not inbox.still_has(session, "points", "1")
    engine = create_async_engine(url(servers, "mysql+asyncmy"), poolclass=NullPool)
    async_inbox = AsyncInbox("mysql", engine.begin, table="inbox_caught")
    async with engine.begin() as connection:
        assert await async_inbox.insert(connection, "points", "1")
        assert await async_inbox.still_has(connection, "points", "1")
        await connection.execute(text("ROLLBACK"))
        assert not await async_inbox.still_has(connection, "points", "1")


@pytest.mark.parametrize("driver", ["postgresql+psycopg", "mysql+pymysql"])
def test_old_rows_are_deleted_in_batches(servers: Servers, driver: str) -> None:
    inbox = inbox_of(servers, driver, "inbox_aged")
    with inbox.connect() as session:
        for number in range(5):
            assert inbox.insert(session, "points", f"old/{number + 1}")
    with inbox.connect() as session:
        session.connection().exec_driver_sql(AGE[driver.partition("+")[0]].format(table="inbox_aged"))
        assert inbox.insert(session, "points", "young/1")
    assert [inbox.clean(3), inbox.clean(3), inbox.clean(3)] == [3, 2, 0]
    with inbox.connect() as session:
        assert not inbox.insert(session, "points", "young/1")


async def test_an_inbox_whose_connections_do_not_commit_is_refused(servers: Servers) -> None:
    """`engine.connect` of SQLAlchemy where `engine.begin` is needed: each insert would be True, and no row stayed."""
    inbox_of(servers, "postgresql", "inbox_commits")
    engine = create_async_engine(url(servers, "postgresql+asyncpg"), poolclass=NullPool)
    await AsyncInbox("postgresql", engine.begin, table="inbox_commits").demand_commits()
    with pytest.raises(UncommittedConnectionError):
        await AsyncInbox("postgresql", engine.connect, table="inbox_commits").demand_commits()


@pytest.mark.parametrize("driver", ["postgresql", "mysql+pymysql"])
@pytest.mark.parametrize(
    "consumer, message",
    [("versand-müller", "1"), ("c" * 129, "1"), ("points", "m" * 301), ("points", "order 1 "), ("", "1")],
)
def test_a_key_that_a_database_would_change_is_refused(
    servers: Servers, driver: str, consumer: str, message: str
) -> None:
    """INSERT IGNORE of MySQL shortens or replaces it: two messages would be one, and the second had no effect."""
    inbox = inbox_of(servers, driver, "inbox_keys")
    with inbox.connect() as connection, pytest.raises(ValueError, match="it must have 1 to"):
        inbox.insert(connection, consumer, message)
