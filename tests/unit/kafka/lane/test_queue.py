"""Writes leave the queue in order, in bounded batches."""

from __future__ import annotations

import asyncio

import msgspec

from halfway.coordinator.ports import LaneWrite
from halfway.kafka.lane.queue import Batch, BatchLimits, LaneQueue, Release
from halfway.protocol.errors import HalfwayError, NotWrittenError, OverloadedError
from halfway.protocol.records import Message
from tests.support.submissions import submission
from tests.support.waiting import GENEROUS_S

LIMITS = BatchLimits(ends=3, payload_bytes=100, records=1_000)

PLENTY = 1_000_000


def sized(name: str, *sizes: int) -> LaneWrite:
    return submission(name, *(Message(topic="t", value=b"x" * size) for size in sizes))


def refused(queue: LaneQueue, write: LaneWrite) -> type[HalfwayError] | None:
    """Put a write, and return the error that refuses it."""
    return next((type(error) for _, error in queue.put_all([write])), None)


def names(batch: Batch) -> list[str]:
    assert isinstance(batch, list)
    return [item.id for item in batch]


async def test_a_batch_takes_what_waits_up_to_its_number_of_ends() -> None:
    """First in, first out; the rest is in the next batch."""
    queue = LaneQueue(10, PLENTY, LIMITS)
    for name in "abcd":
        queue.put_all([sized(name)])
    assert names(queue.take(0)) == ["a", "b", "c"]
    assert names(queue.take(0)) == ["d"]
    assert queue.take(0) is None


async def test_a_batch_is_bounded_in_bytes_but_takes_one_end_of_any_size() -> None:
    """One end always fits; the next one only if the sum stays within the limit."""
    queue = LaneQueue(10, PLENTY, LIMITS)
    for name, size in (("a", 500), ("b", 60), ("c", 40), ("d", 1)):
        queue.put_all([sized(name, size)])
    assert names(queue.take(0)) == ["a"]
    assert names(queue.take(0)) == ["b", "c"]
    assert names(queue.take(0)) == ["d"]


async def test_a_batch_is_bounded_in_records() -> None:
    """An end counts as its messages and halfway's three records."""
    queue = LaneQueue(10, PLENTY, BatchLimits(ends=10, payload_bytes=1_000, records=10))
    for name in "abc":
        queue.put_all([sized(name, 1, 1)])
    assert names(queue.take(0)) == ["a", "b"]


async def test_a_full_queue_refuses_an_end_but_never_a_release() -> None:
    """Releases are few, and are never refused."""
    queue = LaneQueue(2, PLENTY, LIMITS)
    queue.put_all([sized("a")])
    queue.put_all([sized("b")])
    assert refused(queue, sized("c")) is OverloadedError
    assert queue.put_release(Release(shards=[1]))
    assert len(queue) == 3


async def test_of_many_those_that_fit_are_taken_in_order() -> None:
    """Each refused write gets the reason."""
    queue = LaneQueue(3, 100, LIMITS)
    many = [sized("a", 60), sized("b", 60), sized("c", 40), sized("d"), sized("e")]
    refusals = queue.put_all(many)
    assert [(one.id, type(error)) for one, error in refusals] == [("b", OverloadedError), ("e", OverloadedError)]
    assert names(queue.take(0)) == ["a", "c", "d"]


async def test_a_release_comes_alone_after_what_was_queued_before_it() -> None:
    """Its Kafka transaction contains nothing else."""
    queue = LaneQueue(10, PLENTY, LIMITS)
    release = Release(shards=[1, 2])
    queue.put_all([sized("a")])
    queue.put_release(release)
    queue.put_all([sized("b")])
    assert names(queue.take(0)) == ["a"]
    assert queue.take(0) is release
    assert names(queue.take(0)) == ["b"]


