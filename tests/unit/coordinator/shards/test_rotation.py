"""Shards take turns for new ids: few shards at one moment, all of them equally within a second."""

from collections import Counter

import pytest

from halfway.coordinator.shards.shard_table import SLICE_IDS, SLICE_S, ShardRotation


class Time:
    """The clock, advanced by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("halfway.coordinator.shards.shard_table.monotonic", lambda: self.now)


@pytest.fixture
async def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


async def test_ids_of_one_moment_share_a_shard(time: Time) -> None:
    rotation = ShardRotation()
    chosen = set()
    for _ in range(100):
        time.now += SLICE_S / 200
        chosen.add(rotation.choose(range(8)))
    assert len(chosen) <= 2


async def test_a_turn_is_bounded_in_ids(time: Time) -> None:
    """At any number of ids at one moment, no shard gets all of them."""
    rotation = ShardRotation()
    made = Counter(rotation.choose(range(4)) for _ in range(8 * SLICE_IDS))
    assert set(made.values()) == {2 * SLICE_IDS}
    assert time.now == 1000.0


@pytest.mark.parametrize("rate", [50, 1_000, 20_000])
@pytest.mark.parametrize("shards", [4, 8])
async def test_over_seconds_every_shard_has_its_share(time: Time, rate: int, shards: int) -> None:
    rotation = ShardRotation()
    made: Counter[int] = Counter()
    for _ in range(4 * rate):
        time.now += 1 / rate
        made[rotation.choose(range(shards))] += 1
    even = 4 * rate / shards
    assert max(made.values()) <= 1.25 * even
    assert min(made[shard] for shard in range(shards)) >= 0.75 * even


async def test_bursts_are_spread_too(time: Time) -> None:
    """A load in step with the turns, such as a job every few hundred milliseconds, still moves to the next shard."""
    rotation = ShardRotation()
    made: Counter[int] = Counter()
    for _ in range(40):
        time.now += 4 * SLICE_S
        for _ in range(100):
            made[rotation.choose(range(4))] += 1
    assert set(made.values()) == {1000}
