"""Instances of the real coordinator with the real Kafka adapter, on one simulated cluster and one machine.

Everything from the service's interface to librdkafka is `running_backend`, as in production. What stands in for the
surroundings: `SimulatedKafka`, calls between instances without a socket, check endpoints, and APScheduler.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final
from unittest.mock import patch

import structlog
from pydantic import SecretStr

from halfway.app.serve import backend as backends
from halfway.app.serve import scheduler as schedulers
from halfway.app.settings import Settings
from halfway.coordinator import logging as summaries
from halfway.coordinator.coordinator import Coordinator
from halfway.coordinator.ports import CheckReply, CheckRequest, OwnerHint
from halfway.coordinator.records import (
    PeerCall,
    decode_answers,
    decode_call,
    decode_calls,
    decode_result,
    encode_answer,
    encode_call,
    encode_message,
)
from halfway.kafka.clients import threads, transactional_producer
from halfway.kafka.clients.seam import Clients
from halfway.protocol.errors import HalfwayError, PeerLostError, ShardUnavailableError
from halfway.protocol.principal import Principal
from halfway.protocol.records import Group
from halfway.simulated import SimulatedHost, SimulatedKafka
from halfway.simulated import cluster as clusters
from tests.simulation.machine import PROCESS, Machine, Process, Schedule

STOP_S: Final = 15.0
PREFIX: Final = "_halfway."

Check = Callable[[CheckRequest], Awaitable[CheckReply]]


class Observer:
    """An observer that forgets everything."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _forget


def _forget(*_: object, **__: object) -> None:
    """Forget a call."""


class Jobs:
    """APScheduler, as far as `ScanScheduler` uses it: jobs at intervals of the monotonic clock, each once at a time."""

    def __init__(self, timezone: str, logger: logging.Logger) -> None:
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self.running = False

    def start(self) -> None:
        self.running = True

    def shutdown(self, *, wait: bool) -> None:
        self.running = False
        for task in self._jobs.values():
            task.cancel()
        self._jobs.clear()

    def add_job(self, work: Callable[..., Awaitable[None]], kind: str, **how: Any) -> None:
        if how["id"] in self._jobs:
            self.remove_job(how["id"])
        self._jobs[how["id"]] = asyncio.create_task(self._repeat(work, how["args"], how["seconds"]))

    @staticmethod
    async def _repeat(work: Callable[..., Awaitable[None]], args: Sequence[Any], seconds: float) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time()
        while True:
            at = max(at + seconds, loop.time())
            await asyncio.sleep(at - loop.time())
            running = asyncio.ensure_future(work(*args))  # a job that is armed anew ends a scan at its next start only
            await asyncio.shield(running)

    def get_job(self, name: str) -> object:
        return self._jobs.get(name)

    def remove_job(self, name: str) -> None:
        self._jobs.pop(name).cancel()


class Instance:
    """One process with a coordinator. `start` it once; a restarted one is another object."""

    def __init__(self, world: World, name: str, clock_s: float) -> None:
        self.world = world
        self.process = Process(name, clock_s=clock_s)
        self.host: SimulatedHost = world.kafka.host()
        self.url = f"http://{name}.invalid:8080"
        self.backend: backends.Backend | None = None
        self.died: BaseException | None = None
        self.stopping = asyncio.Event()
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self.process)
        self.process.globals["closer"] = self.context.run(threads.ClientCloser)
        self.process.globals["instance"] = self
        self.task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def coordinator(self) -> Coordinator | None:
        return None if self.backend is None else self.backend.coordinator

    @property
    def is_ready(self) -> bool:
        return self.backend is not None and self.backend.readiness.reason() is None

    @property
    def is_busy(self) -> bool:
        """Whether a call is still under way."""
        return bool(self._tasks)

    def start(self) -> None:
        self.task = asyncio.get_running_loop().create_task(self._run(), context=self.context)

    async def _run(self) -> None:
        world = self.world
        clients = Clients(producer=self.host.producer, consumer=self.host.consumer, admin=self.host.admin)
        config = replace(world.settings.kafka_config(self.url), clients=clients)
        try:
            # Not an `async with` block: if the process is killed, nothing of what ends it may run.
            running = backends.running_backend.__wrapped__(world.settings, config, Observer())  # type: ignore[attr-defined]
            self.backend = backend = await anext(running)
            await self.stopping.wait()
            backend.leave_by = asyncio.get_running_loop().time() + STOP_S
            await backend.coordinator.drain()
            await anext(running, None)
        except BaseException as error:
            self.died = error
            raise
        finally:
            self.backend = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something in the process, which calls this."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def kill(self) -> None:
        """End the process at once; what is on the network may still arrive."""
        self.process.dead = True
        self.host.cut()


