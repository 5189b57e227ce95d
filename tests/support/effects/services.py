"""The two services of the story, each a process that is killed at any moment: `services.py produce|consume SETTINGS`.

The producer places orders in a database of its own and sends two messages for each; the consumer notes each message in
a database of its own. SETTINGS is a JSON object.
"""

import json
import random
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import Any

from sqlalchemy import NullPool, create_engine, event, text
from sqlalchemy.orm import Session

from halfway.client import HalfwayError, Message, SyncHalfway
from halfway.client.barrier import Barrier
from halfway.client.consumer import Consumer, Inbox, Record, Retries
from halfway.client.sqlalchemy import SessionProducer

THREADS = 4
MESSAGES = 2

Settings = Mapping[str, Any]


class UnwantedOrderError(Exception):
    """A local transaction that rolls back."""


def database(path: str) -> Callable[[], AbstractContextManager[sqlite3.Connection]]:
    """Return what connects; only a crash of the machine could lose what is not yet on the disk."""

    @contextmanager
    def begin() -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(path, timeout=60)) as connection:
            connection.execute("PRAGMA synchronous=OFF")
            with connection:
                yield connection

    return begin


def create(path: str, table: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"CREATE TABLE {table}")


def change_mind(chance: random.Random) -> None:
    if chance.random() < 0.1:
        raise UnwantedOrderError


def produce(given: Settings) -> None:
    """Place orders until killed, around a transaction and inside sessions: most commit, some roll back."""
    begin = database(given["orders"])
    barrier = Barrier("sqlite", begin)
    seeds = random.Random(given["seed"])
    engine = create_engine(f"sqlite:///{given['orders']}", poolclass=NullPool, connect_args={"timeout": 60})
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=OFF"))

    def around(client: SyncHalfway, order: str, chance: random.Random) -> None:
        messages = [Message(topic=given["topic"], key=value, value=value) for value in values_of(order)]
        with client.transaction(messages, confirm=chance.random() < 0.5) as transaction:
            with begin() as connection:
                connection.execute("INSERT INTO orders VALUES (?)", (order,))
                barrier.insert(connection, transaction.id)
                change_mind(chance)
            change_mind(chance)  # too late: it has committed
            if chance.random() < 0.05:
                transaction.unknown()

    def inside(client: SyncHalfway, order: str, chance: random.Random) -> None:
        producer = SessionProducer(client)
        with Session(engine) as session, session.begin():
            session.execute(text("INSERT INTO orders VALUES (:order)"), {"order": order})
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

    def handle(record: Record, connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO effects VALUES (?)", ((record.value or b"").decode(),))
        if chance.random() < 0.02:
            raise ValueError("not this time")

    Consumer(
        {"bootstrap.servers": given["bootstrap_servers"], "session.timeout.ms": 2000, "heartbeat.interval.ms": 500},
        group=given["group"],
        topics=[given["topic"]],
        handle=handle,
        inbox=Inbox("sqlite", database(given["effects"]), retention_s=None),
        retries=Retries(attempts=100, first_pause_s=0.01, max_pause_s=0.2),
    ).run()


if __name__ == "__main__":
    {"produce": produce, "consume": consume}[sys.argv[1]](json.loads(sys.argv[2]))
