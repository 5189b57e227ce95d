"""The coordinator over ports in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

from halfway.client.consumer import Record
from halfway.memory import ManualClock, Memory
from halfway.memory import Record as Kept
from halfway.runtime.check_caller import check_caller
from halfway.runtime.scheduler import ScannedShards, ScanScheduler
from halfway.service.coordinator import Coordinator
from halfway.testing.server import Server, ServerError

_LOOK_EVERY_S: Final = 0.01
_RELEASE_S: Final = 5.0


class WallClock(ManualClock):
    """The machine's wall time."""

    def now_ms(self) -> int:
        """Return milliseconds since the epoch."""
        return time.time_ns() // 1_000_000


class MemoryServer(Server):
    """Everything in this process: it starts in a few milliseconds and forgets all at its end."""

    def __init__(self) -> None:
        """Start nothing yet."""
        super().__init__()
        self._memory = Memory(shards=self._settings.shards, clock=WallClock())

    def create_topic(self, name: str, *, partitions: int = 3) -> None:
        """Create a real topic; raises ServerError if it exists."""
        if name in self._memory.log.topics:
            raise ServerError(f"the topic {name} exists: give another name, or use new_topic")
        self._memory.create_topic(name, partitions)

    def records(self, topic: str) -> Sequence[Record]:
        """Return what a `read_committed` consumer sees of a topic now, by partition and offset."""
        if topic not in self._memory.log.topics:
            raise ServerError(f"the topic {topic} does not exist: create it with create_topic")
        return sorted(map(_shown, self._memory.records(topic)), key=lambda one: (one.partition, one.offset))

    async def _coordinator(self, stack: AsyncExitStack) -> Coordinator:
        settings, memory = self._settings, self._memory
        caller = await stack.enter_async_context(check_caller(settings))
        ports = memory.ports
        ports["caller"], ports["observer"] = caller, self._metrics
        coordinator = Coordinator(limits=settings.limits(), **ports)
        scheduler = ScanScheduler(coordinator, memory.clock, interval_s=settings.scan_interval_s)
        stack.push_async_callback(scheduler.stop)
        scheduler.start()

        async def leave() -> None:
            await memory.membership.stop(deadline=asyncio.get_running_loop().time() + _RELEASE_S)

        stack.push_async_callback(leave)
        await memory.membership.start(ScannedShards(coordinator.listener, scheduler.arm, scheduler.disarm))
        while len(coordinator.shards.served) < settings.shards:  # noqa: ASYNC110 - it sets no event
            await asyncio.sleep(_LOOK_EVERY_S)
        return coordinator


def _shown(kept: Kept) -> Record:
    return Record(
        topic=kept.topic,
        partition=kept.partition,
        offset=kept.offset,
        timestamp_ms=kept.timestamp,
        key=kept.key,
        value=kept.value,
        headers=kept.headers,
    )