class Peers:
    """Calls between instances: frames that are delayed, or lost with a link."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def ask(self, owner: OwnerHint, call: PeerCall, *, deadline: float, principal: Principal) -> Any:
        loop = asyncio.get_running_loop()
        within_ms = int((deadline - loop.time()) * 1000)
        other = self._world.at(owner.url)
        if (
            within_ms <= 0
            or other is None
            or other.backend is None
            or other.backend.status.incarnation != owner.incarnation
        ):
            raise ShardUnavailableError("the owner of the shard could not be called: try again")
        frame = encode_message([encode_call(1, call, within_ms=within_ms, principal=principal)])
        answer: asyncio.Future[bytes] = loop.create_future()
        net, mine = self._world.network, contextvars.copy_context()

        async def serve() -> None:
            [read] = decode_calls(frame)
            backend = other.backend
            if backend is None or backend.status.incarnation != owner.incarnation:
                body = encode_answer(1, ShardUnavailableError("another incarnation"))
            else:
                try:
                    result = await backend.coordinator.peer_handler.answer(
                        decode_call(read.call), deadline=loop.time() + read.within_ms / 1000, principal=read.caller
                    )
                    body = encode_answer(1, result)
                except HalfwayError as error:
                    body = encode_answer(1, error)
                except TimeoutError:
                    body = encode_answer(1, PeerLostError("not in time"))
            delay_s = net.delay()
            if delay_s is not None:
                loop.call_later(delay_s, _put, answer, encode_message([body]), context=mine)

        delay_s = net.delay()
        if delay_s is not None:
            loop.call_later(delay_s, lambda: other.spawn(serve()), context=other.context.copy())
        try:
            async with asyncio.timeout_at(deadline):
                [got] = decode_answers(await answer)
        except TimeoutError:
            raise PeerLostError("not in time") from None
        return decode_result(call, got)

    async def reaches(self, owner: OwnerHint) -> bool:
        return self._world.at(owner.url) is not None


def _put(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


class Caller:
    """The checks of an instance, over a network."""

    def __init__(self, world: World) -> None:
        self._world = world

    def refusal(self, url: str) -> str | None:
        return None

    async def call(self, group: Group, urls: Sequence[str], request: CheckRequest) -> CheckReply:
        return await self._world.check(request)


@dataclass
class Network:
    """How long a message takes, and whether it arrives."""

    machine: Machine
    usual_s: tuple[float, float] = (0.0002, 0.002)
    late_share: float = 0.0
    late_s: float = 3.0
    lost_share: float = 0.0

    def delay(self) -> float | None:
        """Return how long the next message takes, None if it is lost."""
        chance = self.machine.random
        kind = chance.random()
        if kind < self.lost_share:
            return None
        if kind < self.lost_share + self.late_share:
            return chance.uniform(0, self.late_s)
        return chance.uniform(*self.usual_s)


@dataclass
class World:
    """One cluster, its instances, and what is between them."""

    machine: Machine
    kafka: SimulatedKafka
    settings: Settings
    network: Network
    check: Check
    instances: list[Instance] = field(default_factory=list)
    """Those that live, or are stopping."""
    started: int = 0

    def at(self, url: str) -> Instance | None:
        """Return the living instance at a URL."""
        return next((one for one in self.instances if one.url == url and not one.process.dead), None)

    def start(self, clock_s: float = 0.0, replaces: Instance | None = None) -> Instance:
        """Start an instance, in the place of another one if one is given."""
        self.started += 1
        instance = Instance(self, f"i{self.started}", clock_s)
        if replaces in self.instances:
            self.instances[self.instances.index(replaces)] = instance
        else:
            self.instances.append(instance)
        instance.start()
        return instance

    async def all_served(self) -> None:
        """Wait until the instances serve all shards."""
        while True:
            served = {s for one in self.instances if one.coordinator is not None for s in one.coordinator.shards.served}
            if len(served) == self.settings.shards and all(one.is_ready for one in self.instances):
                return
            await asyncio.sleep(0.05)

    async def call(self, instance: Instance, within_s: float, method: str, *args: Any) -> Any:
        """Call a method of an instance's coordinator as the REST handler does, over the network.

        Raises HalfwayError if it answers so, and TimeoutError if no answer comes.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        mine = contextvars.copy_context()

        async def serve() -> None:
            result: Any
            coordinator = instance.coordinator
            try:
                if coordinator is None:
                    raise ShardUnavailableError("it has not started")
                if method == "lease_checks":
                    result = await coordinator.lease_checks(*args, at_most=10, wait_s=0)
                else:
                    deadline = loop.time() + self.settings.request_timeout_s
                    async with asyncio.timeout_at(deadline):
                        result = await getattr(coordinator, method)(*args, deadline=deadline)
            except (HalfwayError, TimeoutError) as error:
                result = error
            delay_s = self.network.delay()
            if delay_s is not None:
                loop.call_later(delay_s, _put, answer, result, context=mine)

        delay_s = self.network.delay()
        if delay_s is not None:
            loop.call_later(delay_s, lambda: instance.spawn(serve()), context=instance.context.copy())
        async with asyncio.timeout(within_s):
            result = await answer
        if isinstance(result, Exception):
            raise result
        return result


