"""What is sent inside a session of SQLAlchemy, through each driver on a real server."""

import asyncio
import time
from typing import Any

import pytest
from sqlalchemy import Connection, NullPool, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from halfway.client import Halfway, MissingRowError, SyncHalfway
from halfway.client.barrier import AsyncBarrier, Barrier, UnsupportedConnectionError
from halfway.client.sqlalchemy import AsyncSessionProducer, SessionProducer
from tests.barrier.test_drivers import (
    AT_ONCE_S,
    Servers,
    asked,
    closing_async_engine,
    closing_engine,
    decided,
    kill_mariadb,
    kill_postgresql,
    url,
)
from tests.support.rest.client import RestWorld

pytestmark = [pytest.mark.xdist_group("databases"), pytest.mark.timeout(1800)]


def written(world: RestWorld) -> list[bytes | None]:
    return [record.value for record in world.memory.records("orders")]


@pytest.mark.parametrize("driver", ["postgresql+psycopg", "mysql+pymysql"])
async def test_a_session_of_a_synchronous_driver(servers: Servers, world: RestWorld, driver: str) -> None:
    engine = create_engine(url(servers, driver))
    barrier = Barrier(engine.dialect.name, engine.begin, table="sessions")
    barrier.create()
    verdicts = []

    def service(client: SyncHalfway, monkeypatch: pytest.MonkeyPatch) -> None:
        producer = SessionProducer(client)
        prepare = client.prepare

        def checked(messages: Any, **named: Any) -> None:
            prepare(messages, **named)
            began = time.monotonic()
            verdicts.append(barrier.decide(asked(named["id"])))
            assert time.monotonic() - began < AT_ONCE_S

        monkeypatch.setattr(client, "prepare", checked)
        with Session(engine) as session:
            first = producer.send(session, "orders", "1", "one")
            with session.begin_nested() as savepoint:
                producer.send(session, "orders", "1", "gone")
                savepoint.rollback()
            producer.send(session, "orders", "1", "two")
            session.commit()
            assert client.show(first)["state"] == "committed"
            producer.send(session, "orders", "1", "gone")
            session.rollback()
            producer.send(session, "orders", "1", "three")
            session.commit()
        verdicts.append(barrier.decide(asked(first)))

    def killed(client: SyncHalfway, monkeypatch: pytest.MonkeyPatch) -> str:
        prepare = client.prepare
        with Session(engine) as session:
            transaction_id = SessionProducer(client).send(session, "orders", "1", "killed")
            connection = session.connection()

            def kill(messages: Any, **named: Any) -> None:
                prepare(messages, **named)
                kill_connection(servers, connection)

            monkeypatch.setattr(client, "prepare", kill)
            with pytest.raises(DBAPIError):
                session.commit()
        return transaction_id

    def work() -> str:
        with SyncHalfway(world.url, "shop", barrier=barrier) as client, pytest.MonkeyPatch.context() as patch:
            service(client, patch)
        with SyncHalfway(world.url, "shop", barrier=barrier) as client, pytest.MonkeyPatch.context() as patch:
            return killed(client, patch)

    transaction_id = await asyncio.to_thread(work)
    assert verdicts == ["unknown", "unknown", "commit"]
    assert written(world) == [b"one", b"two", b"three"]
    assert (await world.show(transaction_id)).body["state"] == "prepared"
    assert await asyncio.to_thread(decided, barrier, transaction_id) == "rollback"
    engine.dispose()


@pytest.mark.parametrize("driver", ["postgresql+asyncpg", "postgresql+psycopg", "mysql+asyncmy"])
async def test_a_session_of_an_asynchronous_driver(servers: Servers, world: RestWorld, driver: str) -> None:
    engine = create_async_engine(url(servers, driver), poolclass=NullPool)  # each use has to open a connection
    barrier = AsyncBarrier(engine.dialect.name, engine.begin, table="async_sessions")
    await barrier.create()
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        producer = AsyncSessionProducer(client)
        async with AsyncSession(engine) as session:
            first = await producer.send(session, "orders", "1", "one")
            async with session.begin_nested() as savepoint:
                await producer.send(session, "orders", "1", "gone")
                await savepoint.rollback()
            await session.execute(text("SELECT 1"))
            await session.commit()
            assert (await client.show(first))["state"] == "committed"
            await producer.send(session, "orders", "1", "gone")
            await session.rollback()
        async with engine.begin() as connection:
            second = await producer.send(connection, "orders", "1", "two")
        assert (await client.show(second))["state"] == "committed"
    assert written(world) == [b"one", b"two"]
    assert await barrier.decide(asked(first)) == "commit"
    await engine.dispose()


def test_a_transaction_with_two_phases_is_refused(servers: Servers) -> None:
    with closing_engine(url(servers, "mysql+pymysql")) as engine:
        client = SyncHalfway("http://127.0.0.1:1", "shop", barrier=Barrier("mysql", engine.begin))
        with (
            engine.connect() as connection,
            connection.begin_twophase(),
            pytest.raises(UnsupportedConnectionError, match="two-phase transactions are not supported"),
        ):
            SessionProducer(client).send(connection, "orders", "1", "v")


async def test_a_session_that_goes_on_after_a_rollback_of_mariadb_sends_nothing(
    servers: Servers, world: RestWorld
) -> None:
    """As after a deadlock that the service catches: the server has rolled back, and begins a new transaction."""
    with closing_engine(url(servers, "mysql+pymysql")) as engine:
        barrier = Barrier("mysql", engine.begin, table="sessions_caught")
        barrier.create()

        def work() -> str:
            with SyncHalfway(world.url, "shop", barrier=barrier) as client, Session(engine) as session:
                lost = SessionProducer(client).send(session, "orders", "1", "lost")
                session.execute(text("ROLLBACK"))
                session.execute(text("SELECT 1"))
                with pytest.raises(MissingRowError, match="savepoint"):
                    session.commit()
                return lost

        assert barrier.decide(asked(await asyncio.to_thread(work))) == "rollback"
    assert written(world) == []


async def test_an_asynchronous_session_that_goes_on_after_a_rollback_of_mariadb_sends_nothing(
    servers: Servers, world: RestWorld
) -> None:
    async with closing_async_engine(url(servers, "mysql+asyncmy")) as engine:
        barrier = AsyncBarrier("mysql", engine.begin, table="sessions_caught")
        await barrier.create()
        async with Halfway(world.url, "shop", barrier=barrier) as client, AsyncSession(engine) as session:
            await AsyncSessionProducer(client).send(session, "orders", "1", "lost")
            await session.execute(text("ROLLBACK"))
            await session.execute(text("SELECT 1"))
            with pytest.raises(MissingRowError, match="savepoint"):
                await session.commit()
    assert written(world) == []


def kill_connection(servers: Servers, connection: Connection) -> None:
    raw: Any = connection.connection.driver_connection
    if connection.dialect.name == "postgresql":
        kill_postgresql(servers, raw.info.backend_pid)
    else:
        kill_mariadb(servers, raw.thread_id())
