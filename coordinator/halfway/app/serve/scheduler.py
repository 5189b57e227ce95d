"""Runs the scan as an APScheduler job for each served shard (docs/protocol.md#scan-and-check-back)."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

import structlog
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from halfway.coordinator.coordinator import Coordinator

log = structlog.get_logger(__name__)

JUMP_S: Final = 2.0
"""If the wall clock moves this much against the monotonic clock, it was set, or the process was frozen."""
_CLOCK_CHECK_S: Final = 0.5


class SystemClock:
    """The machine's wall time. It notices its jumps itself: one may be over before anybody looks for it."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()
        self._jump_s = 0.0

    def now_ms(self) -> int:
        """Return milliseconds since the epoch."""
        now = time.time_ns()
        before, self._offset = self._offset, now / 1e9 - time.monotonic()
        if abs(jump_s := self._offset - before) >= max(JUMP_S, abs(self._jump_s)):
            self._jump_s = jump_s
        return now // 1_000_000

    def take_jump(self) -> float:
        """Return the largest jump against the monotonic clock since the last call, in seconds; 0 if there was none."""
        self.now_ms()
        jump_s, self._jump_s = self._jump_s, 0.0
        return jump_s


class ScanScheduler:
    """Runs one scan at a time for each served shard, every `interval_s`.

    APScheduler's intervals use the wall clock: if it were set back by an hour, the scan would stop for an hour. The
    jobs are therefore armed again when the wall clock has jumped.
    """

    def __init__(self, coordinator: Coordinator, clock: SystemClock, *, interval_s: float) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._interval_s = interval_s
        quiet = logging.getLogger("halfway.apscheduler")  # halfway's own events are in another one
        quiet.setLevel(logging.ERROR)  # APScheduler warns of each scan that takes longer than its interval
        self._scheduler = AsyncIOScheduler(timezone="UTC", logger=quiet)
        self._watch: asyncio.Task[None] | None = None
        coordinator.shards.on_served, coordinator.shards.on_leaving = self.arm, self.disarm

    def start(self) -> None:
        """Start the scheduler on the running event loop."""
        self._scheduler.start()
        self._watch = asyncio.create_task(self._watch_clock())

    async def stop(self) -> None:
        """Start no more scans, and cancel a running one: its remaining work is due at the next start."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    def arm(self, shard: int) -> None:
        self._scheduler.add_job(
            self._scan,
            "interval",
            seconds=self._interval_s,
            args=[shard],
            id=f"scan-{shard}",
            max_instances=1,
            coalesce=True,
            misfire_grace_time=None,
            replace_existing=True,
        )

    def disarm(self, shard: int) -> None:
        if self._scheduler.get_job(f"scan-{shard}") is not None:
            self._scheduler.remove_job(f"scan-{shard}")

    async def _scan(self, shard: int) -> None:
        self._check_clock()
        try:
            await self._coordinator.scan(shard, self._clock.now_ms())
        except asyncio.CancelledError:
            # The scheduler stops, and would log this as an error. The remaining work is due at the next scan.
            return
        except Exception:
            log.exception("scan_failed", shard=shard)

    async def _watch_clock(self) -> None:
        while True:
            self._check_clock()
            await asyncio.sleep(_CLOCK_CHECK_S)

    def _check_clock(self) -> None:
        """Handle a jump of the wall clock; this also runs before each scan, because a scan uses the wall clock."""
        if jump_s := self._clock.take_jump():
            log.warning("clock_jumped", seconds=round(jump_s, 3))
            self._coordinator.clock_was_set()
            for shard in self._coordinator.shards.served:
                self.arm(shard)
