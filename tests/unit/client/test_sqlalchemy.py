"""Messages in a session of SQLAlchemy are committed or rolled back with its database transaction, on a real SQLite."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import StaticPool

from halfway.client import (
    ClientClosedError,
    Halfway,
    InvalidRequestError,
    Message,
    MixedProducersError,
    NestedTransactionError,
    NoBarrierError,
    PrepareUnconfirmedError,
    SyncHalfway,
    UnserialisableMessageError,
)
from halfway.client.barrier import AsyncBarrier, NoTransactionError, UnsupportedConnectionError
from halfway.client.sqlalchemy import AsyncSessionProducer, SessionProducer
from tests.support.client.shop import Base, Order, Shop, counting, final_state, prepares, run, transactional, values
from tests.support.rest.client import RestWorld
from tests.unit.client.test_barrier import check_of


@pytest.fixture
def shop(world: RestWorld, tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(world.url, tmp_path / "shop.sqlite")
    yield shop
    shop.close()


@contextmanager
def a_session(shop: Shop) -> Iterator[Any]:
    with Session(shop.engine) as session, session.begin():
        yield session


@contextmanager
def a_scoped_session(shop: Shop) -> Iterator[Any]:
    sessions = scoped_session(sessionmaker(shop.engine))
    with sessions.begin():
        yield sessions
    sessions.remove()


@contextmanager
def a_connection(shop: Shop) -> Iterator[Any]:
    with shop.engine.begin() as connection:
        yield connection


@contextmanager
def a_connection_that_commits_as_it_goes(shop: Shop) -> Iterator[Any]:
    with shop.engine.connect() as connection:
        yield connection
        connection.commit()


BEGINS = [a_session, a_scoped_session, a_connection, a_connection_that_commits_as_it_goes]


@pytest.mark.parametrize("begin", BEGINS)
async def test_what_is_sent_in_one_transaction_is_one_transaction(world: RestWorld, shop: Shop, begin: Any) -> None:
    def service(shop: Shop) -> None:
        with begin(shop) as session:
            first = shop.producer.send(session, "orders", "42", {"total": 9.9})
            session.execute(text("INSERT INTO orders (id) VALUES ('42')"))
            assert shop.producer.send(session, "coupons", "42", b"\x00", headers={"trace": b"\xff"}) == first
            assert world.requests.counts.total() == 1  # the registration
        ids.append(first)

    ids: list[str] = []
    await run(shop, service)
    assert await final_state(world, ids[0]) == "committed"
    assert prepares(world) == 2  # with the end
    assert values(world) == [b'{"total":9.9}']
    assert len(world.memory.records("coupons")) == 1
    assert shop.count() == 1
    assert shop.barrier.look(ids[0]) == "commit"


def roll_back(shop: Shop) -> None:
    with Session(shop.engine) as session:
        session.add(Order(id="1"))
        shop.producer.send(session, "orders", "1", "v")
        session.rollback()
        session.commit()


def fail(shop: Shop) -> None:
    with a_session(shop) as session:
        session.add(Order(id="1"))
        shop.producer.send(session, "orders", "1", "v")
        _ = 1 / 0


def fail_in_the_flush_of_the_commit(shop: Shop) -> None:
    with a_session(shop) as session:
        shop.producer.send(session, "orders", "1", "v")
        session.add_all([Order(id="1"), Order(id="2")])
        session.flush()
        session.execute(text("UPDATE orders SET id = '3' WHERE id = '1'"))
        session.add(Order(id="3"))  # flushed by the commit


def close(shop: Shop) -> None:
    with Session(shop.engine) as session:
        session.add(Order(id="1"))
        shop.producer.send(session, "orders", "1", "v")
    with shop.engine.connect() as connection:
        shop.producer.send(connection, "orders", "1", "v")


@pytest.mark.parametrize(
    "service, raises",
    [(roll_back, None), (fail, ZeroDivisionError), (fail_in_the_flush_of_the_commit, IntegrityError), (close, None)],
)
async def test_what_is_rolled_back_is_never_prepared(
    world: RestWorld, shop: Shop, service: Callable[[Shop], None], raises: type[Exception] | None
) -> None:
    await run(shop, service, raises)
    assert prepares(world) == 0
    assert (shop.count(), shop.count("halfway_barrier")) == (0, 0)
    with shop.engine.begin() as connection:  # the pooled connection has no messages from before
        assert "halfway.client" not in connection.info


@pytest.mark.parametrize("begin", [a_session, a_connection])
async def test_a_savepoint_that_is_rolled_back_takes_its_messages_with_it(
    world: RestWorld, shop: Shop, begin: Any
) -> None:
    def nested(session: Any, *steps: str | Callable[[], None], back: bool) -> None:
        savepoint = session.begin_nested()
        for step in steps:
            if callable(step):
                step()
            else:
                shop.producer.send(session, "orders", "1", step)
        if back:
            savepoint.rollback()
        else:
            savepoint.commit()

    def service(shop: Shop) -> None:
        with begin(shop) as session:
            nested(session, "gone first", back=True)
            shop.producer.send(session, "orders", "1", "one")
            nested(session, "two", lambda: nested(session, "gone inside", back=True), "three", back=False)
            nested(session, "gone", lambda: nested(session, "gone though released", back=False), back=True)
            shop.producer.send(session, "orders", "1", "four")
        with begin(shop) as session:
            nested(session, "gone too", back=True)

    await run(shop, service)
    assert values(world) == [b"one", b"two", b"three", b"four"]
    assert shop.count("halfway_barrier") == 1


async def test_a_session_is_used_again_after_each_end(world: RestWorld, shop: Shop) -> None:
    def service(shop: Shop) -> None:
        with Session(shop.engine) as session:
            for number, end in enumerate([session.commit, session.rollback, session.commit]):
                session.add(Order(id=f"{number}"))
                shop.producer.send(session, "orders", "1", f"{number}")
                end()
            session.execute(text("SELECT 1"))
            session.commit()

    await run(shop, service)
    assert values(world) == [b"0", b"2"]
    assert (shop.count(), shop.count("halfway_barrier")) == (2, 2)


@pytest.mark.parametrize("commit", [True, False])
async def test_a_session_inside_the_transaction_of_a_connection_waits_for_it(
    world: RestWorld, shop: Shop, commit: bool
) -> None:
    """Test suites use this to roll everything back at the end."""

    def service(shop: Shop) -> None:
        with shop.engine.connect() as connection, connection.begin() as outer:
            with Session(connection, join_transaction_mode="create_savepoint") as session:
                session.add(Order(id="1"))
                shop.producer.send(session, "orders", "1", "v")
                session.commit()
            assert prepares(world) == 0
            if not commit:
                outer.rollback()

    await run(shop, service)
    assert len(values(world)) == shop.count() == int(commit)


async def test_a_prepare_that_fails_rolls_the_database_back(world: RestWorld, shop: Shop) -> None:
    def service(shop: Shop) -> None:
        for kind, url, topic, within_s in [
            (InvalidRequestError, world.url, "absent", 30.0),
            (PrepareUnconfirmedError, "http://127.0.0.1:1", "orders", 0.2),
        ]:
            with SyncHalfway(
                url, "shop", barrier=shop.barrier, prepare_timeout_s=within_s, end_timeout_s=within_s
            ) as client:
                with Session(shop.engine) as session:
                    session.add(Order(id="1"))
                    SessionProducer(client).send(session, topic, "1", "v")
                    with pytest.raises(kind):
                        session.commit()
                    session.rollback()
                    assert session.get(Order, "1") is None
                    session.add(Order(id=topic))
                    session.commit()
                with shop.engine.connect() as connection:
                    SessionProducer(client).send(connection, topic, "1", "v")
                    connection.execute(text("INSERT INTO orders (id) VALUES ('1')"))
                    with pytest.raises(kind):
                        connection.commit()
                    connection.rollback()
                    found = connection.execute(text("SELECT count(*) FROM orders WHERE id = '1'"))
                    assert found.scalar_one() == 0

    await run(shop, service)
    assert values(world) == []
    assert (shop.count(), shop.count("halfway_barrier")) == (2, 0)


async def test_a_commit_that_the_database_refuses_is_left_to_check_back(world: RestWorld, shop: Shop) -> None:
    """It may have been carried out nevertheless: only the barrier knows, and it uses its own connection."""

    def service(shop: Shop) -> None:
        with a_session(shop) as session:
            session.add(Order(id="1", parent="none"))  # raised by the commit
            ids.append(shop.producer.send(session, "orders", "1", "v"))

    ids: list[str] = []
    await run(shop, service, IntegrityError)
    assert (await world.show(ids[0])).body["state"] == "prepared"
    assert shop.barrier.decide(check_of(ids[0])) == "rollback"
    assert shop.count() == 0


async def test_a_check_between_send_and_commit_decides_nothing(world: RestWorld, shop: Shop) -> None:
    """The first message has written the barrier's row."""

    def service(shop: Shop) -> None:
        with a_session(shop) as session:
            transaction_id = shop.producer.send(session, "orders", "1", "v")
            assert shop.barrier.decide(check_of(transaction_id)) == "unknown"
            session.add(Order(id="1"))

    await run(shop, service)
    assert (prepares(world), shop.count()) == (2, 1)  # with the end


