"""Runs the scan as an APScheduler job for each served shard (docs/protocol.md#scan-and-check-back)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import structlog
from apscheduler.schedulers.asyncio import AsyncIOScheduler

if TYPE_CHECKING:
    from halfway.coordinator.coordinator import Coordinator
    from halfway.coordinator.ports import Clock, KnownLog, LaneWrite, LogLoss, ShardListener
    from halfway.protocol.records import Foreign, Half
    from halfway.protocol.shard import ShardState

log = structlog.get_logger(__name__)

JUMP_S: Final = 2.0
"""If the wall clock moves this much against the monotonic clock, it was set, or the process was frozen."""
_CLOCK_CHECK_S: Final = 0.5


class SystemClock:
    """The machine's wall time."""

    def now_ms(self) -> int:
        """Return milliseconds since the epoch."""
        return time.time_ns() // 1_000_000


class ScanScheduler:
    """Runs one scan at a time for each served shard, every `interval_s`.

    APScheduler's intervals use the wall clock: if it were set back by an hour, the scan would stop for an hour. The
    jobs are therefore armed again when the wall clock has jumped.
    """

    def __init__(self, coordinator: Coordinator, clock: Clock, *, interval_s: float) -> None:
        """Store the parts. Nothing is started yet."""
        self._coordinator = coordinator
        self._clock = clock
        self._interval_s = interval_s
        self._scheduler = AsyncIOScheduler(timezone="UTC")
        self._watch: asyncio.Task[None] | None = None
        self._offset = time.time() - time.monotonic()

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
        """Start to scan a shard periodically."""
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
        """Stop scanning a shard."""
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
        """Detect a jump of the wall clock; this also runs before each scan, because a scan uses the wall clock."""
        before, self._offset = self._offset, time.time() - time.monotonic()
        if abs(self._offset - before) >= JUMP_S:
            log.warning("clock_jumped", seconds=round(self._offset - before, 3))
            self._coordinator.clock_was_set()
            for shard in self._coordinator.shards.served:
                self.arm(shard)


class ScannedShards:
    """A `ShardListener` that forwards every call, and arms a scan for each served shard."""

    def __init__(self, listener: ShardListener, arm: Callable[[int], None], disarm: Callable[[int], None]) -> None:
        """Store the parts."""
        self._listener = listener
        self._arm = arm
        self._disarm = disarm

    def may_still_be_written(self, write: LaneWrite) -> bool:
        """Forward the lane's call, on the lane's thread."""
        return self._listener.may_still_be_written(write)

    def compare(self, shard: int, state: ShardState, *, suspect: bool) -> None:
        """Forward the comparison of a new fold with the former one, on another thread."""
        self._listener.compare(shard, state, suspect=suspect)

    def known_log(self, shard: int) -> KnownLog | None:
        """Forward the question what is known of a shard's log."""
        return self._listener.known_log(shard)

    def log_lost(self, shard: int, loss: LogLoss) -> None:
        """Forward what Kafka has lost."""
        self._listener.log_lost(shard, loss)

    def forget(self, shard: int) -> None:
        """Forward that another instance may own a shard."""
        self._listener.forget(shard)

    def acquired(self, shard: int, state: ShardState) -> None:
        """Serve and scan a shard."""
        self._listener.acquired(shard, state)
        self._arm(shard)

    def appended(self, shard: int, records: Sequence[tuple[int, str, Half | Foreign | None]], position: int) -> None:
        """Forward the records that the tail has read."""
        self._listener.appended(shard, records, position)

    def has_applied(self, shard: int, offset: int, key: bytes | None) -> bool:
        """Forward the tail's call, on the tail's thread."""
        return self._listener.has_applied(shard, offset, key)

    async def revoked(self, shard: int) -> None:
        """Stop the scan, then finish the work in flight."""
        self._disarm(shard)
        await self._listener.revoked(shard)

    def lost(self, shard: int) -> None:
        """Stop the scan, and drop the shard."""
        self._disarm(shard)
        self._listener.lost(shard)
