"""Since when a topic must still have what was written to it."""

import pytest

from halfway.pipeline.sources.pins import PartitionPin, TopicPin

NOW = 1_700_000_000_000
HOUR = 3_600_000


def partition(number: int, *, start: int = 0, first_at: int | None = None) -> PartitionPin:
    return PartitionPin(partition=number, start=start, end=100, high=100, first_at=first_at)


def topic(*partitions: PartitionPin, kept_ms: int | None = None, compacted: bool = False) -> TopicPin:
    return TopicPin(
        topic="orders", at=NOW, partitions=partitions, kept_ms=kept_ms, compacted=compacted, tombstones_kept_ms=HOUR
    )


def test_a_topic_that_nothing_was_removed_from_proves_everything() -> None:
    """Whatever its retention is."""
    assert topic(partition(0), partition(1), kept_ms=HOUR).provable_since({}) == 0


def test_what_stands_behind_halfways_first_message_must_be_there() -> None:
    """The time of another producer's record before it proves nothing."""
    trimmed = topic(partition(0, start=7, first_at=NOW - 1_000 * HOUR), partition(1))
    assert trimmed.provable_since({0: NOW - 3 * HOUR, 1: NOW - 9 * HOUR}) == NOW - 3 * HOUR


@pytest.mark.parametrize("kept_ms", [5 * HOUR, None], ids=["by age", "by size"])
def test_a_trimmed_partition_without_messages_proves_nothing(kept_ms: int | None) -> None:
    """A retention that was short for a while, or a person, has the same effect as age: no time shows what was there."""
    trimmed = topic(partition(0, start=7), partition(1, start=3), kept_ms=kept_ms)
    assert trimmed.provable_since({0: NOW - 2 * HOUR}) == NOW
    assert trimmed.provable_since({0: NOW - 2 * HOUR, 1: NOW - HOUR}) == NOW - HOUR


def test_in_a_compacted_topic_a_tombstone_may_have_come_and_gone() -> None:
    """What is older than tombstones are kept is not proved."""
    assert topic(partition(0), compacted=True).provable_since({}) == NOW - HOUR


def test_each_shard_of_op_tells_for_itself() -> None:
    """By its first marker; one that has lost all of them proves nothing."""
    pin = topic(partition(0), partition(1, start=5, first_at=NOW - HOUR), partition(2, start=5))
    assert pin.whole_since == {0: 0, 1: NOW - HOUR, 2: NOW}
