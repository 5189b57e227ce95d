"""Acquisitions: their deadline, the fences that they share, and a shard that is claimed and then not served."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.reader import Reader
from halfway.kafka.ownership import concurrent_acquisition
from halfway.kafka.ownership.acquisition import Acquired
from halfway.kafka.ownership.concurrent_acquisition import ConcurrentAcquisitions
from halfway.kafka.ownership.former_owners import AcquireError, AcquisitionDeadline, FencedOwners
from halfway.kafka.ownership.incarnation import Incarnation
from tests.support.waiting import until_true

LONG_S = 1_000.0
"""Longer than any test takes."""


@pytest.fixture
def reader() -> Iterator[Reader]:
    """Return a reader that reads nothing; the tests set when it moved."""
    servers = {"bootstrap.servers": "127.0.0.1:1"}
    reader = Reader(KafkaConfig(properties=servers, max_prepare_bytes=1_000))
    yield reader
    reader.close()


def deadline_of(reader: Reader, *, until: float, stall_s: float = LONG_S, wanted: bool = True) -> AcquisitionDeadline:
    return AcquisitionDeadline(until=until, stall_s=stall_s, reader=reader, cancelled=lambda: not wanted)


def test_the_deadline_is_the_one_given_until_reading_leads_beyond_it(reader: Reader) -> None:
    """It never comes closer, and is extended by reading."""
    given = deadline_of(reader, until=100, stall_s=30)
    assert given.deadline == 100
    reader.moved_at = 60
    assert given.deadline == 100
    reader.moved_at = 80
    assert given.deadline == 110


def test_past_the_deadline_it_goes_on_only_while_reading_moves(reader: Reader) -> None:
    """The error names the step."""
    over = deadline_of(reader, until=time.monotonic())
    with pytest.raises(AcquireError, match=r"^a step: out of time"):
        over.check("a step")
    reader.moved_at = time.monotonic()
    over.check("a step")
    reader.moved_at -= LONG_S
    with pytest.raises(AcquireError, match=r"^a step: out of time"):
        over.check("a step")


def test_reading_is_stalled_when_it_has_stood_still_for_too_long(reader: Reader) -> None:
    """A waiter that has just started gets all of the time."""
    given, now = deadline_of(reader, until=0), time.monotonic()
    long_ago = now - 2 * LONG_S
    assert given.is_stalled(since=long_ago)
    assert not given.is_stalled(since=now)
    reader.moved_at = now
    assert not given.is_stalled(since=long_ago)


def test_what_is_no_longer_wanted_ends_at_once(reader: Reader) -> None:
    """Regardless of the time left."""
    unwanted = deadline_of(reader, until=time.monotonic() + LONG_S, wanted=False)
    for check in (unwanted.check, unwanted.check_wanted):
        with pytest.raises(AcquireError, match=r"^a step: the shard is no longer wanted"):
            check("a step")


def test_it_is_fenced_once_however_many_ask() -> None:
    fences, calls, go = FencedOwners("me"), list[str](), threading.Event()

    def fence() -> None:
        calls.append("fence")
        assert go.wait(LONG_S)

    with ThreadPoolExecutor(4) as pool:
        attempts = [pool.submit(fences.once, "former", fence, lambda: None) for _ in range(4)]
        go.set()
        for attempt in attempts:
            attempt.result(LONG_S)
    fences.once("former", fence, lambda: None)
    assert calls == ["fence"]
    assert "former" in fences
    assert "me" in fences
    assert "other" not in fences


def test_a_fence_that_fails_is_tried_again_by_the_next() -> None:
    """Acquisitions that wait for it fail too."""
    fences, started, go = FencedOwners("me"), threading.Event(), threading.Event()

    def fail() -> None:
        started.set()
        assert go.wait(LONG_S)
        raise TimeoutError("no answer")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(fences.once, "former", fail, lambda: None)
        assert started.wait(LONG_S)
        second = pool.submit(fences.once, "former", lambda: None, go.set)
        for call in (first, second):
            with pytest.raises(TimeoutError, match="no answer"):
                call.result(LONG_S)
    assert "former" not in fences
    fences.once("former", lambda: None, lambda: None)
    assert "former" in fences


def test_who_waits_for_another_fence_may_give_up() -> None:
    fences, started, go = FencedOwners("me"), threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        assert go.wait(LONG_S)

    def give_up() -> None:
        raise RuntimeError("no longer wanted")

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(fences.once, "former", hang, lambda: None)
        assert started.wait(LONG_S)
        with pytest.raises(RuntimeError):
            fences.once("former", lambda: None, give_up)
        go.set()
        first.result(LONG_S)
    assert "former" in fences


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
    await until_true(lambda: acquisitions.troubles)
    group.shards.clear()
    await acquisitions.end({2}, asyncio.get_running_loop().time() + 10)
    assert incarnation.released == [2]
    assert not acquisitions.shards
    await acquisitions.close()
