"""The barrier on a real SQLite: the local transaction or the check decides, whichever comes first; its maintenance."""

import asyncio
import re
import sqlite3
from asyncio import sleep
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from halfway.client import Halfway, Message, SyncHalfway, UnavailableError
from halfway.client.barrier import (
    AsyncBarrier,
    Barrier,
    BarrierMaintenance,
    ConflictError,
    InvalidRetentionError,
    LateTransactionError,
    MissingTableError,
    NoStoreError,
    OtherDatabaseError,
    UncommittedConnectionError,
    UnsupportedConnectionError,
    sqlite_transactions,
)
from halfway.client.barrier.table import STATEMENTS, BarrierTable, Dialect
from halfway.client.checks.answers import Check
from halfway.client.consumer.inbox import Inbox, InboxTable
from halfway.client.messages import may_have_committed
from halfway.client.sqlalchemy import AsyncSessionProducer, SessionProducer
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.support.waiting import GENEROUS_S


class Shop:
    """A service's database; `begin` is a transaction that commits when its block ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.barrier = Barrier("sqlite", self.begin)
        with self.begin() as connection:
            connection.execute("PRAGMA journal_mode = WAL")
        self.barrier.create()

    @contextmanager
    def begin(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path)) as connection, connection:
            yield connection

    def count(self) -> int:
        with self.begin() as connection:
            return int(
                connection.execute("SELECT count(*) FROM halfway_barrier WHERE transaction_id <> '#table'").fetchone()[
                    0
                ]
            )


def check_of(transaction_id: str, *, age: timedelta = timedelta(0)) -> Check:
    prepared_at = (datetime.now(UTC) - age).isoformat()
    return Check(id=transaction_id, group="shop", prepared_at=prepared_at, attempt=1, messages=[], is_verified=True)


def test_what_may_have_been_cleaned_is_not_answered(shop: Shop) -> None:
    old = check_of("a", age=timedelta(days=4))
    assert shop.barrier.decide(old) == "unknown"
    with shop.begin() as connection:
        shop.barrier.insert(connection, "a")
    assert shop.barrier.decide(old) == "commit"


def test_a_retention_below_what_halfway_may_ask_for_is_refused(shop: Shop) -> None:
    shop.barrier.check_policy({"max_age_s": 43_200})
    with pytest.raises(InvalidRetentionError, match="retention_s of 1200000 or more"):
        shop.barrier.check_policy({"max_age_s": 600_000})


def test_a_rollback_that_does_not_stay_is_not_answered(shop: Shop, tmp_path: Path) -> None:
    """The connection factory does not commit, like `engine.connect`: the late local transaction would still commit."""

    def connect() -> closing[sqlite3.Connection]:
        return closing(sqlite3.connect(tmp_path / "shop.sqlite"))

    barrier = Barrier("sqlite", connect)
    assert (barrier.decide(check_of("a")), barrier.settle("b")) == ("unknown", "unknown")
    with pytest.raises(UncommittedConnectionError, match=r"`engine\.begin` of SQLAlchemy"):
        barrier.learn()
    shop.barrier.learn()
    assert shop.count() == 0


def test_a_service_s_own_database_that_can_be_called_opens_connections(shop: Shop) -> None:
    class Database:
        cursor = None

        def __call__(self) -> Any:
            return shop.begin()

    Barrier("sqlite", Database()).learn()


def test_bad_use_names_the_remedy(shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lower-case name"):
        Barrier("sqlite", shop.begin, table="x; DROP TABLE orders")
    with pytest.raises(ValueError, match="oracle"):
        Barrier("oracle", shop.begin)
    with (
        closing(sqlite3.connect(":memory:")) as callable_connection,
        pytest.raises(UnsupportedConnectionError, match=r"connect is Connection: give a function .*`engine\.begin`"),
    ):
        Barrier("sqlite", cast("Any", callable_connection))
    for of_sqlite in (shop.begin, create_engine(f"sqlite:///{tmp_path}/shop.sqlite", poolclass=NullPool).begin):
        for begin in (Barrier("postgresql", of_sqlite).create, Inbox("postgresql", of_sqlite).create):
            with pytest.raises(UnsupportedConnectionError, match="but connect opens sqlite: give 'sqlite'"):
                begin()
    with pytest.raises(UnsupportedConnectionError, match="connect returned coroutine: give a function that"):
        Barrier("sqlite", cast("Any", partial(sleep, 0))).create()
    for figures in (shop.barrier.stored, shop.barrier.parked, partial(shop.barrier.resolve, "a", delivered=True)):
        with pytest.raises(NoStoreError, match=r"store=Store\(\)"):
            figures()
    with pytest.raises(MissingTableError, match=r"inbox\.create\(\)"):
        Inbox("sqlite", shop.begin).demand_commits()
    with pytest.raises(UnsupportedConnectionError, match="sqlite3, psycopg"):
        shop.barrier.insert(tmp_path, "a")
    with pytest.raises(ValueError, match="id of the prepared transaction"), shop.begin() as connection:
        shop.barrier.insert(connection, "a" * 129)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """A local transaction that has read but not written, in a database without a write-ahead log."""
    path = tmp_path / "plain.sqlite"
    Barrier("sqlite", sqlite_transactions(path)).create()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM halfway_barrier").fetchall()
        yield connection


def test_a_check_beside_one_that_reads_waits_for_no_time_of_the_services_own(
    reader: sqlite3.Connection, tmp_path: Path
) -> None:
    """Its commit would wait for the reader as long as the service's connections do: here for an hour."""
    barrier = Barrier("sqlite", sqlite_transactions(tmp_path / "plain.sqlite", busy_s=3600))
    assert barrier.decide(check_of("a")) == "unknown"
    barrier.insert(reader, "a")
    reader.execute("COMMIT")
    assert barrier.decide(check_of("a")) == "commit"


