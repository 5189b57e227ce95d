"""A commit with messages returns once the outcome is final, and never fails after the database's commit."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from django.db import transaction
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from halfway.client import Halfway, Message, SyncHalfway
from halfway.client.barrier import AsyncBarrier, Barrier
from halfway.client.django import AtomicProducer, django_barrier
from halfway.client.sqlalchemy import AsyncSessionProducer, SessionProducer
from tests.support.client.serving import serving
from tests.support.client.shop import final_state, transactional
from tests.support.rest.client import RestWorld
from tests.support.waiting import until_true
from tests.unit.client.django_project import insert, project


class Stalling:
    """Stands before a coordinator, and passes each request on when the test allows it, or cuts its connection."""

    def __init__(self, world: RestWorld) -> None:
        self._world = world
        self.arrived: asyncio.Queue[str] = asyncio.Queue()
        self.goes_on = asyncio.Semaphore(0)
        self.dies_before = ""
        """The kind of call, `prepare` or `end`, whose connections are cut from then on."""
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        kind = next(iter(body))
        if kind == self.dies_before:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        self.arrived.put_nowait(kind)
        await self.goes_on.acquire()
        answer = await self._world.call("POST", "/v1/batch", body)
        return web.json_response(answer.body, status=answer.status, headers={"Date": answer.headers["Date"]})


LONG_S = 60.0
SHORT_S = 0.2


Send = Callable[[], str]
"""Commits an order with its message, and returns the id of the transaction."""


@contextmanager
def sqlalchemy_sender(
    url: str, path: Path, kind: str, *, confirm: bool, end_s: float
) -> Iterator[tuple[SyncHalfway, Send]]:
    engine = create_engine(f"sqlite:///{path}")
    transactional(engine)
    barrier = Barrier("sqlite", engine.begin)
    barrier.create()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id text)"))
    with SyncHalfway(url, "shop", barrier=barrier, prepare_timeout_s=LONG_S, end_timeout_s=end_s) as client:
        producer = SessionProducer(client, confirm=confirm)

        def local(session: Any) -> str:
            session.execute(text("INSERT INTO orders VALUES ('42')"))
            return producer.send(session, "orders", "42", "v")

        def send() -> str:
            if kind == "session":
                with Session(engine) as session, session.begin():
                    return local(session)
            if kind == "scoped session":
                sessions = scoped_session(sessionmaker(engine))
                transaction_id = local(sessions)
                sessions.commit()
                sessions.remove()
                return transaction_id
            if kind == "session with a savepoint":
                with Session(engine) as session:
                    session.begin_nested()
                    transaction_id = local(session)
                    session.commit()
                    return transaction_id
            if kind == "session in a connection's transaction":
                with engine.begin() as connection, Session(connection) as session:
                    transaction_id = local(session)
                    session.commit()
                    return transaction_id
            with engine.begin() as connection:
                return local(connection)

        yield client, send
    engine.dispose()


@contextmanager
def django(url: str, path: Path, kind: str, *, confirm: bool, end_s: float) -> Iterator[tuple[SyncHalfway, Send]]:
    def send() -> str:
        with transaction.atomic():
            insert("42")
            return producer.send("orders", "42", "v")

    with project(ENGINE="django.db.backends.sqlite3", NAME=str(path)):
        barrier = django_barrier()
        with SyncHalfway(url, "shop", barrier=barrier, prepare_timeout_s=LONG_S, end_timeout_s=end_s) as client:
            producer = AtomicProducer(client, confirm=confirm)
            yield client, send


KINDS = [
    (sqlalchemy_sender, "session"),
    (sqlalchemy_sender, "scoped session"),
    (sqlalchemy_sender, "session with a savepoint"),
    (sqlalchemy_sender, "session in a connection's transaction"),
    (sqlalchemy_sender, "connection"),
    (django, "atomic"),
]


@pytest.fixture
async def stalling(world: RestWorld) -> AsyncIterator[Stalling]:
    """Run one in front of the coordinator of `world`."""
    stalling = Stalling(world)
    async with serving(stalling.answer, "/v1/batch") as stalling.url:
        try:
            yield stalling
        finally:
            for _ in range(100):  # release waiting requests: the server stops after it has answered
                stalling.goes_on.release()


def orders(path: Path) -> int:
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        found = int(connection.execute(text("SELECT count(*) FROM orders")).scalar_one())
    engine.dispose()
    return found


@pytest.mark.parametrize("service, kind", KINDS)
async def test_a_commit_returns_once_the_outcome_is_final(
    world: RestWorld, tmp_path: Path, service: Any, kind: str
) -> None:
    def work() -> str:
        with service(world.url, tmp_path / "shop.sqlite", kind, confirm=True, end_s=LONG_S) as (client, send):
            return str(client.show(send())["state"])

    assert await asyncio.to_thread(work) == "committed"


@pytest.mark.parametrize("service, kind", KINDS)
async def test_without_confirm_the_end_is_sent_in_the_background(
    world: RestWorld, stalling: Stalling, tmp_path: Path, service: Any, kind: str
) -> None:
    """The commit returns before the coordinator has handled the end."""

    def work() -> None:
        with service(stalling.url, tmp_path / "shop.sqlite", kind, confirm=False, end_s=LONG_S) as (_, send):
            loop.call_soon_threadsafe(sent.set_result, send())

    loop = asyncio.get_running_loop()
    sent: asyncio.Future[str] = loop.create_future()
    stalling.goes_on.release()  # the prepare
    working = asyncio.create_task(asyncio.to_thread(work))
    transaction_id = await sent
    assert (await world.show(transaction_id)).body["state"] == "prepared"
    stalling.goes_on.release()
    await working
    assert await final_state(world, transaction_id) == "committed"


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("service, kind", KINDS)
async def test_a_coordinator_that_stalls_or_dies_holds_a_commit_up_for_a_bounded_time(
    world: RestWorld,
    stalling: Stalling,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    service: Any,
    kind: str,
    dies: bool,
) -> None:
    """The commit succeeds and raises nothing; the end is left to check-back, which the barrier answers."""
    path = tmp_path / "shop.sqlite"

    def work() -> tuple[str, str]:
        with service(stalling.url, path, kind, confirm=True, end_s=SHORT_S) as (client, send):
            transaction_id = send()
            return transaction_id, client.barrier.look(transaction_id)

    stalling.dies_before = "end" if dies else ""
    stalling.goes_on.release()  # the prepare
    transaction_id, decided = await asyncio.to_thread(work)
    assert decided == "commit"
    assert orders(path) == 1
    assert (await world.show(transaction_id)).body["state"] == "prepared"
    assert f"the commit of transaction {transaction_id} is left to check-back" in caplog.text


@pytest.mark.parametrize(
    "service, kind", [(sqlalchemy_sender, "session"), (sqlalchemy_sender, "connection"), (django, "atomic")]
)
async def test_the_opposite_outcome_is_logged_and_the_commit_stands(
    world: RestWorld, stalling: Stalling, tmp_path: Path, caplog: pytest.LogCaptureFixture, service: Any, kind: str
) -> None:
    """For example because an operator rolled back manually in between."""
    path = tmp_path / "shop.sqlite"

    def work() -> str:
        with service(stalling.url, path, kind, confirm=True, end_s=LONG_S) as (_, send):
            return str(send())

    stalling.goes_on.release()  # the prepare
    working = asyncio.create_task(asyncio.to_thread(work))
    assert [await stalling.arrived.get(), await stalling.arrived.get()] == ["prepare", "end"]
    (transaction_id,) = [
        one["id"] for one in (await world.call("GET", "/v1/transactions?state=prepared")).body["transactions"]
    ]
    await world.end(transaction_id, "rollback")
    stalling.goes_on.release()
    assert await working == transaction_id
    assert orders(path) == 1
    told = [
        record for record in caplog.records if record.levelno == logging.ERROR and transaction_id in record.getMessage()
    ]
    assert len(told) == 1


async def test_a_session_whose_commit_is_cancelled_while_it_is_confirmed_has_committed(
    world: RestWorld, stalling: Stalling, tmp_path: Path
) -> None:
    """The end is still sent, and the session and its connection can be used again."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.sqlite'}")
    transactional(engine.sync_engine)
    barrier = AsyncBarrier("sqlite", engine.begin)
    await barrier.create()
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE orders (id text)"))
    async with Halfway(stalling.url, "shop", barrier=barrier, prepare_timeout_s=LONG_S) as client:
        producer = AsyncSessionProducer(client)

        async def place(session: AsyncSession) -> str:
            transaction_id = await producer.send(session, "orders", "42", "v")
            await session.execute(text("INSERT INTO orders VALUES ('42')"))
            ids.append(transaction_id)
            await session.commit()
            return str((await world.show(transaction_id)).body["state"])

        ids: list[str] = []
        async with AsyncSession(engine) as session:
            placing = asyncio.create_task(place(session))
            stalling.goes_on.release()
            assert [await stalling.arrived.get(), await stalling.arrived.get()] == ["prepare", "end"]
            placing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await placing
            for _ in range(10):  # the sent end, the end in the background, and the next prepare and end
                stalling.goes_on.release()
            assert await final_state(world, ids[0]) == "committed"
            assert await place(session) == "committed"
            assert (await session.execute(text("SELECT count(*) FROM orders"))).scalar_one() == 2
    await engine.dispose()


