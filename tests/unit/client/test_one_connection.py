"""A database pool of one connection and a coordinator that stalls: way 1 holds no connection while it waits."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from halfway.client import Halfway, Message, SyncHalfway
from halfway.client.barrier import AsyncBarrier, Barrier
from halfway.client.sqlalchemy import AsyncSessionProducer, SessionProducer
from tests.support.client.stalling import Stalling, run_stalling
from tests.support.rest.client import RestWorld
from tests.support.waiting import until_true

ORDER = Message(topic="orders", key="42", value="paid")


@pytest.fixture
async def stalling(world: RestWorld) -> AsyncIterator[Stalling]:
    async with run_stalling(world) as stalling:
        yield stalling


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
