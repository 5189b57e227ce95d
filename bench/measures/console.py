"""Measures the cost of open consoles: event streams beside callers, in alternating slices with and without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined] # public, but not for mypy

from bench.figures import cpu_us, percentile
from bench.measures.limits import TOPIC, Service, Side
from bench.system.instance import Instance
from halfway.embedded import EmbeddedConfig, EmbeddedKafka
from halfway.embedded.ports import HOST

_READY_S: Final = 60.0
_LEAD_S: Final = 1.0
"""The unmeasured beginning of each slice."""
_EVENT: Final = b"event: statistics"


class ConsoleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the load."""

    callers: int = 64
    consoles: int = 100
    groups: int = 21
    """Groups in the statistics, besides the one with the load."""
    seconds: float = 6.0
    """The length of a slice."""
    slices: int = 8
    """The slices of each kind."""
    warm_up_s: float = 45.0


class Slices(msgspec.Struct, frozen=True, kw_only=True):
    """The result of all slices of one kind."""

    name: str
    consoles: int
    per_s: list[float]
    """Transactions per second of each slice."""
    p50_ms: float
    p99_ms: float
    cpu_us: float
    """CPU of the coordinator per transaction, in microseconds."""
    events: int
    event_bytes: int

    @property
    def median_per_s(self) -> float:
        """The median slice."""
        return percentile(sorted(self.per_s), 0.5)


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of consoles for an otherwise idle coordinator, the figure that depends least on the machine's load."""

    consoles: int
    cpu_ms_per_s: float


class _Kind:
    def __init__(self, name: str, consoles: int) -> None:
        self.name = name
        self.consoles = consoles
        self.per_s: list[float] = []
        self.times: list[float] = []
        self.cpu_us = 0.0
        self.events = 0
        self.event_bytes = 0

    def result(self) -> Slices:
        times = sorted(self.times)
        return Slices(
            name=self.name,
            consoles=self.consoles,
            per_s=self.per_s,
            p50_ms=percentile(times, 0.5) * 1000,
            p99_ms=percentile(times, 0.99) * 1000,
            cpu_us=self.cpu_us / max(1, len(times)),
            events=self.events,
            event_bytes=self.event_bytes,
        )


def console(options: ConsoleOptions, say: Callable[[str], None]) -> tuple[list[Slices], list[Idle]]:
    """Return the results of callers without and with open consoles, and the cost of consoles without callers."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="halfway-bench-")))
        bootstrap = stack.enter_context(EmbeddedKafka(EmbeddedConfig(heap="1g", progress=say))).bootstrap_servers
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic(TOPIC, 6, 1)])[TOPIC].result(_READY_S)
        settings = {"HALFWAY_KAFKA__BOOTSTRAP_SERVERS": bootstrap, "HALFWAY_SHARDS": "4"}
        instance = stack.enter_context(Instance(directory, settings))
        instance.ready(_READY_S)
        groups = ["shop", *(f"group-{number}" for number in range(options.groups))]
        return asyncio.run(_measure(options, Side(instance, None, groups), say))


async def _measure(options: ConsoleOptions, side: Side, say: Callable[[str], None]) -> tuple[list[Slices], list[Idle]]:
    await side.register()
    callers = [Service(side.instance.port, "shop", None) for _ in range(options.callers)]
    kinds = [_Kind("no console", 0), _Kind(f"{options.consoles} consoles", options.consoles)]
    say("warming up")
    await _slice(side, callers, _Kind("", options.consoles), options.warm_up_s)
    for turn in range(options.slices):
        say(f"slices {turn + 1} of {options.slices}")
        for kind in kinds if turn % 2 else kinds[::-1]:
            await _slice(side, callers, kind, options.seconds)
    for caller in callers:
        caller.close()
    say("no callers")
    idle = [await _idle(side, consoles, options.seconds) for consoles in (0, options.consoles)]
    return [kind.result() for kind in kinds], idle


async def _idle(side: Side, consoles: int, seconds: float) -> Idle:
    kind = _Kind("", consoles)
    watching = [asyncio.create_task(_watch(side.instance.port, kind)) for _ in range(consoles)]
    await asyncio.sleep(_LEAD_S)
    before, started = cpu_us(side.instance.pid), time.monotonic()
    await asyncio.sleep(seconds)
    spent, passed = cpu_us(side.instance.pid) - before, time.monotonic() - started
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    return Idle(consoles=consoles, cpu_ms_per_s=spent / 1000 / passed)


async def _slice(side: Side, callers: list[Service], kind: _Kind, seconds: float) -> None:
    """Load for a time, with the consoles open from the beginning."""
    watching = [asyncio.create_task(_watch(side.instance.port, kind)) for _ in range(kind.consoles)]
    started = time.monotonic() + _LEAD_S
    until = started + seconds
    before: list[float] = []

    async def counted() -> None:
        await asyncio.sleep(_LEAD_S)
        before.append(cpu_us(side.instance.pid))

    times: list[float] = []
    await asyncio.gather(counted(), *(_load(caller, started, until, times) for caller in callers))
    kind.cpu_us += cpu_us(side.instance.pid) - before[0]
    kind.times += times
    kind.per_s.append(len(times) / seconds)
    for task in watching:
        task.cancel()
    for result in await asyncio.gather(*watching, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


async def _load(caller: Service, started: float, until: float, times: list[float]) -> None:
    while (now := time.monotonic()) < until:
        if not await caller.transaction():
            raise RuntimeError("a prepare was refused")
        done = time.monotonic()
        if now >= started and done <= until:
            times.append(done - now)


async def _watch(port: int, kind: _Kind) -> None:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(f"GET /v1/events HTTP/1.1\r\nHost: {HOST}:{port}\r\n\r\n".encode())
        while data := await reader.read(65_536):
            kind.events += data.count(_EVENT)
            kind.event_bytes += len(data)
        raise RuntimeError("a stream of events ended")
    finally:
        writer.close()