RAISED: dict[str, Callable[[Any, type[Session], Callable[..., None]], None]] = {
    "as the connection is given back": lambda engine, _, listener: event.listen(engine, "checkin", listener),
    "in after_commit": lambda _, sessions, listener: event.listen(sessions, "after_commit", listener),
    "in after_transaction_end": lambda _, sessions, listener: event.listen(sessions, "after_transaction_end", listener),
}


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", RAISED)
async def test_whatever_is_raised_after_the_databases_commit_the_end_is_sent(
    world: RestWorld, tmp_path: Path, where: str, kind: type[BaseException]
) -> None:
    """By a listener of the service, or by Ctrl-C; the session is then dropped."""

    class Sessions(Session):
        pass

    def interrupt(*_: object) -> None:
        if interrupts:
            raise interrupts.pop()

    def work() -> str:
        with sqlalchemy_sender(world.url, tmp_path / "shop.sqlite", "", confirm=True, end_s=LONG_S) as (client, _):
            engine = create_engine(f"sqlite:///{tmp_path / 'shop.sqlite'}")
            transactional(engine)
            RAISED[where](engine, Sessions, interrupt)
            session = Sessions(engine)
            transaction_id = SessionProducer(client).send(session, "orders", "42", "v")
            interrupts.append(kind("by somebody else"))
            with pytest.raises(kind, match="by somebody else"):
                session.commit()
            engine.dispose()
            return transaction_id

    interrupts: list[BaseException] = []
    assert await final_state(world, await asyncio.to_thread(work)) == "committed"


