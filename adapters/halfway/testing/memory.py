"""A coordinator in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

from halfway.app.serve.backend import check_caller
from halfway.app.serve.scheduler import ScanScheduler
from halfway.client.consumer import Record
from halfway.coordinator.coordinator import Coordinator
from halfway.memory import ManualClock, Memory
from halfway.memory import Record as MemoryRecord
from halfway.testing.server import Server, ServerError

_POLL_S: Final = 0.01
_RELEASE_S: Final = 5.0


class WallClock(ManualClock):
    """The machine's wall time."""

    def now_ms(self) -> int:
        """Return milliseconds since the epoch."""
        return time.time_ns() // 1_000_000


class MemoryServer(Server):
    """A coordinator in this process. It starts in a few milliseconds, and loses everything at its end."""

    def __init__(self) -> None:
        """Create the memory. Nothing is started yet."""
        super().__init__()
        self._memory = Memory(shards=self._settings.shards, clock=WallClock())

    def create_topic(self, name: str, *, partitions: int = 3) -> None:
        """Create a real topic; raises ServerError if it exists."""
        if name in self._memory.log.topics:
            raise ServerError(f"the topic {name} exists: give another name, or use new_topic")
        self._memory.create_topic(name, partitions)

    def records(self, topic: str) -> Sequence[Record]:
        """Return the records that a `read_committed` consumer sees in a topic now, by partition and offset."""
        if topic not in self._memory.log.topics:
            raise ServerError(f"the topic {topic} does not exist: create it with create_topic")
        records = map(_converted, self._memory.records(topic))
        return sorted(records, key=lambda record: (record.partition, record.offset))

    async def _coordinator(self, stack: AsyncExitStack) -> Coordinator:
        settings, memory = self._settings, self._memory
        caller = await stack.enter_async_context(check_caller(settings))
        ports = memory.ports
        ports["caller"], ports["observer"] = caller, self._metrics
        coordinator = Coordinator(limits=settings.service_limits(), **ports)
        scheduler = ScanScheduler(coordinator, memory.clock, interval_s=settings.scan_interval_s)
        stack.push_async_callback(scheduler.stop)
        scheduler.start()

        async def leave() -> None:
            await memory.membership.stop(deadline=asyncio.get_running_loop().time() + _RELEASE_S)

        stack.push_async_callback(leave)
        await memory.membership.start(coordinator.shards)
        while len(coordinator.shards.served) < settings.shards:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(_POLL_S)
        return coordinator


def _converted(record: MemoryRecord) -> Record:
    return Record(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        timestamp_ms=record.timestamp,
        key=record.key,
        value=record.value,
        headers=record.headers,
    )
