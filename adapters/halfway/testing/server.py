"""Both servers: the REST interface, in an event loop in its own thread, on a broker in memory or on a real one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from uuid import uuid4

import msgspec
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined] # public, but not for mypy
from pydantic import SecretStr

from halfway.app.metrics import Metrics
from halfway.app.serve.backend import running_backend
from halfway.app.settings import Settings
from halfway.checks import LOOPBACK_NETWORKS
from halfway.client.consumer import Record
from halfway.coordinator.coordinator import Coordinator
from halfway.coordinator.operations import Operation
from halfway.coordinator.requests import End, EndResult
from halfway.http.console import Console
from halfway.http.requests.admission import ApiLimits
from halfway.http.server.api import Api
from halfway.http.server.server import HttpServer
from halfway.kafka.clients.config import MIB, KafkaConfig
from halfway.kafka.clients.reader import Reader, ends
from halfway.kafka.clients.seam import Clients
from halfway.protocol.transactions import Outcome
from halfway.simulated import SimulatedKafka

T = TypeVar("T")

_HOST: Final = "127.0.0.1"
_START_S: Final = 120.0
_TIMEOUT_S: Final = 30.0
_DRAIN_S: Final = 5.0
_POLL_S: Final = 0.02


class ServerError(Exception):
    """The server cannot do what the test requests; the message says what to change."""


class Server:
    """A coordinator on a free port of 127.0.0.1 while its `with` block runs.

    Its clients may be written in any language. It scans for due checks every 0.1 s; the shortest check interval of a
    group is 0.1 s too.
    """

    def __init__(self, bootstrap_servers: str, clients: Clients) -> None:
        """Prepare the settings. Nothing is started yet."""
        self._bootstrap_servers = bootstrap_servers
        self._clients = clients
        self.url = ""
        """The URL of the coordinator, such as http://127.0.0.1:40123."""
        self._settings = Settings(
            kafka_prefix=f"_halfway-test-{uuid4().hex[:12]}.",
            shards=2,
            min_check_interval_s=0.1,
            check_timeout_s=2,
            session_timeout_s=6,
            check_also_networks=LOOPBACK_NETWORKS,
        )
        self._metrics = Metrics()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="halfway-testing", daemon=True)
        self._broker = AsyncExitStack()
        """What outlives a restart."""
        self._stack = AsyncExitStack()
        """The coordinator."""
        self._listening = AsyncExitStack()
        self._port = 0
        self._ends_to_lose = 0
        self._outages = 0
        """How many blocks of `down` are open."""
        self._holds = 0
        """The same of `checks_held`."""

    def __enter__(self) -> Self:
        """Start, and return once requests are served."""
        self._thread.start()
        try:
            self._run(self._start())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the requests in flight, and stop."""
        try:
            self._run(self._stop())
            self._run(self._broker.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def create_topic(self, name: str, *, partitions: int = 3) -> None:
        """Create a real topic; raises ServerError if it exists."""
        admin = self._kafka_config.make_admin()
        (future,) = admin.create_topics([NewTopic(name, partitions)], operation_timeout=_TIMEOUT_S).values()
        try:
            future.result(_TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
            raise ServerError(f"the topic {name} exists: give another name, or use new_topic") from None
        deadline = time.monotonic() + _TIMEOUT_S
        while name not in admin.list_topics(timeout=_TIMEOUT_S).topics and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def records(self, topic: str) -> Sequence[Record]:
        """Return the records that a `read_committed` consumer sees in a topic now, by partition and offset."""
        config = self._kafka_config
        records: list[Record] = []
        deadline = time.monotonic() + _TIMEOUT_S

        def check() -> None:
            if time.monotonic() > deadline:
                raise ServerError(f"{topic} could not be read to its end in {_TIMEOUT_S:g} s")

        try:
            with Reader(config) as reader:
                places = reader.places(topic, _TIMEOUT_S)
                # These include records that were just committed and are not visible yet.
                targets = ends(config.make_admin(), places, check)
                reader.add(dict.fromkeys(places, 0))
                while not reader.read_until(
                    targets, time.monotonic() + _POLL_S, lambda _, message: records.append(Record.of(message))
                ):
                    check()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
            raise ServerError(f"the topic {topic} does not exist: create it with create_topic") from None
        return sorted(records, key=lambda record: (record.partition, record.offset))

    def new_topic(self, prefix: str = "topic", *, partitions: int = 3) -> str:
        """Create a topic with a unique name that starts with `prefix`, and return the name."""
        name = f"{prefix}-{uuid4().hex[:12]}"
        self.create_topic(name, partitions=partitions)
        return name

    def wait_for_records(self, topic: str, count: int, *, within_s: float = 30.0) -> Sequence[Record]:
        """Return a topic's records as soon as there are at least `count`; raises ServerError if they do not come."""
        deadline = time.monotonic() + within_s
        while len(records := self.records(topic)) < count:
            if time.monotonic() > deadline:
                raise ServerError(f"{topic} has {len(records)} records after {within_s:g} s, not {count}")
            time.sleep(_POLL_S)
        return records

    @contextmanager
    def down(self) -> Iterator[None]:
        """Answer nobody within the block: connections are closed and refused. Afterwards the same URL answers again."""
        self._outages += 1
        self._run(self._listening.aclose())
        try:
            yield
        finally:
            self._outages -= 1
            if not self._outages:
                self._run(self._listen())

    def restart(self) -> None:
        """Stop the coordinator, and start another one at the same URL, which reads again what has been stored."""
        self._run(self._stop())
        self._stack, self._listening = AsyncExitStack(), AsyncExitStack()
        self._run(self._start())

    def lose_ends(self, count: int = 1) -> None:
        """Lose the next `count` ends, as if their service had crashed before it sent them: a check has to follow.

        Their callers are answered as if nothing had happened.
        """
        self._ends_to_lose = count

    @contextmanager
    def checks_held(self) -> Iterator[None]:
        """Send no checks within the block, also if they are due."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    @property
    def _kafka_config(self) -> KafkaConfig:
        properties = {"bootstrap.servers": self._bootstrap_servers}
        return KafkaConfig(properties=properties, max_prepare_bytes=MIB, clients=self._clients)

    async def _start_broker(self) -> None:
        """Start the broker, if this server has one of its own that does not run."""

    async def _coordinator(self, stack: AsyncExitStack) -> Coordinator:
        """Return a coordinator that serves every shard until the stack is closed."""
        await self._start_broker()
        kafka = {"bootstrap.servers": SecretStr(self._bootstrap_servers)}
        settings = self._settings.model_copy(update={"kafka": kafka})
        config = settings.kafka_config(f"http://{self._settings.kafka_prefix.strip('._')}.invalid")
        config = replace(config, clients=self._clients)
        backend = await stack.enter_async_context(running_backend(settings, config, self._metrics))
        while backend.readiness.reason() is not None:
            backend.demand_permission()
            await asyncio.sleep(_POLL_S)
        return backend.coordinator

    async def _start(self) -> None:
        self._served = coordinator = await self._coordinator(self._stack)
        end, scan = coordinator.end, coordinator.scan

        def lossy(request: End, **options: Any) -> Operation[EndResult]:
            if self._ends_to_lose > 0:
                self._ends_to_lose -= 1
                request = msgspec.structs.replace(request, outcome=Outcome.UNKNOWN)
            return end(request, **options)

        async def holding(shard: int, now: int) -> None:
            if not self._holds:
                await scan(shard, now)

        coordinator.end, coordinator.scan = lossy, holding  # type: ignore[method-assign]  # the faults of this server
        self._stack.push_async_callback(coordinator.drain)
        if not self._outages:
            await self._listen()

    async def _listen(self) -> None:
        api = Api(
            self._served,
            internal_prefix=self._settings.kafka_prefix,
            observer=self._metrics,
            limits=ApiLimits(request_timeout_s=self._settings.request_timeout_s),
        )
        server = HttpServer(api, console=Console())
        self._port = await server.start(_HOST, self._port)
        self.url = f"http://{_HOST}:{self._port}"

        async def stop() -> None:
            await server.close_port()
            await api.drain(asyncio.get_running_loop().time() + _DRAIN_S)
            await server.stop()

        self._listening.push_async_callback(stop)

    async def _stop(self) -> None:
        await self._listening.aclose()
        await self._stack.aclose()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_S)


class MemoryServer(Server):
    """A coordinator with a Kafka broker in this process' memory. It starts at once, and loses everything at its end."""

    def __init__(self) -> None:
        """Create the broker. Nothing is started yet."""
        # If the markers of a Kafka transaction took time, the next one would wait for them.
        host = SimulatedKafka(markers_s=(0.0, 0.0)).host()
        clients = Clients(producer=host.producer, consumer=host.consumer, admin=host.admin)
        super().__init__("memory.invalid:9092", clients)


class KafkaServer(Server):
    """A coordinator on a real broker: the given one, or an embedded one.

    The embedded broker needs the extra `embedded`, and takes some seconds to start.
    """

    def __init__(self, bootstrap_servers: str | None = None) -> None:
        """Take the broker. Nothing is started yet. On a given broker, internal topics with unique names remain."""
        super().__init__(bootstrap_servers or "", Clients())

    @property
    def bootstrap_servers(self) -> str:
        """The address of the broker."""
        return self._bootstrap_servers

    async def _start_broker(self) -> None:
        if not self._bootstrap_servers:
            from halfway.embedded import SHORT_LIVED, EmbeddedConfig, EmbeddedKafka

            broker = EmbeddedKafka(EmbeddedConfig(jvm_options=SHORT_LIVED))
            await asyncio.to_thread(broker.__enter__)
            self._broker.push_async_callback(asyncio.to_thread, broker.__exit__, None, None, None)
            self._bootstrap_servers = broker.bootstrap_servers