async def test_a_listener_before_the_commit_may_be_the_first_to_send(world: RestWorld, tmp_path: Path) -> None:
    def work() -> str:
        with sqlalchemy_sender(world.url, tmp_path / "shop.sqlite", "", confirm=True, end_s=LONG_S) as (client, _):
            engine = create_engine(f"sqlite:///{tmp_path / 'shop.sqlite'}")
            transactional(engine)
            producer, ids = SessionProducer(client), []
            with Session(engine) as session:
                event.listen(session, "before_commit", lambda it: ids.append(producer.send(it, "orders", "42", "v")))
                session.execute(text("INSERT INTO orders VALUES ('42')"))
                session.commit()
            engine.dispose()
            return str(client.show(ids[0])["state"])

    assert await asyncio.to_thread(work) == "committed"


ORDER = Message(topic="orders", key="42", value="paid")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.sqlite'}", pool_size=1, max_overflow=0, pool_timeout=60)
    Barrier("sqlite", engine.begin).create()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id text)"))
    yield engine
    engine.dispose()


@pytest.fixture
async def pool(engine: Engine) -> AsyncIterator[AsyncEngine]:
    """Provide the same database to an asynchronous service, also with one connection."""
    url = engine.url.set(drivername="sqlite+aiosqlite")
    pool = create_async_engine(url, pool_size=1, max_overflow=0, pool_timeout=60)
    yield pool
    await pool.dispose()


def connections_in_use(engine: Engine) -> int:
    return int(engine.pool.checkedout())  # type: ignore[attr-defined]  # a pool of this kind has it