async def test_bad_use_names_the_remedy_and_prepares_nothing(world: RestWorld, shop: Shop, tmp_path: Path) -> None:
    def service(shop: Shop) -> None:
        with pytest.raises(NoBarrierError, match="barrier="), SyncHalfway(world.url, "shop") as client:
            SessionProducer(client)
        by_itself = shop.engine.execution_options(isolation_level="AUTOCOMMIT")
        with by_itself.connect() as connection, pytest.raises(NoTransactionError, match="begin the local transaction"):
            shop.producer.send(connection, "orders", "1", "v")
        asynchronous: Any = AsyncSession(create_async_engine("sqlite+aiosqlite://"))
        with pytest.raises(UnsupportedConnectionError, match="AsyncSessionProducer"):
            shop.producer.send(asynchronous, "orders", "1", "v")
        with Session(shop.engine) as session:
            with pytest.raises(UnserialisableMessageError):
                shop.producer.send(session, "orders", "1", {"at": object()})
            shop.producer.send(session, "orders", "1", "v")
            other_client = SyncHalfway(world.url, "shop", barrier=shop.barrier)
            with pytest.raises(MixedProducersError, match="use one for all"):
                SessionProducer(other_client).send(session, "orders", "1", "v")
        shared = create_engine("sqlite://", poolclass=StaticPool)
        with shared.begin() as connection:
            connection.exec_driver_sql(shop.barrier.migration()[0])
        with shared.connect() as one, shared.connect() as other:
            shop.producer.send(one, "orders", "1", "v")
            with pytest.raises(UnsupportedConnectionError, match="give each its own"):
                shop.producer.send(other, "orders", "1", "v")
        shared.dispose()
        shop.client.close()
        with a_session(shop) as session:
            session.add(Order(id="1"))
            shop.producer.send(session, "orders", "1", "v")

    await run(shop, service, ClientClosedError)
    assert (prepares(world), shop.count()) == (0, 0)