@pytest.mark.parametrize("own", ["", "BEGIN", "BEGIN IMMEDIATE"])
def test_a_check_begins_its_transaction_whatever_its_connection_has_begun(tmp_path: Path, own: str) -> None:
    @contextmanager
    def begin() -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(tmp_path / "shop.sqlite", isolation_level=None)) as connection, connection:
            if own:
                connection.execute(own)
            yield connection
            assert connection.execute("PRAGMA busy_timeout").fetchone() == (5000,)

    barrier = Barrier("sqlite", begin)
    barrier.create()
    assert (barrier.decide(check_of("a")), barrier.look("a")) == ("rollback", "rollback")


def test_a_late_one_that_has_read_before_is_told_to_run_again(shop: Shop, tmp_path: Path) -> None:
    """It cannot see the check's row in its snapshot; a repeat can."""
    with closing(sqlite3.connect(tmp_path / "shop.sqlite", isolation_level=None)) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM halfway_barrier").fetchall()
        assert shop.barrier.decide(check_of("a")) == "rollback"
        with pytest.raises(ConflictError, match="run it again") as told:
            shop.barrier.insert(connection, "a")
        assert not may_have_committed(told.value)
        connection.execute("ROLLBACK")
    with shop.begin() as connection, pytest.raises(LateTransactionError):
        shop.barrier.insert(connection, "a")


@pytest.mark.parametrize("table", [BarrierTable, InboxTable])
def test_an_unknown_dialect_is_told_with_those_that_are_known(table: Callable[[str, str], object]) -> None:
    with pytest.raises(ValueError, match=r"dialect 'postgres': give 'postgresql', 'mysql' .* or 'sqlite'"):
        table("postgres", "shop")


SERVICES = Path(__file__).parents[3] / "examples" / "services"


@pytest.mark.parametrize("service", ["typescript/service.ts", "java/Service.java", "go/main.go"])
def test_a_service_to_copy_runs_the_statements_of_the_barrier(service: str) -> None:
    """Word by word, those of the file that the Python client reads."""
    text = _in_one_line((SERVICES / service).read_text(encoding="utf-8"))
    statements = STATEMENTS[Dialect.POSTGRESQL]
    assert statements.take_place is not None
    some = (statements.insert, statements.take_place, statements.look, statements.clean)
    for statement in (*statements.create, *some):
        written = statement.format(table="halfway_barrier", key="transaction_id", time="decided_at", p="?")
        assert _in_one_line(written) in text


def _in_one_line(text: str) -> str:
    return re.sub(r"\( ", "(", re.sub(r"\$[12]", "?", " ".join(text.split())))


async def test_a_session_of_another_database_is_refused(world: RestWorld, tmp_path: Path) -> None:
    """A session of the barrier's database is accepted, on any engine."""
    looked_into, other = (create_engine(f"sqlite:///{tmp_path / name}") for name in ("shop.sqlite", "other.sqlite"))
    for engine in (looked_into, other):
        Barrier("sqlite", engine.begin).create()
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE orders (id text)"))
    barrier = Barrier("sqlite", sqlite_transactions(tmp_path / "shop.sqlite"))

    def send(client: SyncHalfway, engine: Engine) -> None:
        with Session(engine) as session, session.begin():
            session.execute(text("INSERT INTO orders VALUES ('1')"))
            SessionProducer(client).send(session, "orders", "1", "v")

    def work() -> None:
        with SyncHalfway(world.url, "shop", barrier=barrier) as client:
            client.register(topics=["orders"])
            for _ in range(2):
                with pytest.raises(OtherDatabaseError, match="barrier of this database"):
                    send(client, other)
            send(client, looked_into)

    await asyncio.to_thread(work)
    with other.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM orders")).scalar_one() == 0
    assert len(world.memory.records("orders")) == 1
    looked_into.dispose()
    other.dispose()


