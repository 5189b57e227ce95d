"""Producers and consumers that are killed, messages that come twice, and a count of effects against orders."""

import asyncio
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Producer, TopicPartition
from sqlalchemy import Engine, text

from halfway.client import CheckWorker, Halfway, SyncHalfway
from halfway.client.barrier import Barrier, Store
from halfway.client.consumer import Inbox, Record
from halfway.embedded.process import SupervisedProcess
from tests.support.effects.services import database, values_of

PARTITIONS = 4
PROCESSES = ("produce", "produce", "consume", "consume_async")
OPEN: Final[tuple[Literal["prepared", "parked"], ...]] = ("prepared", "parked")
COPY = "copy"
COPIED = 0.1
"""Of the messages that one process, such as a mirror, writes again."""
LAST = "SELECT id FROM effects WHERE id LIKE 'last/%'"
PLACED_IN_AN_OUTAGE = 50
REST_WITHIN_S = 300.0
SERVICES = Path(__file__).with_name("services.py")
SOON = {"first_check_after_s": 1, "check_interval_s": 1, "max_interval_s": 1, "max_checks": 1000}


class Story:
    """Two processes of each service over one topic; `play` returns how many of each thing happened."""

    def __init__(
        self,
        url: str | list[str],
        bootstrap_servers: str,
        topic: str,
        databases: tuple[str, str],
        folder: Path,
        seed: int,
        *,
        stores: bool = False,
        pause_s: float = 0.0,
    ) -> None:
        """Take the URLs of the orders' database and of the effects'; both are empty, and nobody else uses them.

        With `stores` the producers go on while halfway is away. Each of their threads pauses between orders.
        """
        self._chance = random.Random(seed)
        self._bootstrap_servers = bootstrap_servers
        self._topic = topic
        self._folder = folder
        self._group = f"effects-{self._chance.getrandbits(32):08x}"
        self._given: dict[str, Any] = {
            "url": url,
            "bootstrap_servers": bootstrap_servers,
            "topic": topic,
            "group": self._group,
            "orders": databases[0],
            "effects": databases[1],
            "stores": stores,
            "pause_s": pause_s,
        }
        self._stores = stores
        self._orders, self._effects = map(database, databases)
        self._barrier = Barrier(self._orders.dialect.name, self._orders.begin, store=Store() if stores else None)
        self._running: list[SupervisedProcess] = []
        self._copies = 0

    def play(
        self, orders: int, kills: int, outages: Sequence[Callable[[], AbstractContextManager[None]]] = ()
    ) -> Mapping[str, int]:
        """Go on until so many orders have committed and so many processes were killed; then compare.

        Each of the `outages` happens once meanwhile, and lasts until the producers have placed orders in it.
        """
        with ExitStack() as stack:
            stack.enter_context(self._tables())
            client = stack.enter_context(
                SyncHalfway(self._given["url"], self._group, barrier=self._barrier if self._stores else None)
            )
            if self._stores:
                client.start(topics=[self._topic], policy=SOON)
            else:
                client.register(topics=[self._topic], policy=SOON)
                client.run_in_background(lambda inner: CheckWorker(inner, self._barrier.decide, wait_s=1).run())
            copying = stack.enter_context(self._copying())
            stack.callback(self._kill, range(len(PROCESSES)))
            self._running = [self._start(service) for service in PROCESSES]
            killed, stored, left = 0, 0, list(outages)
            while killed < kills or left or self._count(self._orders, "orders") < orders:
                time.sleep(self._chance.uniform(0.2, 1))
                share = self._count(self._orders, "orders") / orders
                if left and share > 1 - len(left) / (len(outages) + 1):
                    stored += self._live_through(left.pop(0))
                elif killed < kills * share:
                    self._replace(self._chance.randrange(len(PROCESSES)))
                    killed += 1
            committed = self._come_to_an_end(copying)
        return {"orders": len(committed), "kills": killed, "copies": self._copies, "stored": stored}

    def _come_to_an_end(self, copying: threading.Event) -> Sequence[str]:
        """Place no more orders, wait until each has taken effect, and compare; return the orders."""
        self._kill([slot for slot, service in enumerate(PROCESSES) if service == "produce"])
        self._until_ended()
        copying.set()
        self._until_read()
        consumers = zip(PROCESSES, self._running, strict=True)
        assert [name for name, process in consumers if name != "produce" and process.poll() is not None] == []
        committed = self._column(self._orders, "SELECT id FROM orders")
        self._compare(committed)
        return committed

    def _live_through(self, outage: Callable[[], AbstractContextManager[None]]) -> int:
        """Return how many transactions were stored when the outage ended; a producer starts in the middle of it."""
        with outage():
            self._replace(PROCESSES.index("produce"))
            before = self._count(self._orders, "orders")

            def go_on() -> bool:
                placed = self._count(self._orders, "orders") - before
                return placed >= PLACED_IN_AN_OUTAGE and self._barrier.stored().waiting >= PLACED_IN_AN_OUTAGE

            self._wait(go_on, "no orders are placed while halfway is away")
            return self._barrier.stored().waiting

    def _replace(self, slot: int) -> None:
        self._kill([slot])
        self._running[slot] = self._start(PROCESSES[slot])

    @contextmanager
    def _tables(self) -> Iterator[None]:
        """Make the tables; leave no connection behind at the end."""
        try:
            self._barrier.create()
            Inbox(self._effects.dialect.name, self._effects.begin).create()
            for engine, table in (
                (self._orders, "orders (id varchar(40) PRIMARY KEY)"),
                (self._effects, "effects (id varchar(40))"),
            ):
                with engine.begin() as connection:
                    connection.execute(text(f"CREATE TABLE {table}"))
            yield
        finally:
            self._orders.dispose()
            self._effects.dispose()

    def _start(self, service: str) -> SupervisedProcess:
        given = json.dumps({**self._given, "seed": self._chance.getrandbits(32)})
        command = [sys.executable, "-m", "tests.support.effects.services", service, given]
        return SupervisedProcess(command, cwd=SERVICES.parents[3], log_path=self._folder / f"{service}.log")

    def _kill(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._running[slot].kill()

    @contextmanager
    def _copying(self) -> Iterator[threading.Event]:
        """Write some of the messages again, as they are, until the event is set and the topic is read to its end."""
        stop = threading.Event()
        thread = threading.Thread(target=self._copy, args=(stop, random.Random(self._chance.random())))
        thread.start()
        try:
            yield stop
        finally:
            stop.set()
            thread.join()

    def _copy(self, stop: threading.Event, chance: random.Random) -> None:
        kafka: dict[str, str | int] = {"bootstrap.servers": self._bootstrap_servers, "log_level": 0}
        producer = Producer(kafka)
        reader = Consumer({**kafka, "group.id": f"{self._group}-copies", "auto.offset.reset": "earliest"})
        reader.subscribe([self._topic])
        try:
            while not stop.is_set():
                for message in reader.consume(100, timeout=0.1):
                    headers = Record.of(message).headers
                    if (COPY, b"") not in headers and chance.random() < COPIED:
                        partition = chance.randrange(PARTITIONS)
                        producer.produce(
                            self._topic, message.value(), message.key(), partition, headers=[*headers, (COPY, b"")]
                        )
                        self._copies += 1
                producer.poll(0)
        finally:
            reader.close()
            producer.flush(REST_WITHIN_S)
            producer.close()

    def _until_ended(self) -> None:
        """Wait until nothing is stored, and check-back has ended what the killed producers left."""

        async def none_open() -> bool:
            async with Halfway(self._given["url"], self._group) as client:
                return not [one for state in OPEN async for one in client.list_ids(state=state)]

        if self._stores:
            self._wait(lambda: self._barrier.stored().waiting == 0, "messages are still stored")
            assert self._barrier.stored().parked == 0

        self._wait(lambda: asyncio.run(none_open()), "transactions are still open")

    def _until_read(self) -> None:
        """Wait until the consumers have passed what stands in every partition now, copies included."""
        last = [f"last/{partition}" for partition in range(PARTITIONS)]
        producer = Producer({"bootstrap.servers": self._bootstrap_servers})
        for partition, value in enumerate(last):
            producer.produce(self._topic, value, partition=partition)
        producer.flush(REST_WITHIN_S)
        producer.close()
        while not set(last) <= set(self._column(self._effects, LAST)):
            seen = self._count(self._effects, "effects")
            # The last one may come between the two looks.
            self._wait(partial(self._gets_on, seen, last), "the consumers do not get to the end")

    def _gets_on(self, seen: int, last: Sequence[str]) -> bool:
        return self._count(self._effects, "effects") > seen or set(last) <= set(self._column(self._effects, LAST))

    def _compare(self, committed: Sequence[str]) -> None:
        wanted = {value for order in committed for value in values_of(order)}
        written = self._written()
        assert {value: times for value, times in written.items() if times > 1} == {}
        assert sorted(wanted ^ set(written)) == []
        found = Counter(
            effect for effect in self._column(self._effects, "SELECT id FROM effects") if not effect.startswith("last/")
        )
        assert {effect: times for effect, times in found.items() if times > 1} == {}
        assert sorted(wanted - set(found)) == []
        assert sorted(set(found) - wanted) == []

    def _written(self) -> Counter[str]:
        """Count what stands in the topic, without the copies and the marks of the end."""
        written: Counter[str] = Counter()
        reader = Consumer(
            {"bootstrap.servers": self._bootstrap_servers, "group.id": self._group, "enable.partition.eof": True}
        )
        reader.assign([TopicPartition(self._topic, partition, OFFSET_BEGINNING) for partition in range(PARTITIONS)])
        at_end = set[int | None]()
        deadline = time.monotonic() + REST_WITHIN_S
        while len(at_end) < PARTITIONS:
            assert time.monotonic() < deadline, f"{len(at_end)} partitions of {PARTITIONS} were read to their end"
            for message in reader.consume(1000, timeout=1):
                if (error := message.error()) is not None:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    at_end.add(message.partition())
                elif (COPY, b"") not in (message.headers() or ()):
                    written[(message.value() or b"").decode()] += 1
        reader.close()
        return Counter({value: times for value, times in written.items() if not value.startswith("last/")})

    def _wait(self, there: Callable[[], bool], trouble: str) -> None:
        deadline = time.monotonic() + REST_WITHIN_S
        while not there():
            logs = "".join(path.read_text()[-4000:] for path in self._folder.glob("*.log"))
            assert time.monotonic() < deadline, f"{trouble}; the logs:\n{logs}"
            time.sleep(0.2)

    def _count(self, engine: Engine, table: str) -> int:
        return int(self._column(engine, f"SELECT count(*) FROM {table}")[0])  # noqa: S608 - no input

    def _column(self, engine: Engine, select: str) -> list[str]:
        with engine.begin() as connection:
            return [str(value) for value in connection.execute(text(select)).scalars()]
