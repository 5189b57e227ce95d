"""Only the caller that dropped a shard releases it (docs/protocol.md, step 3)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from halfway.coordinator.ports import ShardListener
from halfway.kafka.ownership.incarnation import Incarnation, give_back


class OwnerLog:
    """Replaces an incarnation, and records the records of owners in order."""

    failed = False

    def __init__(self, *shards: int) -> None:
        self.shards = set(shards)
        self.records: list[tuple[int, str]] = []

    def drop(self, shard: int) -> bool:
        owned = shard in self.shards
        self.shards.discard(shard)
        return owned

    async def release(self, shards: Sequence[int], _deadline: float) -> bool:
        self.records += [(shard, "released") for shard in shards]
        return True


class Busy:
    """A listener that finishes its ends in flight when the test allows it."""

    def __init__(self) -> None:
        self.finished = {0: asyncio.Event(), 1: asyncio.Event()}

    async def revoked(self, shard: int) -> None:
        await self.finished[shard].wait()


async def test_a_shard_that_is_being_given_back_is_not_released_a_second_time_by_a_stop() -> None:
    """The second tombstone would wait for other shards, and could land behind the claim of the next owner."""
    log, busy = OwnerLog(0, 1), Busy()
    incarnation, listener = cast("Incarnation", log), cast("ShardListener", busy)
    until = asyncio.get_running_loop().time() + 60
    lost: list[int] = []
    revoked = asyncio.create_task(give_back(incarnation, {0}, listener, lost.extend, until))
    await asyncio.sleep(0.01)
    stopping = asyncio.create_task(give_back(incarnation, {0, 1}, listener, lost.extend, until))
    await asyncio.sleep(0.01)  # until both wait for the ends of shard 0
    busy.finished[0].set()
    await revoked
    log.records.append((0, "claimed by another"))
    busy.finished[1].set()
    await stopping
    assert log.records == [(0, "released"), (0, "claimed by another"), (1, "released")]
    assert not lost
