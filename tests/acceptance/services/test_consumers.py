"""The inbox in somebody else's consumer, which reads each message twice, and in ours with asynchronous drivers."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any
from uuid import uuid4

import asyncpg
import confluent_kafka
import psycopg
import pytest
from aiokafka import AIOKafkaConsumer
from faststream import AckPolicy
from faststream.kafka import KafkaBroker, KafkaMessage

from halfway.client import Message, SyncHalfway
from halfway.client.consumer import AsyncConsumer, AsyncInbox, Inbox, Record, Retries
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.topics import Cluster
from tests.support.databases.servers import USER, Server
from tests.support.waiting import until_true

pytestmark = pytest.mark.xdist_group("databases")

ORDERS = 5


class Effects:
    """The orders that have taken effect, in the transaction of the inbox, and what was read."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.consumer = f"group-{uuid4().hex[:10]}"
        self.read = 0
        self.inbox = Inbox("postgresql", server.psycopg)
        self.async_inbox = AsyncInbox("postgresql", self._connect)

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Any]:
        connection = await asyncpg.connect(host=str(self._server.folder), user=USER, database="postgres")
        try:
            async with connection.transaction():
                yield connection
        finally:
            await connection.close()

    def take(self, record: Record) -> None:
        with self.inbox.connect() as connection:
            if self.inbox.insert(connection, self.consumer, record.id):
                connection.execute(
                    "INSERT INTO effects_by_consumer VALUES (%s, %s)", (self.consumer, record.json()["order"])
                )
        self.read += 1

    async def take_async(self, record: Record) -> None:
        async with self.async_inbox.connect() as connection:
            if await self.async_inbox.insert(connection, self.consumer, record.id):
                await connection.execute(
                    "INSERT INTO effects_by_consumer VALUES ($1, $2)", self.consumer, record.json()["order"]
                )
        self.read += 1

    @property
    def taken(self) -> list[str]:
        with self._server.psycopg() as connection:
            rows = connection.execute(
                "SELECT place FROM effects_by_consumer WHERE consumer = %s ORDER BY 1", [self.consumer]
            )
            return [str(row[0]) for row in rows]


@pytest.fixture
def effects(postgresql_server: Server) -> Iterator[Effects]:
    with postgresql_server.psycopg() as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS effects_by_consumer (consumer text, place text)")
    effects = Effects(postgresql_server)
    effects.inbox.create()
    yield effects
    assert effects.taken == [f"order {number}" for number in range(ORDERS)]
    assert effects.read == 2 * ORDERS


@pytest.fixture
async def orders(coordinator: CoordinatorProcess, topic: str, group: str) -> str:
    """Send orders, and one that is rolled back, to a topic."""

    def send() -> None:
        with SyncHalfway(coordinator.url, group) as client:
            client.register(topics=[topic])
            for number in range(ORDERS):
                with client.transaction([Message(topic=topic, value={"order": f"order {number}"})]):
                    pass
            with client.transaction([Message(topic=topic, value={"order": "rolled back"})]) as transaction:
                transaction.rollback()

    await asyncio.to_thread(send)
    return topic


async def test_in_a_consumer_of_confluent_kafka(cluster: Cluster, orders: str, effects: Effects) -> None:
    def consume() -> None:
        for _ in range(2):  # each begins at the start
            settings = {"bootstrap.servers": cluster.bootstrap_servers, "group.id": uuid4().hex}
            consumer = confluent_kafka.Consumer({**settings, "auto.offset.reset": "earliest"})
            with closing(consumer):
                consumer.subscribe([orders])
                for _ in range(ORDERS):
                    message = None
                    while message is None:
                        message = consumer.poll(1.0)
                    effects.take(Record.of(message))

    await asyncio.to_thread(consume)


async def test_in_a_consumer_of_aiokafka(cluster: Cluster, orders: str, effects: Effects) -> None:
    await effects.async_inbox.create()
    for _ in range(2):
        consumer = AIOKafkaConsumer(
            orders,
            bootstrap_servers=cluster.bootstrap_servers,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
        )
        await consumer.start()
        try:
            for _ in range(ORDERS):
                await effects.take_async(Record.of(await consumer.getone()))
        finally:
            await consumer.stop()
    assert await effects.async_inbox.clean(10) == 0


async def test_in_a_subscriber_of_faststream(cluster: Cluster, orders: str, effects: Effects) -> None:
    """A handler that fails once gets the message again."""
    broker, failed = KafkaBroker(cluster.bootstrap_servers), False

    async def handle(message: KafkaMessage) -> None:
        nonlocal failed
        if not failed:
            failed = True
            raise ConnectionError("the database is away for a moment")
        await effects.take_async(Record.of(message.raw_message))

    for number in range(2):
        broker.subscriber(
            orders,
            group_id=f"{effects.consumer}-{number}",
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            ack_policy=AckPolicy.NACK_ON_ERROR,
        )(handle)
    async with broker:
        await broker.start()
        await until_true(lambda: effects.read == 2 * ORDERS)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_in_our_consumer_on_an_asynchronous_driver(
    cluster: Cluster, orders: str, postgresql_server: Server, driver: str
) -> None:
    """A pool of asyncpg opens no transaction by itself: the consumer does, so a handler that fails leaves nothing."""
    host, table = str(postgresql_server.folder), f"effects_by_{driver}_{uuid4().hex[:8]}"
    with postgresql_server.psycopg() as connection:
        connection.execute(f"CREATE TABLE {table} (place text)")
    failed = asyncio.Event()

    async def handle(record: Record, connection: Any) -> None:
        await connection.execute(f"INSERT INTO {table} VALUES ('{record.json()['order']}')")  # noqa: S608 - no input
        if not failed.is_set():
            failed.set()
            raise ConnectionError("another service is away for a moment")

    async def consume(connect: Any) -> None:
        inbox = AsyncInbox("postgresql", connect)
        await inbox.create()
        consumer = AsyncConsumer(
            {"bootstrap.servers": cluster.bootstrap_servers},
            group=table,
            topics=[orders],
            handle=handle,
            inbox=inbox,
            retries=Retries(first_pause_s=0.01),
        )
        running = asyncio.create_task(consumer.run())
        await until_true(lambda: len(taken()) == ORDERS, what="all orders have taken effect")
        consumer.stop()
        await running

    def taken() -> list[str]:
        with postgresql_server.psycopg() as connection:
            return [str(row[0]) for row in connection.execute(f"SELECT place FROM {table} ORDER BY 1")]  # noqa: S608

    if driver == "asyncpg":
        async with asyncpg.create_pool(host=host, user=USER, database="postgres", min_size=0) as pool:
            await consume(pool.acquire)
    else:

        @asynccontextmanager
        async def connect() -> AsyncIterator[Any]:
            async with await psycopg.AsyncConnection.connect(host=host, user=USER, dbname="postgres") as connection:
                yield connection

        await consume(connect)
    assert failed.is_set()
    assert taken() == [f"order {number}" for number in range(ORDERS)]