async def test_an_asynchronous_one_is_refused_as_well(world: RestWorld, tmp_path: Path) -> None:
    looked_into, other = (
        create_async_engine(f"sqlite+aiosqlite:///{tmp_path / name}", poolclass=NullPool) for name in ("a", "b")
    )
    barrier = AsyncBarrier("sqlite", looked_into.begin)
    await barrier.create()
    await AsyncBarrier("sqlite", other.begin).create()
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        await client.register(topics=["orders"])
        producer = AsyncSessionProducer(client)
        with pytest.raises(OtherDatabaseError):
            async with other.begin() as connection:
                await producer.send(connection, "orders", "1", "v")
        async with looked_into.begin() as connection:
            await producer.send(connection, "orders", "1", "v")
    assert len(world.memory.records("orders")) == 1
    await looked_into.dispose()
    await other.dispose()


async def test_a_table_made_before_tables_had_a_mark_is_taken(world: RestWorld, tmp_path: Path) -> None:
    begin = sqlite_transactions(tmp_path / "shop.sqlite")
    barrier = Barrier("sqlite", begin)
    barrier.create()
    with begin() as connection:
        connection.execute("DELETE FROM halfway_barrier")
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        await client.register(topics=["orders"])
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.sqlite'}")
    with engine.begin() as connection:
        barrier.insert(connection, "a")
    assert barrier.look("a") == "commit"
    engine.dispose()


async def test_a_service_may_start_before_its_database(world: RestWorld, tmp_path: Path) -> None:
    """If the mark of the table is not known, it is not compared."""
    path = tmp_path / "not mounted yet" / "shop.sqlite"
    barrier = Barrier("sqlite", sqlite_transactions(path))
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        await client.register(topics=["orders"])
    path.parent.mkdir()
    barrier.create()
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        barrier.insert(connection, "a")
    assert barrier.look("a") == "commit"
    engine.dispose()


ORDER = Message(topic="orders", key="42", value="paid")
ORDER_ID = named_id("order-42")
OPEN_ID = named_id("open")


@pytest.fixture
def barrier(tmp_path: Path) -> Barrier:
    barrier = Barrier("sqlite", sqlite_transactions(tmp_path / "shop.sqlite", busy_s=GENEROUS_S))
    barrier.create()
    return barrier


def decide_here(barrier: Barrier, *ids: str) -> None:
    with barrier._connect() as connection:
        for one in ids:
            barrier.insert(connection, one)


async def test_what_was_decided_and_never_ended_is_ended(world: RestWorld, barrier: Barrier) -> None:
    ids = [named_id(f"order-{number}") for number in range(120)]
    async with Halfway(world.url, "shop") as client:
        await asyncio.gather(*(client.prepare([ORDER], id=one) for one in [*ids, OPEN_ID]))
        decide_here(barrier, *ids)
        assert await BarrierMaintenance(client, barrier, older_than_s=1e9).reconcile() == 0  # too young
        maintenance = BarrierMaintenance(client, barrier, older_than_s=0)
        assert await maintenance.reconcile() == 120
        assert await maintenance.reconcile() == 0
        assert (await client.show(OPEN_ID))["state"] == "prepared"
    assert len(world.memory.records("orders")) == 120


async def test_a_retention_that_is_too_short_is_refused_at_the_start(world: RestWorld, barrier: Barrier) -> None:
    barrier.retention_s = 3600
    async with Halfway(world.url, "shop") as client:
        with pytest.raises(InvalidRetentionError, match="retention_s of 86400 or more"):
            await BarrierMaintenance(client, barrier).run()


async def test_it_goes_on_beside_a_client_for_threads(world: RestWorld, barrier: Barrier) -> None:
    def work() -> None:
        with SyncHalfway(world.url, "shop") as client:
            client.run_in_background(
                lambda inner: BarrierMaintenance(inner, barrier, every_s=0.01, older_than_s=0).run()
            )
            client.prepare([ORDER], id=ORDER_ID)
            decide_here(barrier, ORDER_ID)
            while client.show(ORDER_ID)["state"] != "committed":
                pass

    async with asyncio.timeout(GENEROUS_S):
        await asyncio.to_thread(work)
    assert len(world.memory.records("orders")) == 1


async def test_a_coordinator_that_is_away_is_one_line(
    world: RestWorld, barrier: Barrier, caplog: pytest.LogCaptureFixture
) -> None:
    """It passes, and the work is done again: neither an error nor a traceback."""
    async with Halfway(world.url, "shop") as client:
        maintenance = BarrierMaintenance(client, barrier)

        async def away() -> int:
            raise UnavailableError("503 shard_unavailable: moving")

        await maintenance._log_failure_of(away, "the barrier was not reconciled")
    [record] = caplog.records
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert record.message == "the barrier was not reconciled, trying again: 503 shard_unavailable: moving"