async def test_a_queue_is_bounded_in_bytes_but_takes_one_end_of_any_size() -> None:
    """Taken writes make room again; a release has no bytes."""
    queue = LaneQueue(10, 100, LIMITS)
    queue.put_all([sized("a", 500)])
    assert refused(queue, sized("b", 1)) is OverloadedError
    assert queue.put_release(Release(shards=[0]))
    assert names(queue.take(0)) == ["a"]
    queue.take(0)
    queue.put_all([sized("b", 60)])
    queue.put_all([sized("c", 40)])
    assert refused(queue, sized("d", 1)) is OverloadedError
    assert names(queue.take(0)) == ["b", "c"]
    assert refused(queue, sized("d", 1)) is None


async def test_closing_returns_what_was_left_and_takes_no_more() -> None:
    """The caller that closes the queue answers the waiting writes."""
    queue = LaneQueue(10, PLENTY, LIMITS)
    first = sized("a")
    queue.put_all([first])
    assert queue.close() == [first]
    assert refused(queue, sized("b")) is NotWrittenError
    assert queue.take(60) is None
    assert queue.closed


async def test_a_waiting_reader_is_woken_by_an_end_and_by_closing() -> None:
    """No caller waits for the time-out."""
    queue = LaneQueue(10, PLENTY, LIMITS)
    async with asyncio.timeout(GENEROUS_S):
        reading = asyncio.create_task(asyncio.to_thread(queue.take, 2 * GENEROUS_S))
        queue.put_all([sized("a")])
        assert names(await reading) == ["a"]
        reading = asyncio.create_task(asyncio.to_thread(queue.take, 2 * GENEROUS_S))
        await asyncio.sleep(0.01)
        queue.close()
        assert await reading is None


def of_group(group: str, name: str, *sizes: int) -> LaneWrite:
    return msgspec.structs.replace(sized(name, *sizes), group=group)


async def test_an_end_of_another_group_does_not_wait_for_all_ends_of_one() -> None:
    """A hundred ends of one group wait; those of another are in the next batch, each group in order."""
    queue = LaneQueue(1_000, PLENTY, LIMITS)
    queue.put_all([of_group("a", f"a{number}") for number in range(100)])
    queue.put_all([of_group("b", "b0"), of_group("b", "b1")])
    assert names(queue.take(0)) == ["a0", "b0", "a1"]
    assert names(queue.take(0)) == ["b1", "a2", "a3"]


async def test_large_ends_of_one_group_let_small_ones_of_another_into_the_batch() -> None:
    """A batch that has no room for the next large end still has some for small ones."""
    queue = LaneQueue(1_000, PLENTY, BatchLimits(ends=10, payload_bytes=100, records=1_000))
    queue.put_all([of_group("a", f"a{number}", 80) for number in range(5)])
    queue.put_all([of_group("b", f"b{number}", 1) for number in range(4)])
    assert names(queue.take(0)) == ["a0", "b0", "b1", "b2", "b3"]
    assert names(queue.take(0)) == ["a1"]


async def test_a_queue_that_one_group_fills_takes_the_share_of_another() -> None:
    """Of ends and of bytes; the group that fills it gets no more."""
    queue = LaneQueue(10, 1_000, LIMITS)
    assert not queue.put_all([of_group("a", f"a{number}") for number in range(10)])
    assert refused(queue, of_group("a", "a10")) is OverloadedError
    assert [one.id for one, _ in queue.put_all([of_group("b", f"b{number}") for number in range(6)])] == ["b5"]
    heavy = LaneQueue(1_000, 100, LIMITS)
    assert not heavy.put_all([of_group("a", "a0", 100)])
    assert refused(heavy, of_group("a", "a1", 1)) is OverloadedError
    assert refused(heavy, of_group("b", "b0", 40)) is None


async def test_a_release_comes_after_the_ends_of_all_groups_that_were_queued_before_it() -> None:
    queue = LaneQueue(1_000, PLENTY, LIMITS)
    queue.put_all([of_group("a", f"a{number}") for number in range(4)] + [of_group("b", "b0")])
    release = Release(shards=[1])
    queue.put_release(release)
    queue.put_all([of_group("c", "c0")])
    assert names(queue.take(0)) == ["a0", "b0", "a1"]
    assert len(queue) == 4
    assert names(queue.take(0)) == ["a2", "a3"]
    assert queue.take(0) is release
    assert names(queue.take(0)) == ["c0"]
    assert len(queue) == 0
