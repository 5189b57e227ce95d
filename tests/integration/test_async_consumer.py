"""The asynchronous consumer on a real broker, with SQLite behind SQLAlchemy: the rules are the blocking one's."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import NullPool, text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from halfway.client.consumer import AsyncConsumer, AsyncInbox, Record
from tests.integration.test_consumer import GENEROUS_S, QUICK, Shop
from tests.support.brokers.fixtures import Kafka
from tests.support.waiting import until_true


class AsyncShop(Shop):
    """The same topics and database, used by tasks."""

    def __init__(self, kafka: Kafka, folder: Path, stack: ExitStack) -> None:
        super().__init__(kafka, folder, stack)
        engine = create_async_engine(f"sqlite+aiosqlite:///{self.database}", poolclass=NullPool)
        self.async_inbox = AsyncInbox("sqlite", engine.begin)

    def consumer(self, handle: Callable[[Record, Any], Awaitable[Any]], **changes: Any) -> AsyncConsumer:
        given: dict[str, Any] = {"retries": QUICK, "dead_letter_topic": self.dead, **changes}
        return AsyncConsumer(
            self.settings, group=self.group, topics=[self.topic], handle=handle, inbox=self.async_inbox, **given
        )

    async def taken(self, *effects: str) -> None:
        await until_true(lambda: sorted(self.effects()) == sorted(effects), what=f"{effects} have taken effect")


@pytest.fixture
async def shop(kafka: Kafka, tmp_path: Path) -> AsyncIterator[AsyncShop]:
    with ExitStack() as stack:
        yield await asyncio.to_thread(AsyncShop, kafka, tmp_path, stack)


async def note(record: Record, connection: AsyncConnection) -> None:
    await connection.execute(text("INSERT INTO effects VALUES (:what)"), {"what": (record.value or b"").decode()})


async def test_each_message_takes_effect_once_and_a_poisoned_one_is_set_aside(shop: AsyncShop) -> None:
    """The loop is free meanwhile; what follows the commit is awaited, and its failure undoes nothing."""
    tries: Counter[bytes | None] = Counter()
    seen: list[list[str]] = []

    async def handle(record: Record, connection: AsyncConnection) -> Callable[[], Awaitable[None]]:
        tries[record.value] += 1
        await asyncio.sleep(0)
        await note(record, connection)
        if record.value == b"poison":
            raise ValueError("no such parcel")
        if record.value == b"cancelled" and tries[record.value] == 1:
            raise asyncio.CancelledError

        async def afterwards() -> None:
            seen.append(await asyncio.to_thread(shop.effects))
            raise ValueError("halfway is away")

        return afterwards

    await asyncio.to_thread(shop.produce, "poison", "cancelled", "twice", message="3-01/1")
    consumer = shop.consumer(handle)
    running = asyncio.create_task(consumer.run())
    await shop.taken("cancelled", "twice")
    await asyncio.to_thread(shop.produce, "twice", message="3-01/1")
    await until_true(lambda: shop.committed()[0] == 4, what="the copy was read")
    consumer.stop()
    await running
    assert (tries[b"poison"], tries[b"cancelled"], tries[b"twice"]) == (QUICK.attempts, 2, 1)
    assert seen == [["cancelled"], ["cancelled", "twice"]]
    (letter,) = await asyncio.to_thread(shop.dead_letters, 1)
    assert (letter.value, letter.header("dead-letter-reason")) == (b"poison", b"ValueError: no such parcel")


async def test_a_cancelled_consumer_leaves_its_message_to_the_next(shop: AsyncShop) -> None:
    """Its transaction is rolled back, also if there is only one attempt; it leaves the group and ends its thread."""
    reached = asyncio.Event()

    async def hang(record: Record, connection: AsyncConnection) -> None:
        await note(record, connection)
        reached.set()
        await asyncio.Event().wait()

    await asyncio.to_thread(shop.produce, "one")
    running = asyncio.create_task(shop.consumer(hang).run())
    await reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert shop.effects() == []
    next_one = shop.consumer(note)
    running = asyncio.create_task(next_one.run())
    await shop.taken("one")
    next_one.stop()
    await running


async def test_a_cancellation_between_two_messages_reaches_the_next_one(
    shop: AsyncShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer's thread has read a message, and has not given it to the event loop yet."""
    handled: list[bytes | None] = []
    read, cancelled = threading.Event(), threading.Event()

    async def handle(record: Record, connection: AsyncConnection) -> None:
        handled.append(record.value)
        await note(record, connection)

    def apply(self: AsyncConsumer, pending: Any) -> Any:
        if pending.record.value == b"two":
            read.set()
            assert cancelled.wait(GENEROUS_S)
        return _apply(self, pending)

    _apply = AsyncConsumer._apply
    monkeypatch.setattr(AsyncConsumer, "_apply", apply)
    await asyncio.to_thread(shop.produce, "one", "two")
    running = asyncio.create_task(shop.consumer(handle).run())
    await asyncio.to_thread(read.wait, GENEROUS_S)
    running.cancel()
    await asyncio.sleep(0)  # `run` learns of it
    cancelled.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (handled, shop.effects()) == ([b"one"], ["one"])


async def test_a_handler_that_is_cancelled_while_the_consumer_stops_has_failed(shop: AsyncShop) -> None:
    """`run` returns, and the next consumer gets the message."""

    async def handle(record: Record, connection: AsyncConnection) -> None:
        consumer.stop()
        raise asyncio.CancelledError

    await asyncio.to_thread(shop.produce, "one")
    consumer = shop.consumer(handle)
    await consumer.run()
    next_one = shop.consumer(note)
    running = asyncio.create_task(next_one.run())
    await shop.taken("one")
    next_one.stop()
    await running


async def test_partitions_change_hands_without_an_effect_lost_or_repeated(shop: AsyncShop) -> None:
    """One of the consumers is cancelled, in the middle of whatever it does."""
    wanted = [f"m{number}" for number in range(40)]

    async def handle(record: Record, connection: AsyncConnection) -> None:
        await note(record, connection)
        await asyncio.sleep(0.01)

    first = asyncio.create_task(shop.consumer(handle).run())
    for number, value in enumerate(wanted):
        await asyncio.to_thread(shop.produce, value, partition=number % 2)
    await until_true(lambda: len(shop.effects()) > 5, what="the first has begun")
    second = shop.consumer(handle)
    running = asyncio.create_task(second.run())
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await shop.taken(*wanted)
    second.stop()
    await running
    for partition in (0, 1):
        assert [what for what in shop.effects() if int(what[1:]) % 2 == partition] == wanted[partition::2]
