"""The event loop's pauses are measured, and forgotten after a minute."""

import asyncio
import time

from halfway.app.metrics import LoopPauses


async def test_a_pause_is_measured() -> None:
    pauses = LoopPauses()
    watching = asyncio.create_task(pauses.watch())
    await asyncio.sleep(0.05)
    time.sleep(0.2)  # noqa: ASYNC251 - this is the pause
    await asyncio.sleep(0.05)
    watching.cancel()
    assert pauses.longest_s() >= 0.17


def test_the_longest_pause_of_the_last_seconds_counts() -> None:
    pauses = LoopPauses()
    now = time.monotonic()
    for ago, pause in ((300, 9.0), (30, 3.0), (30, 1.0), (1, 0.5)):
        pauses.record(now - ago, pause)
    assert pauses.longest_s() == 3.0
    assert pauses.longest_s(within_s=10) == 0.5
    assert LoopPauses().longest_s() == 0.0
