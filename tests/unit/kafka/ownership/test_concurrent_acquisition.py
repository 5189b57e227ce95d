"""A shard that an instance has claimed and then does not serve."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.ownership import concurrent_acquisition
from halfway.kafka.ownership.acquisition import Acquired
from halfway.kafka.ownership.concurrent_acquisition import ConcurrentAcquisitions
from halfway.kafka.ownership.former_owners import AcquireError, FencedOwners
from halfway.kafka.ownership.incarnation import Incarnation
from tests.support.waiting import GENEROUS_S

CONFIG = KafkaConfig(properties={"bootstrap.servers": "127.0.0.1:9"}, max_prepare_bytes=1_000, shards=4)


class Releases:
    """Replaces an incarnation, and records its releases."""

    id = "this"
    lane_ids = ("this.0", "this.1", "this.q")

    def __init__(self) -> None:
        self.fences = FencedOwners(self.id)
        self.released: list[int] = []

    def holds(self, _shard: int) -> bool:
        return False

    async def release(self, shards: Sequence[int], _deadline: float) -> bool:
        self.released += shards
        return True


@dataclass
class Wanted:
    """The assignment of the group, which a test changes."""

    shards: set[int]
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def wants(self, _incarnation: Incarnation, shard: int) -> bool:
        return shard in self.shards

    def follows(self, shard: int, incarnation: Incarnation, former: str | None) -> None:
        """Keep no record of owners."""

    async def serve(self, _incarnation: Incarnation, _acquired: Acquired) -> None:
        raise AssertionError("nothing is acquired")

    def look_again(self) -> None:
        self.ended.set()

    def outdated(self, _shard: int, error: str) -> None:
        raise AssertionError(error)

    def count_skipped(self, _topic: str, _reason: str) -> None:
        pass

    async def pause(self, _seconds: float) -> None:
        await asyncio.Event().wait()  # until the acquisition is cancelled


class ClaimedInVain:
    """An acquisition that claims its shard, and cannot fold its log."""

    def __init__(self, **_fields: Any) -> None:
        self.claimed = False
        self.former = None

    def acquire(self) -> Acquired:
        self.claimed = True
        raise AcquireError("folding", "a Kafka transaction is open that nobody ends")


async def test_a_shard_that_was_claimed_in_vain_is_released_when_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is released during the wait for the next try: otherwise its next owner would fence this instance."""
    monkeypatch.setattr(concurrent_acquisition, "Acquisition", ClaimedInVain)
    group, incarnation = Wanted({2}), Releases()
    acquisitions = ConcurrentAcquisitions(CONFIG, cast("Any", None), group, 0.1)
    acquisitions.begin(cast("Incarnation", incarnation), {2})
    async with asyncio.timeout(GENEROUS_S):
        while not acquisitions.troubles:  # noqa: ASYNC110 - no event reports a failed try
            await asyncio.sleep(0.01)
    group.shards.clear()
    await acquisitions.end({2}, asyncio.get_running_loop().time() + 10)
    assert incarnation.released == [2]
    assert not acquisitions.shards
    await acquisitions.close()
