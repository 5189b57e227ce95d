"""The two services of the story, each a process that is killed at any moment: `services.py SERVICE SETTINGS`.

The producer places orders in a database of its own, its own ones or those of callers (`POST /orders/ID` at `port`), and
sends two messages for each; the consumer notes each message in a database of its own.
SETTINGS is a JSON object; its databases are URLs of SQLAlchemy.
"""

import asyncio
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.orm import Session

from halfway.client import HalfwayError, Message, SyncHalfway
from halfway.client.barrier import Barrier, Store
from halfway.client.consumer import AsyncConsumer, AsyncInbox, Consumer, Inbox, Record, Retries
from halfway.client.sqlalchemy import SessionProducer

THREADS = 8
MESSAGES = 2
AWAY_AFTER_S = 2.0
"""How long a service with a store waits for halfway before it stores an order's messages."""
ASYNC_DRIVERS = {"sqlite": "sqlite+aiosqlite", "mysql+pymysql": "mysql+asyncmy"}
"""For an event loop, in place of the one that blocks; psycopg is both."""
NEW_ORDER = text("INSERT INTO orders VALUES (:id)")
NEW_EFFECT = text("INSERT INTO effects VALUES (:id)")

Settings = Mapping[str, Any]
Way = Callable[[SyncHalfway, str, random.Random], None]


class UnwantedOrderError(Exception):
    """A local transaction that rolls back."""


def database(url: str) -> Engine:
    """Return what connects; only a crash of the machine could lose what is not yet on the disk."""
    engine = create_engine(url, pool_size=THREADS)
    hasten(engine)
    return engine


def async_database(url: str) -> AsyncEngine:
    """Return what connects to the same database on an event loop."""
    parts = make_url(url)
    engine = create_async_engine(parts.set(drivername=ASYNC_DRIVERS.get(parts.drivername, parts.drivername)))
    hasten(engine.sync_engine)
    return engine


def hasten(engine: Engine) -> None:
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine, "connect")
        def on_connect(connection: Any, _record: object) -> None:
            cursor = connection.cursor()
            for pragma in ("journal_mode=WAL", "synchronous=OFF", "busy_timeout=60000"):
                cursor.execute(f"PRAGMA {pragma}")


def change_mind(chance: random.Random) -> None:
    if chance.random() < 0.1:
        raise UnwantedOrderError


def produce(given: Settings) -> None:
    """Place orders until killed, around a transaction and inside sessions: most commit, some roll back.

    Whether an order of a caller rolls back is in its id, so that it is the same each time the caller repeats it.
    """
    engine = database(given["orders"])
    barrier = Barrier(engine.dialect.name, engine.begin, store=Store() if given["stores"] else None)

    def around(client: SyncHalfway, order: str, chance: random.Random) -> None:
        messages = [Message(topic=given["topic"], key=value, value=value) for value in values_of(order)]
        with client.transaction(messages, confirm=chance.random() < 0.5) as transaction:
            with engine.begin() as connection:
                barrier.insert(connection, transaction.id)
                connection.execute(NEW_ORDER, {"id": order})
                change_mind(chance)
            change_mind(chance)  # too late: it has committed
            if chance.random() < 0.05:
                transaction.unknown()

    def block(client: SyncHalfway, order: str, chance: random.Random) -> None:
        messages = [Message(topic=given["topic"], key=value, value=value) for value in values_of(order)]
        with client.transaction(messages, engine.begin, when_away="store") as connection:
            connection.execute(NEW_ORDER, {"id": order})
            change_mind(chance)

    def inside(client: SyncHalfway, order: str, chance: random.Random) -> None:
        producer = SessionProducer(client, when_away="store" if given["stores"] else "raise")
        with Session(engine) as session, session.begin():
            session.execute(NEW_ORDER, {"id": order})
            for value in values_of(order):
                producer.send(session, given["topic"], value, value)
            change_mind(chance)

    ways = (block, inside) if given["stores"] else (around, inside)
    patience_s = AWAY_AFTER_S if given["stores"] else 20.0
    with SyncHalfway(
        given["url"], given["group"], barrier=barrier, prepare_timeout_s=patience_s, end_timeout_s=patience_s
    ) as client:
        if given["stores"]:
            client.start(topics=[given["topic"]], timeout_s=AWAY_AFTER_S)
        if "port" in given:
            serve(given["port"], client, ways)
        place_orders(given, client, ways)