async def test_around_a_transaction_none_is_held(world: RestWorld, stalling: Stalling, engine: Engine) -> None:
    barrier = Barrier("sqlite", engine.begin)

    def place() -> None:
        with (
            SyncHalfway(stalling.url, "shop", barrier=barrier, prepare_timeout_s=60) as client,
            client.transaction([ORDER]) as transaction,
            engine.begin() as connection,
        ):
            connection.execute(text("INSERT INTO orders VALUES ('42')"))
            barrier.insert(connection, transaction.id)

    def orders_seen_by_others() -> int:
        with engine.begin() as connection:
            return int(connection.execute(text("SELECT count(*) FROM orders")).scalar_one())

    placing = asyncio.create_task(asyncio.to_thread(place))
    for step, orders in (("prepare", 0), ("end", 1)):
        assert await stalling.arrived.get() == step
        assert connections_in_use(engine) == 0
        assert await asyncio.to_thread(orders_seen_by_others) == orders
        stalling.goes_on.release()
    await placing
    assert len(world.memory.records("orders")) == 1


async def test_around_an_asynchronous_transaction_none_is_held(
    world: RestWorld, stalling: Stalling, pool: AsyncEngine
) -> None:
    barrier = AsyncBarrier("sqlite", pool.begin)

    async def place() -> None:
        async with (
            Halfway(stalling.url, "shop", barrier=barrier, prepare_timeout_s=60) as client,
            client.transaction([ORDER]) as transaction,
            pool.begin() as connection,
        ):
            await connection.execute(text("INSERT INTO orders VALUES ('42')"))
            await barrier.insert(connection, transaction.id)

    placing = asyncio.create_task(place())
    for step, orders in (("prepare", 0), ("end", 1)):
        assert await stalling.arrived.get() == step
        assert connections_in_use(pool.sync_engine) == 0
        async with pool.begin() as connection:
            assert (await connection.execute(text("SELECT count(*) FROM orders"))).scalar_one() == orders
        stalling.goes_on.release()
    await placing
    assert len(world.memory.records("orders")) == 1


@pytest.mark.parametrize("begin, held_at_the_end", [(Session.begin, 0), (Connection.begin, 1)])
async def test_inside_a_session_one_is_held_until_the_prepare_is_answered(
    world: RestWorld, stalling: Stalling, engine: Engine, begin: Any, held_at_the_end: int
) -> None:
    """As docs/python.md says: a Session returns it before it waits for the end, a Connection is its caller's."""
    barrier = Barrier("sqlite", engine.begin)

    def place() -> None:
        with SyncHalfway(stalling.url, "shop", barrier=barrier, prepare_timeout_s=60, end_timeout_s=60) as client:
            session: Any = Session(engine) if begin is Session.begin else engine.connect()
            with session, begin(session):
                session.execute(text("INSERT INTO orders VALUES ('42')"))
                SessionProducer(client).send(session, "orders", "42", "paid")
            assert connections_in_use(engine) == 0

    placing = asyncio.create_task(asyncio.to_thread(place))
    assert await stalling.arrived.get() == "prepare"
    assert connections_in_use(engine) == 1
    stalling.goes_on.release()
    assert await stalling.arrived.get() == "end"
    await until_true(lambda: connections_in_use(engine) == held_at_the_end, what="the connection is given back")
    assert not placing.done()
    stalling.goes_on.release()
    await placing
    assert len(world.memory.records("orders")) == 1


async def test_inside_an_asynchronous_session_none_is_held_while_the_end_is_confirmed(
    world: RestWorld, stalling: Stalling, pool: AsyncEngine
) -> None:
    barrier = AsyncBarrier("sqlite", pool.begin)

    async def place() -> None:
        async with (
            Halfway(stalling.url, "shop", barrier=barrier, prepare_timeout_s=60, end_timeout_s=60) as client,
            AsyncSession(pool) as session,
        ):
            await session.execute(text("INSERT INTO orders VALUES ('42')"))
            await AsyncSessionProducer(client).send(session, "orders", "42", "paid")
            await session.commit()

    placing = asyncio.create_task(place())
    for step, holds in (("prepare", 1), ("end", 0)):
        assert await stalling.arrived.get() == step
        await until_true(lambda: connections_in_use(pool.sync_engine) == holds, what=f"holds {holds}")  # noqa: B023 - called immediately
        stalling.goes_on.release()
    await placing
    assert len(world.memory.records("orders")) == 1
