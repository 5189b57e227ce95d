"""The tutorial works as written: every block of docs/python.md from "Consuming" on, in order."""

import asyncio
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer

from halfway.client.consumer import Consumer, Record, RejectedMessageError
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.topics import Cluster
from tests.support.waiting import eventually

PAGE = Path(__file__).parents[3] / "docs" / "python.md"
CONSUMING = PAGE.read_text(encoding="utf-8").partition("\n## Consuming\n")[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", CONSUMING, re.DOTALL | re.MULTILINE)
GENEROUS_S = 180.0


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """Yield the names that the blocks define; stop the consumers among them before the broker."""
    names: dict[str, Any] = {"__name__": "tutorial"}
    before = set(threading.enumerate())
    yield names
    for one in names.values():
        if isinstance(one, Consumer):
            one.stop()
    if "halfway" in names:
        names["halfway"].close()
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join(GENEROUS_S)


@contextmanager
def database() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect("shipping.sqlite")) as connection:
        yield connection


async def rows(table: str) -> list[tuple[object, ...]]:
    with database() as connection:
        return connection.execute(f"SELECT * FROM {table}").fetchall()  # noqa: S608 - a name from this file


async def test_every_block_runs(
    coordinator: CoordinatorProcess,
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: dict[str, Any],
) -> None:
    """An order is packed; an order that cannot be packed is cancelled and refunded."""
    monkeypatch.chdir(tmp_path)
    orders, dead, cancellations = await cluster.make_topics("orders", "orders-dead", "cancellations")
    replaced = {
        "http://halfway:8080": coordinator.url,
        "kafka:9092": cluster.bootstrap_servers,
        'topics=["orders"]': f'topics=["{orders}"]',
        '"orders-dead"': f'"{dead}"',
        '"cancellations"': f'"{cancellations}"',
        'group="': f'group="{uuid4().hex}-',
    }
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers})

    def order(number: str) -> None:
        producer.produce(orders, key=number, value=f'{{"order": "{number}", "total": 9.9}}')
        assert producer.flush(GENEROUS_S) == 0

    def run(block: str) -> None:
        for shown, real in replaced.items():
            block = block.replace(shown, real)
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 - the tutorial is ours

    order("42")
    await asyncio.to_thread(run, BLOCKS[0])
    await eventually(lambda: rows("parcels"), lambda found: found == [("42", 9.9)])
    for block in BLOCKS[1:]:
        await asyncio.to_thread(run, block)
    place: dict[str, Any] = {
        "topic": orders,
        "partition": 0,
        "offset": 0,
        "timestamp_ms": 0,
        "key": None,
        "headers": (),
    }
    with pytest.raises(RejectedMessageError), database() as connection:
        names["pack_strictly"](Record(**place, value=b'{"order": "43"}'), connection)
    order("44")
    await eventually(lambda: rows("refunds"), lambda found: ("44",) in found)
    assert ("44", 9.9) not in await rows("parcels")
