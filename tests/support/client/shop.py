"""A service that takes orders with SQLAlchemy, on a real SQLite."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, ForeignKey, create_engine, event, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from halfway.client import SyncHalfway
from halfway.client.barrier import Barrier
from halfway.client.sqlalchemy import SessionProducer
from tests.support.rest.client import RestWorld
from tests.support.waiting import eventually


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)
    parent: Mapped[str | None] = mapped_column(ForeignKey("orders.id", deferrable=True, initially="DEFERRED"))


class Shop:
    """A service with an engine, a client and a producer."""

    def __init__(self, url: str, path: Path) -> None:
        self.engine = create_engine(f"sqlite:///{path}")
        transactional(self.engine)
        self.barrier = Barrier("sqlite", self.engine.begin)
        self.barrier.create()
        Base.metadata.create_all(self.engine)
        self.client = SyncHalfway(url, "shop", barrier=self.barrier, prepare_timeout_s=60)
        self.producer = SessionProducer(self.client)

    def close(self) -> None:
        self.client.close()
        self.engine.dispose()

    def count(self, table: str = "orders") -> int:
        with self.engine.begin() as connection:
            return int(connection.execute(text(counting(table))).scalar_one())


def counting(table: str) -> str:
    """Return a function that counts the rows of a table, without the barrier's row that belongs to no transaction."""
    return f"SELECT count(*) FROM {table}" + (" WHERE transaction_id <> '#table'" if table != "orders" else "")  # noqa: S608 - a constant name


def transactional(engine: Engine) -> None:
    """Keep SQLite's driver from managing transactions, as SQLAlchemy's documentation describes for savepoints."""

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")


async def run(shop: Shop, service: Callable[[Shop], None], raises: type[Exception] | None = None) -> None:
    """Run a service in a thread, and wait for its ends."""

    def work() -> None:
        with pytest.raises(raises) if raises else nullcontext():
            service(shop)
        shop.client.close()

    await asyncio.to_thread(work)


def values(world: RestWorld, topic: str = "orders") -> list[bytes | None]:
    return [record.value for record in world.memory.records(topic)]


def prepares(world: RestWorld) -> int:
    return sum(count for (operation, _), count in world.requests.counts.items() if operation in {"prepare", "end"})


async def final_state(world: RestWorld, transaction_id: str) -> str:
    """Return the state after the end in the background is done."""
    shown = await eventually(lambda: world.show(transaction_id), lambda shown: shown.body["state"] != "prepared")
    return str(shown.body["state"])
