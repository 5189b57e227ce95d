"""The cases of test_sqlalchemy.py with an asynchronous engine, on a real SQLite."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import NullPool, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine

from halfway.client import (
    Halfway,
    Message,
    NestedTransactionError,
)
from halfway.client.barrier import (
    AsyncBarrier,
)
from halfway.client.sqlalchemy import AsyncSessionProducer
from tests.support.client.shop import Base, Order, counting, transactional, values
from tests.support.rest.client import RestWorld
from tests.unit.client.test_settling import final_state


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


async def test_inside_a_block_of_the_same_client_it_is_refused(world: RestWorld, async_shop: AsyncShop) -> None:
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
