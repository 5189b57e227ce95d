"""Every driver's connection carries the barrier; a check beside an open local transaction neither waits nor fails."""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

import asyncmy
import asyncpg
import psycopg
import psycopg2
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import Engine, NullPool, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from halfway.client import Check
from halfway.client.barrier import (
    AsyncBarrier,
    Barrier,
    LateTransactionError,
    MissingTableError,
    NoTransactionError,
    UncommittedConnectionError,
    UncountedRowsError,
    UnsupportedConnectionError,
)
from halfway.client.messages import may_have_committed
from tests.support.databases.servers import USER, Server
from tests.support.waiting import GENEROUS_S, until_true

pytestmark = [pytest.mark.xdist_group("databases"), pytest.mark.timeout(1800)]

AT_ONCE_S = 30.0
"""It waits for a lock for half a second; by default a server lets it wait longer than this."""

Servers = dict[str, Server]
Begin = Callable[[], Any]


def asked(transaction_id: str) -> Check:
    now = datetime.now(UTC).isoformat()
    return Check(id=transaction_id, group="shop", prepared_at=now, attempt=1, messages=[], is_verified=True)


def url(servers: Servers, driver: str) -> str:
    return servers[driver.partition("+")[0]].url(driver)


@contextmanager
def closing_engine(address: str, **options: Any) -> Iterator[Engine]:
    """Give an engine whose connections are closed even if a test fails: an open one would fail a later test."""
    engine = create_engine(address, **options)
    try:
        yield engine
    finally:
        engine.dispose()


@asynccontextmanager
async def closing_async_engine(address: str) -> AsyncIterator[AsyncEngine]:
    """Do the same for an asynchronous driver. No connection is idle in its pool, so that each use has to open one."""
    engine = create_async_engine(address, poolclass=NullPool)
    try:
        yield engine
    finally:
        await engine.dispose()


def dialect_of(driver: str) -> str:
    return "mysql" if "my" in driver.lower() else "postgresql"


SYNCHRONOUS_DRIVERS = ["psycopg", "psycopg_pool", "psycopg2", "pymysql", "postgresql+psycopg", "mysql+pymysql"]
# mysqlclient has no wheel: a machine with a C compiler and MariaDB's headers can install it.
SYNCHRONOUS_DRIVERS += ["MySQLdb"] if find_spec("MySQLdb") else []
ASYNCHRONOUS_DRIVERS = ["asyncpg", "psycopg", "psycopg_pool", "asyncmy", "asyncmy_pool"]
ASYNCHRONOUS_DRIVERS += ["postgresql+asyncpg", "postgresql+psycopg", "mysql+asyncmy"]


def committing(connect: Callable[[], Any]) -> Begin:
    """Let a connection of PEP 249 commit when its context exits, as docs/python.md asks for."""

    @contextmanager
    def begin() -> Iterator[Any]:
        with closing(connect()) as connection:
            yield connection
            connection.commit()

    return begin


def committing_async(connect: Callable[[], Any]) -> Begin:
    @asynccontextmanager
    async def begin() -> AsyncIterator[Any]:
        async with connect() as connection:
            yield connection
            await connection.commit()

    return begin


@contextmanager
def sync_driver(servers: Servers, driver: str) -> Iterator[tuple[Begin, Begin]]:
    """Give what connects for a check, and what begins a local transaction."""
    folder, socket = str(servers["postgresql"].folder), servers["mysql"].socket
    if driver == "psycopg":
        yield servers["postgresql"].psycopg, servers["postgresql"].psycopg
        return
    if driver == "psycopg_pool":
        with ConnectionPool(f"host={folder} user={USER} dbname=postgres", min_size=1, max_size=2, open=True) as pool:
            yield pool.connection, pool.connection
        return
    if "+" not in driver:
        by_name: dict[str, Callable[[], Any]] = {
            "psycopg2": lambda: psycopg2.connect(host=folder, user=USER, dbname="postgres"),
            "pymysql": servers["mysql"].pymysql,
            "MySQLdb": lambda: import_module("MySQLdb").connect(unix_socket=socket, user=USER, database="test"),
        }
        begin = committing(by_name[driver])
        yield begin, begin
        return
    with closing_engine(url(servers, driver), isolation_level="SERIALIZABLE") as engine:

        @contextmanager
        def session() -> Iterator[Session]:
            with Session(engine) as session, session.begin():
                yield session

        yield engine.begin, session


