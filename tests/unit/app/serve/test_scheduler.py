"""The schedule of scans: one job per served shard, armed again when the wall clock jumps."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from halfway.app.serve.scheduler import ScanScheduler, SystemClock
from tests.support.rest.client import RestWorld as World
from tests.support.waiting import until_true

SHARDS = 2


class Scans:
    """Counts the scans of a coordinator."""

    def __init__(self, world: World) -> None:
        self.shards = world.coordinator.shards
        self.seen: list[int] = []

    async def scan(self, shard: int, now: int) -> None:
        assert abs(now - time.time() * 1000) < 60_000
        self.seen.append(shard)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with World() as world:
        await until_true(lambda: len(world.coordinator.shards.served) == SHARDS, what="every shard is served")
        yield world


async def test_a_shard_is_scanned_while_it_is_served(world: World) -> None:
    """Armed when acquired, disarmed when lost."""
    scans = Scans(world)
    scheduler = ScanScheduler(scans, SystemClock(), interval_s=0.02)  # type: ignore[arg-type] # it has the methods that are called
    scheduler.start()
    listener = world.coordinator.shards
    for shard in range(SHARDS):
        scheduler.arm(shard)
    await until_true(lambda: set(scans.seen) == set(range(SHARDS)), what="the jobs")
    listener.lost(0)
    await listener.revoked(1)
    await asyncio.sleep(0.05)
    before = len(scans.seen)
    await asyncio.sleep(0.1)
    assert len(scans.seen) == before
    await scheduler.stop()


async def test_a_clock_that_is_set_back_does_not_stop_the_scan(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs of all served shards are armed again when the wall clock moves against the monotonic clock."""
    scheduler = ScanScheduler(world.coordinator, SystemClock(), interval_s=3600)
    scheduler.start()
    armed: list[int] = []
    monkeypatch.setattr(scheduler, "arm", armed.append)
    await asyncio.sleep(0)
    real = time.time_ns
    monkeypatch.setattr("halfway.app.serve.scheduler.time.time_ns", lambda: real() - 3600 * 10**9)
    await until_true(lambda: set(armed) == set(range(SHARDS)), what="the jobs")
    monkeypatch.undo()
    await scheduler.stop()


def test_a_jump_that_is_over_before_anybody_looks_is_seen_by_who_read_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was planned by the wrong time may be planned for years from now."""
    clock = SystemClock()
    real = time.time_ns
    for ahead_s in (3600, 0):
        monkeypatch.setattr(
            "halfway.app.serve.scheduler.time.time_ns", lambda ahead_s=ahead_s: real() + ahead_s * 10**9
        )
        clock.now_ms()
    assert abs(clock.take_jump()) == pytest.approx(3600, abs=1)
    assert clock.take_jump() == 0


async def test_a_scan_that_is_cut_off_by_the_stop_is_no_error(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """An orderly stop leaves no traceback in the log."""
    begun = asyncio.Event()

    class Slow(Scans):
        async def scan(self, shard: int, now: int) -> None:
            begun.set()
            await asyncio.Event().wait()

    scheduler = ScanScheduler(Slow(world), SystemClock(), interval_s=0.02)  # type: ignore[arg-type] # as above
    scheduler.start()
    scheduler.arm(0)
    await begun.wait()
    await scheduler.stop()
    await asyncio.sleep(0.05)
    assert [record for record in caplog.records if record.exc_info and record.name.startswith("halfway")] == []
