"""What stands between a service and its database: poolers that hand connections on, and replicas."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from halfway.client.barrier import TABLE, AsyncBarrier, Barrier, sqlite_transactions
from halfway.client.barrier.drivers import ASYNC_WITH, carry_out, carry_out_async, opened_by
from halfway.client.barrier.table import BarrierTable, Statement, Steps
from tests.barrier.test_drivers import (
    ASYNCHRONOUS_DRIVERS,
    SYNCHRONOUS_DRIVERS,
    Servers,
    asked,
    async_driver,
    dialect_of,
    sync_driver,
)
from tests.support.databases.servers import Server, run_standby

pytestmark = [pytest.mark.xdist_group("databases"), pytest.mark.timeout(1800)]


def test_no_setting_of_a_session_changes_where_pgbouncer_may_hand_the_connection_on(postgresql_server: Server) -> None:
    """In transaction pooling that is after each statement of a connection that commits each statement."""
    table = BarrierTable("postgresql", "pooled")
    Barrier("postgresql", postgresql_server.psycopg, table="pooled").create()
    with postgresql_server.psycopg() as connection, postgresql_server.psycopg() as other:
        connection.autocommit = True
        before = _settings(connection)
        still_open = f"{uuid4()}"
        other.execute("INSERT INTO pooled VALUES (%s, 'commit')", [still_open])
        for steps in (
            table.look("a"),
            table.take_place("a"),
            table.take_place(still_open),
            table.insert("b"),
            table.still_has("b"),
            table.lease("#sender", "12345678"),
            table.clean(60, 10),
        ):
            with suppress(psycopg.errors.LockNotAvailable):  # what is open is not decided
                carry_out(_watched(steps, lambda: _settings(connection) == before), connection)
            assert _settings(connection) == before
        advisory = connection.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
        assert advisory.fetchone() == (0,)


def _watched(steps: Steps[Any], is_unchanged: Callable[[], bool]) -> Steps[None]:
    """Demand after each statement that nothing has changed."""
    result = None
    with suppress(StopIteration):
        while True:
            result = yield steps.send(result)  # type: ignore[arg-type]  # None begins it
            assert is_unchanged()


def _settings(connection: Any) -> list[Any]:
    return list(connection.execute("SELECT name, setting FROM pg_settings ORDER BY name"))


SHOWN = {
    "postgresql": "SELECT name, setting FROM pg_settings WHERE name <> 'transaction_isolation' ORDER BY name",
    "mysql": "SELECT @@SESSION.innodb_lock_wait_timeout, @@SESSION.sql_mode, @@SESSION.tx_isolation",
    "sqlite": "PRAGMA busy_timeout",
}


@pytest.mark.parametrize("driver", ["sqlite", *(each for each in SYNCHRONOUS_DRIVERS if "+" not in each)])
def test_a_check_leaves_the_settings_of_a_synchronous_connection(servers: Servers, driver: str, tmp_path: Path) -> None:
    dialect = "sqlite" if driver == "sqlite" else dialect_of(driver)
    with ExitStack() as stack:
        connect = sqlite_transactions(tmp_path / "shop.sqlite")
        if driver != "sqlite":
            connect, _ = stack.enter_context(sync_driver(servers, driver))
        Barrier(dialect, connect).create()
        connection, table = stack.enter_context(connect()), BarrierTable(dialect, TABLE)

        def settings() -> Sequence[Any]:
            return carry_out(_shown(dialect), connection)

        before = settings()
        for decided in (f"{uuid4()}", "#table"):
            carry_out(table.take_place(decided), connection)
            connection.commit()
            carry_out(table.look(decided), connection)
            connection.commit()
        assert settings() == before


@pytest.mark.parametrize("driver", [each for each in ASYNCHRONOUS_DRIVERS if "+" not in each])
async def test_a_check_leaves_the_settings_of_an_asynchronous_connection(servers: Servers, driver: str) -> None:
    async with async_driver(servers, driver) as (connect, _):
        await AsyncBarrier(dialect_of(driver), connect).create()
        table = BarrierTable(dialect_of(driver), TABLE)
        async with opened_by("connect", connect, ASYNC_WITH) as connection:
            before = await carry_out_async(_shown(dialect_of(driver)), connection)
            for decided in (f"{uuid4()}", "#table"):
                for steps in (table.take_place(decided), table.look(decided)):
                    await carry_out_async(steps, connection)
                    if driver != "asyncpg":  # it commits each statement
                        await connection.commit()
            assert await carry_out_async(_shown(dialect_of(driver)), connection) == before


def _shown(dialect: str) -> Steps[Sequence[Any]]:
    return (yield Statement(SHOWN[dialect])).rows


@pytest.mark.parametrize("dialect", ["postgresql", "mysql"])
def test_a_replica_says_commit_or_nothing(servers: Servers, dialect: str) -> None:
    """It has what has reached it, and never decides that what it lacks was rolled back, whoever asks it."""
    committed, unknown = f"{uuid4()}", f"{uuid4()}"
    with _replica(servers, dialect, committed) as connect:
        barrier = Barrier(dialect, connect, table="replicated")
        assert barrier.decide(asked(committed)) == "commit"
        assert barrier.decide(asked(unknown)) == "unknown"
        with pytest.raises(Exception, match="read-only"):
            barrier.learn()
        assert barrier.look(unknown) is None


@contextmanager
def _replica(servers: Servers, dialect: str, committed: str) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """Give what connects to a replica on which this transaction has committed."""

    def fill(connect: Callable[[], AbstractContextManager[Any]]) -> None:
        barrier = Barrier(dialect, connect, table="replicated")
        barrier.create()
        with connect() as connection:
            barrier.insert(connection, committed)

    if dialect == "postgresql":
        fill(servers["postgresql"].psycopg)
        with run_standby(servers["postgresql"]) as standby:
            yield standby.psycopg
        return
    with sync_driver(servers, "pymysql") as (connect, _):
        fill(connect)
        with connect() as administrator:  # the tests' user may write nevertheless
            administrator.cursor().execute("SET GLOBAL read_only = 1")
            try:
                yield connect
            finally:
                administrator.cursor().execute("SET GLOBAL read_only = 0")