@asynccontextmanager
async def async_driver(servers: Servers, driver: str) -> AsyncIterator[tuple[Begin, Begin]]:
    """Give what connects for a check, and what begins a local transaction."""
    folder, socket = str(servers["postgresql"].folder), servers["mysql"].socket
    match driver:
        case "asyncpg":
            async with asyncpg.create_pool(host=folder, user=USER, database="postgres", min_size=0) as pool:

                @asynccontextmanager
                async def local() -> AsyncIterator[Any]:
                    async with pool.acquire() as connection, connection.transaction():
                        yield connection

                yield pool.acquire, local
        case "psycopg_pool":
            address = f"host={folder} user={USER} dbname=postgres"
            async with AsyncConnectionPool(address, min_size=1, max_size=2, open=False) as psycopg_pool:
                yield psycopg_pool.connection, psycopg_pool.connection
        case "psycopg":
            opening: Any = partial(psycopg.AsyncConnection.connect, host=folder, user=USER, dbname="postgres")

            @asynccontextmanager
            async def connect() -> AsyncIterator[Any]:
                async with await opening() as one:
                    yield one

            yield opening, connect
        case "asyncmy" | "asyncmy_pool":
            async with AsyncExitStack() as stack:
                acquire: Callable[[], Any] = partial(asyncmy.connect, unix_socket=socket, user=USER, database="test")
                if driver == "asyncmy_pool":
                    my_pool = asyncmy.create_pool(unix_socket=socket, user=USER, database="test", minsize=0)
                    acquire = (await stack.enter_async_context(my_pool)).acquire
                yield committing_async(acquire), committing_async(acquire)
        case _:
            async with closing_async_engine(url(servers, driver)) as engine:

                @asynccontextmanager
                async def session() -> AsyncIterator[AsyncSession]:
                    async with AsyncSession(engine) as session, session.begin():
                        yield session

                yield engine.begin, session


@pytest.mark.parametrize("driver", SYNCHRONOUS_DRIVERS)
def test_a_synchronous_driver(servers: Servers, driver: str) -> None:
    with sync_driver(servers, driver) as (connect, begin):
        barrier = Barrier(dialect_of(driver), connect)
        with pytest.raises(MissingTableError, match="nowhere does not exist"):
            Barrier(dialect_of(driver), connect, table="nowhere").learn()
        barrier.create()
        committed, late, still_open = (f"{uuid4()}" for _ in range(3))
        with begin() as connection:
            barrier.insert(connection, committed)
        assert barrier.decide(asked(committed)) == "commit"
        assert barrier.decide(asked(late)) == "rollback"
        for own in (committed, late):
            with pytest.raises(LateTransactionError), begin() as connection:
                barrier.insert(connection, own)
            assert barrier.has_committed(own) == (own == committed)
        with begin() as connection:
            barrier.insert(connection, still_open)
            began = time.monotonic()
            assert barrier.decide(asked(still_open)) == "unknown"
            assert time.monotonic() - began < AT_ONCE_S
        assert barrier.decide(asked(still_open)) == "commit"
        assert barrier.clean(10) == 0


@pytest.mark.parametrize("driver", ASYNCHRONOUS_DRIVERS)
async def test_an_asynchronous_driver(servers: Servers, driver: str) -> None:
    async with async_driver(servers, driver) as (connect, begin):
        barrier = AsyncBarrier(dialect_of(driver), connect)
        with pytest.raises(MissingTableError, match="nowhere does not exist"):
            await AsyncBarrier(dialect_of(driver), connect, table="nowhere").learn()
        await barrier.create()
        await barrier.learn()
        committed, late, still_open = (f"{uuid4()}" for _ in range(3))
        async with begin() as connection:
            await barrier.insert(connection, committed)
        assert await barrier.decide(asked(committed)) == "commit"
        assert await barrier.decide(asked(late)) == "rollback"
        for own in (committed, late):
            with pytest.raises(LateTransactionError):
                async with begin() as connection:
                    await barrier.insert(connection, own)
            assert await barrier.has_committed(own) == (own == committed)
        async with begin() as connection:
            await barrier.insert(connection, still_open)
            began = time.monotonic()
            assert await barrier.decide(asked(still_open)) == "unknown"
            assert time.monotonic() - began < AT_ONCE_S
        assert await barrier.decide(asked(still_open)) == "commit"
        assert await barrier.clean(10) == 0


