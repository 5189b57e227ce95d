"""The two services of the story, each a process that is killed at any moment: `services.py produce|consume SETTINGS`.

The producer places orders in a database of its own and sends two messages for each; the consumer notes each message in
a database of its own. SETTINGS is a JSON object; its databases are URLs of SQLAlchemy.
"""

import json
import random
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.orm import Session

from halfway.client import HalfwayError, Message, SyncHalfway
from halfway.client.barrier import Barrier
from halfway.client.consumer import Consumer, Inbox, Record, Retries
from halfway.client.sqlalchemy import SessionProducer

THREADS = 8
MESSAGES = 2
NEW_ORDER = text("INSERT INTO orders VALUES (:id)")
NEW_EFFECT = text("INSERT INTO effects VALUES (:id)")

Settings = Mapping[str, Any]


class UnwantedOrderError(Exception):
    """A local transaction that rolls back."""


def database(url: str) -> Engine:
    """Return what connects; only a crash of the machine could lose what is not yet on the disk."""
    engine = create_engine(url, pool_size=THREADS)
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine, "connect")
        def hasten(connection: Any, _record: object) -> None:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=OFF")
            connection.execute("PRAGMA busy_timeout=60000")

    return engine


def change_mind(chance: random.Random) -> None:
    if chance.random() < 0.1:
        raise UnwantedOrderError


def produce(given: Settings) -> None:
    """Place orders until killed, around a transaction and inside sessions: most commit, some roll back."""
    engine = database(given["orders"])
    barrier = Barrier(engine.dialect.name, engine.begin)
    seeds = random.Random(given["seed"])

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

    def inside(client: SyncHalfway, order: str, chance: random.Random) -> None:
        producer = SessionProducer(client)
        with Session(engine) as session, session.begin():
            session.execute(NEW_ORDER, {"id": order})
            for value in values_of(order):
                producer.send(session, given["topic"], value, value)
            change_mind(chance)

    def place_orders(client: SyncHalfway, chance: random.Random, place: Callable[..., None]) -> None:
        while True:
            with suppress(HalfwayError, UnwantedOrderError):
                place(client, f"{chance.getrandbits(64):016x}", chance)

    with SyncHalfway(given["url"], given["group"], barrier=barrier) as client:
        threads = [
            threading.Thread(target=place_orders, args=(client, random.Random(seeds.random()), place), daemon=True)
            for place in (around, inside) * (THREADS // 2)
        ]
        for thread in threads:
            thread.start()
        threads[0].join()


def values_of(order: str) -> list[str]:
    """Return the values of the messages that an order sends."""
    return [f"{order}/{number}" for number in range(MESSAGES)]


def consume(given: Settings) -> None:
    """Note each message; now and then a handler fails."""
    chance = random.Random(given["seed"])
    engine = database(given["effects"])

    def handle(record: Record, connection: Connection) -> None:
        connection.execute(NEW_EFFECT, {"id": (record.value or b"").decode()})
        if chance.random() < 0.02:
            raise ValueError("not this time")

    Consumer(
        {"bootstrap.servers": given["bootstrap_servers"], "session.timeout.ms": 6000, "heartbeat.interval.ms": 1000},
        group=given["group"],
        topics=[given["topic"]],
        handle=handle,
        inbox=Inbox(engine.dialect.name, engine.begin, retention_s=None),
        retries=Retries(attempts=100, first_pause_s=0.01, max_pause_s=0.2),
    ).run()


if __name__ == "__main__":
    {"produce": produce, "consume": consume}[sys.argv[1]](json.loads(sys.argv[2]))
