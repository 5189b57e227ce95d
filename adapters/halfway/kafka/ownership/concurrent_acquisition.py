"""Acquires the shards of one instance: each separately, with its own back-off, and a few at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import structlog

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.log.cursors import KafkaCursors
from halfway.kafka.ownership.acquisition import Acquired, Acquisition
from halfway.kafka.ownership.former_owners import AcquireError, stuck_remedy
from halfway.kafka.ownership.incarnation import Incarnation, pause_after

log = structlog.get_logger()

AT_ONCE: Final = 8
"""The most concurrent acquisitions; this bounds producers, consumers and threads for any number of shards."""
RETRIES_AT_ONCE: Final = 4
"""How many of these may be for shards that have failed before, so that the others always get a place."""
_CLAIM_S: Final = 30.0
_FIRST_PATIENCE_S: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardTrouble:
    """A shard that is assigned to this instance and that it has failed to acquire so far."""

    shard: int
    since: float
    """When an attempt first failed, in seconds since the epoch."""
    tries: int
    error: str
    """Why the last attempt failed."""
    remedy: str
    """What the operator can do."""


class Assignment(Protocol):
    """What an acquisition needs from its membership."""

    def wants(self, incarnation: Incarnation, shard: int) -> bool:
        """Return whether a shard is still to be acquired for an incarnation; called on any thread."""

    def follows(self, shard: int, incarnation: Incarnation, former: str | None) -> None:
        """Record that an incarnation has tried to claim a shard after its former owner."""

    async def serve(self, incarnation: Incarnation, acquired: Acquired) -> None:
        """Serve a shard if it is still wanted."""

    def look_again(self) -> None:
        """Check again which shards are to be acquired: an acquisition has ended."""

    def outdated(self, shard: int, error: str) -> None:
        """Record that a shard contains a record that only a newer release can read."""

    def count_skipped(self, topic: str, reason: str) -> None:
        """Count a record that cannot be decoded; called on any thread."""

    async def pause(self, seconds: float) -> None:
        """Wait for a back-off and then for a fresh poll: the group may have assigned a shard to another instance."""


@dataclass(kw_only=True, eq=False)
class _Attempts:
    """Attempts at one shard for one incarnation, until it is served or no longer wanted."""

    incarnation: Incarnation
    task: asyncio.Task[None] = field(init=False)
    trying: bool = False
    """An attempt or a release is under way: the task ends by itself, and must not be cancelled."""
    claimed: bool = False
    """An attempt has certainly claimed the shard, and it is not served yet."""


class ConcurrentAcquisitions:
    """Acquires shards concurrently. Call it on the loop's thread; blocking work runs on its own threads."""

    def __init__(
        self, config: KafkaConfig, cursors: KafkaCursors, assignment: Assignment, fenced_pause_s: float
    ) -> None:
        """Create it; a fenced acquisition waits at least `fenced_pause_s` before its next attempt."""
        self._config = config
        self._cursors = cursors
        self._assignment = assignment
        self._fenced_pause_s = fenced_pause_s
        self._threads = ThreadPoolExecutor(AT_ONCE, "halfway-acquire")
        self._places = asyncio.Semaphore(AT_ONCE)
        self._retry_places = asyncio.Semaphore(RETRIES_AT_ONCE)
        self._handling_lock = threading.Lock()
        self._under_way: dict[int, _Attempts] = {}
        self._troubles: dict[int, ShardTrouble] = {}

    @property
    def shards(self) -> frozenset[int]:
        """The shards that are being acquired, including those that wait for a place or their next attempt."""
        return frozenset(self._under_way)

    @property
    def troubles(self) -> tuple[ShardTrouble, ...]:
        """The shards whose attempts have failed, sorted."""
        return tuple(self._troubles[shard] for shard in sorted(self._troubles))

    def begin(self, incarnation: Incarnation, shards: Collection[int]) -> None:
        """Start to acquire shards for an incarnation, except those already under way."""
        for shard in sorted(shards):
            if shard not in self._under_way:
                attempts = self._under_way[shard] = _Attempts(incarnation=incarnation)
                attempts.task = asyncio.create_task(self._acquire(shard, attempts), name=f"halfway-acquire-{shard}")
                attempts.task.add_done_callback(partial(self._on_ended, shard))

    async def end(self, shards: Collection[int], deadline: float) -> None:
        """Cancel acquisitions and wait for them to end until `deadline`, on the loop's clock."""
        for shard in shards:
            self._troubles.pop(shard, None)
        attempts = [self._under_way[shard] for shard in shards if shard in self._under_way]
        for entry in attempts:
            if not entry.trying:
                entry.task.cancel()
        if attempts:
            left = deadline - asyncio.get_running_loop().time()
            await asyncio.wait([entry.task for entry in attempts], timeout=max(0.0, left))

    async def close(self) -> None:
        """Abandon the acquisitions under way: their threads end at their next check."""
        tasks = [attempts.task for attempts in self._under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- one shard

    async def _acquire(self, shard: int, attempts: _Attempts) -> None:
        """Try until the shard is served or no longer wanted; release it if it is claimed and not served."""
        incarnation, wants = attempts.incarnation, self._assignment.wants
        pause_s = 0.0
        try:
            while wants(incarnation, shard):
                if pause_s:
                    await self._assignment.pause(pause_s)
                async with self._place(shard):
                    if wants(incarnation, shard):
                        attempts.trying = True
                        pause_s = await self._attempt(shard, attempts)
                        attempts.trying = False
        finally:
            if attempts.claimed:
                attempts.trying = True
                await incarnation.release([shard], asyncio.get_running_loop().time() + self._config.session_timeout_s)

    def _on_ended(self, shard: int, _: asyncio.Task[None]) -> None:
        del self._under_way[shard]
        self._assignment.look_again()

    @asynccontextmanager
    async def _place(self, shard: int) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if shard in self._troubles:
                await stack.enter_async_context(self._retry_places)
            await stack.enter_async_context(self._places)
            yield

    async def _attempt(self, shard: int, attempts: _Attempts) -> float:
        """Try once; return how long to pause before the next attempt."""
        incarnation = attempts.incarnation
        trouble = self._troubles.get(shard)
        tries = 0 if trouble is None else trouble.tries
        stall_s = min(self._config.lane_stall_s, _FIRST_PATIENCE_S * (tries + 1))
        acquisition = Acquisition(
            config=self._config,
            incarnation=incarnation.id,
            lane_ids=incarnation.lane_ids,
            shard=shard,
            cursors=self._cursors,
            fences=incarnation.fences,
            handling_lock=self._handling_lock,
            deadline=time.monotonic() + min(_CLAIM_S, stall_s),
            stall_s=stall_s,
            cancelled=lambda: not self._assignment.wants(incarnation, shard),
            skipped=self._assignment.count_skipped,
        )
        pause_s = 0.0
        try:
            acquired = await asyncio.get_running_loop().run_in_executor(self._threads, acquisition.acquire)
            self._troubles.pop(shard, None)
            self._assignment.follows(shard, incarnation, acquisition.former)
            await self._assignment.serve(incarnation, acquired)
        except AcquireError as error:
            self._assignment.follows(shard, incarnation, acquisition.former)
            pause_s = self._record_failure(shard, incarnation, error)
        except Exception as error:
            log.exception("acquisition_failed_unexpectedly", shard=shard)
            pause_s = self._record_failure(shard, incarnation, AcquireError("acquiring", repr(error)))
        attempts.claimed = (attempts.claimed or acquisition.claimed) and not incarnation.holds(shard)
        return pause_s

    def _record_failure(self, shard: int, incarnation: Incarnation, error: AcquireError) -> float:
        """Record a failure, unless the shard is no longer wanted, and return how long to pause."""
        if not self._assignment.wants(incarnation, shard):
            return 0.0
        if error.outdated:
            self._assignment.outdated(shard, f"{error}: {error.remedy}")
        before = self._troubles.get(shard)
        since, tries = (time.time(), 0) if before is None else (before.since, before.tries)
        pause_s = max(pause_after(tries), self._fenced_pause_s if error.fenced else 0.0)
        remedy = error.remedy or stuck_remedy(self._config, shard)
        trouble = ShardTrouble(shard=shard, since=since, tries=tries + 1, error=str(error), remedy=remedy)
        self._troubles[shard] = trouble
        log.warning(
            "acquisition_failed",
            shards=[shard],
            error=trouble.error,
            remedy=trouble.remedy,
            tries=trouble.tries,
            for_s=round(time.time() - since, 1),
            again_in_s=round(pause_s, 1),
        )
        return pause_s