async def test_a_connection_of_the_other_kind_is_refused(servers: Servers) -> None:
    """An asynchronous session for a Barrier, and a synchronous one for an AsyncBarrier."""
    async with closing_async_engine(url(servers, "postgresql+asyncpg")) as engine, AsyncSession(engine) as session:
        with pytest.raises(UnsupportedConnectionError, match="AsyncSession is asynchronous"):
            Barrier("postgresql", servers["postgresql"].psycopg).insert(session, "a")
        with (
            closing_engine(url(servers, "postgresql+psycopg")) as other,
            Session(other) as synchronous,
            pytest.raises(UnsupportedConnectionError, match="Session is synchronous"),
        ):
            await AsyncBarrier("postgresql", engine.begin).insert(synchronous, "a")


@pytest.mark.parametrize(
    "driver, age, elect",
    [
        (
            "postgresql+psycopg",
            "UPDATE aged SET decided_at = decided_at - interval '8 days'",
            "SELECT pg_advisory_xact_lock(hashtext('aged'))",
        ),
        (
            "mysql+pymysql",
            "UPDATE aged SET decided_at = decided_at - INTERVAL 8 DAY",
            "SELECT GET_LOCK(SHA1(CONCAT(DATABASE(), '.aged')), 0)",
        ),
    ],
)
def test_one_instance_cleans_what_is_old_in_batches(servers: Servers, driver: str, age: str, elect: str) -> None:
    with sync_driver(servers, driver) as (connect, begin):
        barrier = Barrier(driver.partition("+")[0], connect, table="aged")
        barrier.create()
        with begin() as session:
            for number in range(5):
                barrier.insert(session, f"old-{number}")
        with connect() as connection:
            connection.exec_driver_sql(age)
        with begin() as session:
            barrier.insert(session, "young")
        other: Any = servers["mysql"].pymysql() if "my" in driver else servers["postgresql"].psycopg()
        with other:
            other.cursor().execute(elect)
            assert barrier.clean(3) == 0
        deadline = time.monotonic() + GENEROUS_S
        while (deleted := barrier.clean(3)) == 0 and time.monotonic() < deadline:
            time.sleep(0.05)  # until the server has seen that the other one has gone
        assert [deleted, barrier.clean(3), barrier.clean(3)] == [3, 2, 0]
        assert barrier.look("young") == "commit"


async def test_a_row_that_would_commit_by_itself_is_refused(servers: Servers) -> None:
    def barrier(dialect: str) -> Barrier:
        return Barrier(dialect, servers["postgresql"].psycopg)

    with servers["postgresql"].psycopg() as connection:
        connection.autocommit = True
        with pytest.raises(NoTransactionError):
            barrier("postgresql").insert(connection, "a")
    with servers["mysql"].pymysql() as my_connection:
        my_connection.autocommit(True)
        with pytest.raises(NoTransactionError):
            barrier("mysql").insert(my_connection, "a")
    async with async_driver(servers, "asyncpg") as (connect, _), connect() as asyncpg_connection:
        with pytest.raises(NoTransactionError):
            await AsyncBarrier("postgresql", connect).insert(asyncpg_connection, "a")
    for driver in ("postgresql+psycopg", "mysql+pymysql"):
        with (
            closing_engine(url(servers, driver), isolation_level="AUTOCOMMIT") as engine,
            engine.begin() as alchemy,
            pytest.raises(NoTransactionError),
        ):
            barrier(driver.partition("+")[0]).insert(alchemy, "a")


async def test_a_row_that_nobody_has_counted_is_refused(servers: Servers) -> None:
    """In a pipeline of psycopg a conflict would be told when it is too late."""
    late = f"{uuid4()}"
    barrier = Barrier("postgresql", servers["postgresql"].psycopg)
    barrier.create()
    assert barrier.decide(asked(late)) == "rollback"
    refused = pytest.raises(UncountedRowsError, match=r"outside `connection\.pipeline")
    with servers["postgresql"].psycopg() as connection, refused, connection.pipeline():
        barrier.insert(connection, late)
    async with async_driver(servers, "psycopg") as (connect, begin), begin() as connection:
        with pytest.raises(UncountedRowsError):
            async with connection.pipeline():
                await AsyncBarrier("postgresql", connect).insert(connection, late)