async def test_inside_a_block_of_the_same_client_it_is_refused(world: RestWorld, shop: Shop) -> None:
    """A block of another thread or another client is allowed, and so is one that has ended."""

    def service(shop: Shop) -> None:
        around = [Message(topic="coupons", value="v")]
        for begin in (a_session, a_connection):
            with shop.client.transaction(around) as outer, begin(shop) as session:
                with pytest.raises(NestedTransactionError, match=f"{outer.id} is open .* send outside of its block"):
                    shop.producer.send(session, "orders", "1", "nested")
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(a_whole_service, shop, "in another thread").result()
                outer.commit()
        with shop.client.transaction(around) as outer:
            outer.commit()
            a_whole_service(shop, "after the end")
        with SyncHalfway(world.url, "shop") as other, other.transaction(around):
            a_whole_service(shop, "in another client's")

    await run(shop, service)
    sent = ["in another thread", "in another thread", "after the end", "in another client's"]
    assert values(world) == [each.encode() for each in sent]


def a_whole_service(shop: Shop, value: str) -> None:
    with a_session(shop) as session:
        shop.producer.send(session, "orders", "1", value)


class AsyncShop:
    """A service with an asynchronous engine, a client and a producer."""

    def __init__(self, engine: AsyncEngine, client: Halfway, barrier: AsyncBarrier) -> None:
        self.engine = engine
        self.client = client
        self.barrier = barrier
        self.producer = AsyncSessionProducer(client)

    async def count(self, table: str = "orders") -> int:
        async with self.engine.begin() as connection:
            return int((await connection.execute(text(counting(table)))).scalar_one())


