"""Ended work leaves no reference cycle: collections are rare, so a cycle would keep a request for long."""

import asyncio
import gc
from collections import Counter

import pytest

from halfway.coordinator.operations import Operation
from halfway.protocol.errors import UnknownTransactionError
from halfway.protocol.transactions import Outcome
from tests.support.service.world import World


@pytest.mark.parametrize("cancelled", [False, True])
async def test_an_end_that_had_to_look_its_id_up_leaves_no_cycle(world: World, cancelled: bool) -> None:
    def alive() -> Counter[str]:
        return Counter(
            type(one).__name__ for one in gc.get_objects() if issubclass(type(one), Operation | asyncio.Task)
        )

    gc.collect()
    gc.disable()
    try:
        before = alive()
        for ticks in range(8):
            tasks = [asyncio.create_task(world.end("nothing", Outcome.COMMIT)) for _ in range(3)]
            for _ in range(ticks):
                await asyncio.sleep(0)
            if cancelled:
                tasks[0].cancel()
            await asyncio.wait(tasks)
            assert all(one.cancelled() or isinstance(one.exception(), UnknownTransactionError) for one in tasks)
            del tasks
        await world.until(lambda: not alive() - before)
    finally:
        gc.enable()
