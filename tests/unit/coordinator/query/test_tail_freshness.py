"""An instance that cannot read half does not see what others append there."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from halfway.coordinator.queries.queries import TailFreshness
from halfway.protocol.errors import KafkaUnavailableError
from tests.support.elapsed_time import WallClock
from tests.support.waiting import until_true


class Log:
    """Half, and the tails of the served shards, as far as they go."""

    def __init__(self) -> None:
        self.served = [0, 1]
        self.stuck: set[int] = set()

    async def half_end(self, shard: int, *, deadline: float) -> int:
        assert deadline > asyncio.get_running_loop().time()
        return 7 + shard

    def get(self, number: int) -> Any:
        async def wait_for_tail(position: int, *, deadline: float) -> None:
            assert (position, bool(deadline)) == (7 + number, True)
            if number in self.stuck:
                raise KafkaUnavailableError(f"shard {number} was not read")

        return SimpleNamespace(wait_for_tail=wait_for_tail)


async def test_the_age_of_the_tail_grows_while_one_shard_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged once; a shard that is served no more does not count."""
    half: Any = Log()
    clock = WallClock(monkeypatch)
    tail = TailFreshness(half, half, late_s=100, every_s=0.01)
    assert tail.age_s == 0

    def logged(event: str) -> Callable[[], bool]:
        return lambda: [entry["event"] for entry in seen].count(event) == 1

    with capture_logs() as seen:
        watching = asyncio.create_task(tail.watch())
        try:
            half.stuck.add(1)
            await asyncio.sleep(0.05)
            clock.advance(1000)
            await until_true(lambda: tail.is_late)
            await until_true(logged("tail_not_current"))
            assert seen[0]["error"] == "shard 1 was not read"
            half.stuck.clear()
            await until_true(lambda: not tail.is_late)
            await until_true(logged("tail_current_again"))
            half.stuck.add(1)
            half.served.remove(1)
            await asyncio.sleep(0.05)
            clock.advance(1000)
            await until_true(lambda: not tail.is_late)
        finally:
            watching.cancel()
    assert len(seen) <= 4