@pytest.fixture
async def async_shop(world: RestWorld, tmp_path: Path) -> AsyncIterator[AsyncShop]:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.sqlite'}", poolclass=NullPool)
    transactional(engine.sync_engine)
    barrier = AsyncBarrier("sqlite", engine.begin)
    await barrier.create()
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        yield AsyncShop(engine, client, barrier)
    await engine.dispose()


async def test_an_asynchronous_session_or_connection_sends_the_same(world: RestWorld, async_shop: AsyncShop) -> None:
    send = async_shop.producer.send

    async def local(session: AsyncSession | AsyncConnection, number: int) -> str:
        transaction_id = await send(session, "orders", "1", f"{number}")
        async with session.begin_nested() as savepoint:
            await send(session, "orders", "1", "gone")
            await savepoint.rollback()
        await session.execute(text("INSERT INTO orders (id) VALUES (:id)"), {"id": f"{number}"})
        return transaction_id

    async def fail() -> None:
        async with AsyncSession(async_shop.engine) as session, session.begin():
            await local(session, 3)
            _ = 1 / 0

    async with AsyncSession(async_shop.engine) as session, session.begin():
        first = await local(session, 1)
    async with async_shop.engine.begin() as connection:
        second = await local(connection, 2)
    with pytest.raises(ZeroDivisionError):
        await fail()
    assert {await final_state(world, first), await final_state(world, second)} == {"committed"}
    assert values(world) == [b"1", b"2"]
    assert (await async_shop.count(), await async_shop.count("halfway_barrier")) == (2, 2)


async def test_inside_a_block_of_the_same_client_an_asynchronous_one_is_refused(
    world: RestWorld, async_shop: AsyncShop
) -> None:
    async with (
        async_shop.client.transaction([Message(topic="coupons", value="v")]) as outer,
        async_shop.engine.begin() as connection,
    ):
        await async_shop.barrier.insert(connection, outer.id)
        with pytest.raises(NestedTransactionError, match=outer.id):
            await async_shop.producer.send(connection, "orders", "1", "nested")
    async with async_shop.engine.begin() as connection:
        await async_shop.producer.send(connection, "orders", "1", "after it")
    assert values(world) == [b"after it"]


async def test_a_commit_that_is_cancelled_while_halfway_is_asked_rolls_back(
    world: RestWorld, async_shop: AsyncShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def prepare(*_: Any, **__: Any) -> None:
        asking.set()
        await asyncio.sleep(60)

    async def service() -> None:
        async with AsyncSession(async_shop.engine) as session, session.begin():
            session.add(Order(id="1"))
            await async_shop.producer.send(session, "orders", "1", "v")

    asking = asyncio.Event()
    with monkeypatch.context() as patch:
        patch.setattr(async_shop.client, "prepare", prepare)
        cancelled = asyncio.create_task(service())
        await asking.wait()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    assert (await async_shop.count(), await async_shop.count("halfway_barrier")) == (0, 0)
    await service()
    assert await async_shop.count() == 1