async def test_what_connects_must_commit(servers: Servers) -> None:
    """Natural mistakes: SQLAlchemy's `connect` in place of `begin`, and PyMySQL's own connections."""

    @contextmanager
    def transaction() -> Iterator[Any]:
        with servers["mysql"].pymysql() as connection:
            yield connection
            connection.commit()

    with closing_engine(url(servers, "postgresql+psycopg")) as engine:
        for right, wrong in (
            (Barrier("postgresql", engine.begin), Barrier("postgresql", engine.connect)),
            (Barrier("mysql", transaction), Barrier("mysql", servers["mysql"].pymysql)),
        ):
            right.create()
            right.learn()
            with pytest.raises(UncommittedConnectionError):
                wrong.learn()
            late = f"{uuid4()}"
            assert wrong.decide(asked(late)) == "unknown"
            # MariaDB rolls back when it sees that a connection has gone: until then its lock stands in the way.
            await until_true(lambda: right.decide(asked(late)) == "rollback", what="decided by the one that commits")  # noqa: B023 - called at once
            assert wrong.decide(asked(late)) == "rollback"


def test_a_connection_that_stays_open_without_a_commit_is_named(servers: Servers) -> None:
    """It still locks the row that it wrote: MariaDB then refuses to read it."""
    for dialect in ("postgresql", "mysql"):
        connect: Begin = getattr(servers[dialect], "psycopg" if dialect == "postgresql" else "pymysql")
        with ExitStack() as still_open:

            @contextmanager
            def kept(connect: Begin = connect, still_open: ExitStack = still_open) -> Iterator[Any]:
                yield still_open.enter_context(connect())

            with connect() as connection:
                Barrier(dialect, lambda: nullcontext(connection)).create()
                connection.commit()
            with pytest.raises(UncommittedConnectionError):
                Barrier(dialect, kept).learn()


async def test_a_connection_that_is_lost_at_the_commit_leaves_it_open(servers: Servers) -> None:
    """What each driver really raises when its connection is killed before the commit."""
    killed: list[BaseException] = []
    with servers["postgresql"].psycopg() as victim:
        victim.execute("SELECT 1")
        kill_postgresql(servers, victim.info.backend_pid)
        killed.append(raised(victim.commit))
    async with async_driver(servers, "asyncpg") as (connect, _):
        connection = await connect()
        transaction = connection.transaction()
        await transaction.start()
        kill_postgresql(servers, connection.get_server_pid())
        with pytest.raises(Exception, match=r".") as told:
            await transaction.commit()
        killed.append(told.value)
    my_victim = servers["mysql"].pymysql()
    kill_mariadb(servers, int(my_victim.thread_id()))  # type: ignore[no-untyped-call]  # its stubs are not whole
    killed.append(raised(my_victim.commit))
    assert not my_victim.open
    for driver in ("postgresql+psycopg", "mysql+pymysql"):
        with closing_engine(url(servers, driver)) as engine, Session(engine) as session:
            raw: Any = session.connection().connection.driver_connection
            session.connection().exec_driver_sql("SELECT 1")
            if driver == "mysql+pymysql":
                kill_mariadb(servers, raw.thread_id())
            else:
                kill_postgresql(servers, raw.info.backend_pid)
            killed.append(raised(session.commit))
    assert [type(error).__name__ for error in killed if not may_have_committed(error)] == []


def test_an_answer_of_the_database_shows_that_it_rolled_back(servers: Servers) -> None:
    """A lock that was not given is a certain rollback, although drivers call it an operational error as well."""
    with servers["postgresql"].psycopg() as holder, servers["postgresql"].psycopg("-c lock_timeout=50") as other:
        holder.execute("LOCK TABLE pg_class IN ACCESS EXCLUSIVE MODE")
        refused = raised(lambda: other.execute("LOCK TABLE pg_class IN ACCESS EXCLUSIVE MODE"))
        other.rollback()
        holder.rollback()
    assert isinstance(refused, psycopg.OperationalError)
    assert not may_have_committed(refused)


def raised(call: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception, match=r".") as told:
        call()
    return told.value


def decided(barrier: Barrier, transaction_id: str) -> str:
    """Return what a check is told once it is not `unknown`: a connection that was killed holds its lock for a while."""
    deadline = time.monotonic() + GENEROUS_S
    while (verdict := barrier.decide(asked(transaction_id))) == "unknown" and time.monotonic() < deadline:
        time.sleep(0.05)
    return verdict


def kill_postgresql(servers: Servers, process: int) -> None:
    with servers["postgresql"].psycopg() as connection:
        connection.execute("SELECT pg_terminate_backend(%s, 60000)", (process,))


def kill_mariadb(servers: Servers, thread: int) -> None:
    with servers["mysql"].pymysql() as connection, connection.cursor() as cursor:
        cursor.execute(f"KILL CONNECTION {int(thread)}")