def new_settings(**over: Any) -> Settings:
    values: dict[str, Any] = {
        "kafka": {"bootstrap.servers": SecretStr("simulated.invalid:9092")},
        "kafka_prefix": PREFIX,
        "shards": 2,
        "open_access": True,
        "peer_credential": SecretStr("0123456789abcdef" * 4),
        "session_timeout_s": 6,
        "min_check_interval_s": 0.5,
        "replication_factor": 1,
    }
    return Settings(**{**values, **over})


class Closer:
    """`threads.CLOSER` of the process that asks; the real one for a real thread, left by a test before."""

    def __getattr__(self, name: str) -> Any:
        return getattr(PROCESS.get().globals.get("closer", _REAL_CLOSER), name)


_REAL_CLOSER: Final = threads.CLOSER


@asynccontextmanager
async def _caller(world: World) -> AsyncIterator[Caller]:
    yield Caller(world)


@contextmanager
def replaced(patches: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give attributes other values for a time: owner, name, value."""
    with ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(patch.object(owner, name, value))
        yield


@contextmanager
def surroundings(get_world: Callable[[], World]) -> Iterator[None]:
    """Put the stand-ins in the place of the surroundings."""

    async def peers(stack: AsyncExitStack, settings: Settings) -> Peers:
        return Peers(get_world())

    def keep_quiet(*_: object, **__: object) -> None:
        """Write no summary."""

    closer = Closer()
    patches: list[tuple[Any, str, Any]] = [
        (backends, "_peers", peers),
        (backends, "check_caller", lambda *_: _caller(get_world())),
        (schedulers, "AsyncIOScheduler", Jobs),
        (summaries.LogSummary, "note", keep_quiet),
        (threads, "CLOSER", closer),
        (transactional_producer, "CLOSER", closer),
        (clusters, "Schedule", Schedule),
    ]
    with replaced(patches):
        yield


def silence() -> None:
    """Log nothing."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL), cache_logger_on_first_use=False
    )
