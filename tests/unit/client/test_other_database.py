"""A row that checks would never see is detected at the first commit, before anything is prepared."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from halfway.client import Halfway, SyncHalfway
from halfway.client.barrier import AsyncBarrier, Barrier, OtherDatabaseError, sqlite_transactions
from halfway.client.sqlalchemy import AsyncSessionProducer, SessionProducer
from tests.support.rest.client import RestWorld


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