def place_orders(given: Settings, client: SyncHalfway, ways: Sequence[Way]) -> None:
    """Place orders of its own."""
    seeds = random.Random(given["seed"])

    def go_on(chance: random.Random, place: Way) -> None:
        while True:
            with suppress(HalfwayError, UnwantedOrderError):
                place(client, f"{chance.getrandbits(64):016x}", chance)
            time.sleep(given["pause_s"])

    threads = [
        threading.Thread(target=go_on, args=(random.Random(seeds.random()), place), daemon=True)
        for place in [*ways] * (THREADS // len(ways))
    ]
    for thread in threads:
        thread.start()
    threads[0].join()


def serve(port: int, client: SyncHalfway, ways: Sequence[Way]) -> None:
    """Place the orders of callers, one way or the other."""

    class Orders(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.send_response(self._place(self.path.rpartition("/")[2]))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _place(self, order: str) -> int:
            chance = random.Random(order)
            try:
                chance.choice(ways)(client, order, chance)
            except IntegrityError:
                return 200  # the caller repeats one that was taken
            except UnwantedOrderError:
                return 409
            except HalfwayError as error:
                self.log_error("%s: %s: %s", order, type(error).__name__, error)
                return 503
            return 201

        def log_request(self, *_: object) -> None:
            """Log errors only."""

    ThreadingHTTPServer(("127.0.0.1", port), Orders).serve_forever()


def values_of(order: str) -> list[str]:
    """Return the values of the messages that an order sends."""
    return [f"{order}/{number}" for number in range(MESSAGES)]


def consume(given: Settings) -> None:
    """Note each message; now and then a handler fails."""
    chance = random.Random(given["seed"])
    engine = database(given["effects"])

    def handle(record: Record, connection: Connection) -> None:
        connection.execute(NEW_EFFECT, effect_of(record))
        fail_now_and_then(chance)

    inbox = Inbox(engine.dialect.name, engine.begin, retention_s=None)
    Consumer(handle=handle, inbox=inbox, **consumer_settings(given)).run()


def consume_async(given: Settings) -> None:
    """Do what `consume` does, on an event loop."""
    chance = random.Random(given["seed"])
    engine = async_database(given["effects"])

    async def handle(record: Record, connection: AsyncConnection) -> None:
        await connection.execute(NEW_EFFECT, effect_of(record))
        fail_now_and_then(chance)

    async def run() -> None:
        inbox = AsyncInbox(engine.dialect.name, engine.begin, retention_s=None)
        await AsyncConsumer(handle=handle, inbox=inbox, **consumer_settings(given)).run()

    asyncio.run(run())


def consumer_settings(given: Settings) -> dict[str, Any]:
    kafka = {"bootstrap.servers": given["bootstrap_servers"], "session.timeout.ms": 6000, "heartbeat.interval.ms": 1000}
    retries = Retries(attempts=100, first_pause_s=0.01, max_pause_s=0.2)
    return {"settings": kafka, "group": given["group"], "topics": [given["topic"]], "retries": retries}


def effect_of(record: Record) -> dict[str, str]:
    return {"id": (record.value or b"").decode()}


def fail_now_and_then(chance: random.Random) -> None:
    if chance.random() < 0.02:
        raise ValueError("not this time")


if __name__ == "__main__":
    {"produce": produce, "consume": consume, "consume_async": consume_async}[sys.argv[1]](json.loads(sys.argv[2]))
