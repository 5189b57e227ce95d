"""Since when a topic must still have what was written to it."""

from itertools import pairwise

import pytest

from halfway.pipeline.errors import PipelineError
from halfway.pipeline.sources.pins import Ends, PartitionPin, Pins, TopicPin

NOW = 1_700_000_000_000
HOUR = 3_600_000


def partition(number: int, *, start: int = 0, end: int = 100, first_at: int | None = None) -> PartitionPin:
    return PartitionPin(partition=number, start=start, end=end, high=end, first_at=first_at)


def topic(
    *partitions: PartitionPin,
    at: int = NOW,
    kept_ms: int | None = None,
    compacted: bool = False,
    made: str | None = "1",
) -> TopicPin:
    return TopicPin(
        topic="orders",
        at=at,
        partitions=partitions,
        kept_ms=kept_ms,
        compacted=compacted,
        tombstones_kept_ms=HOUR,
        made=made,
    )


def seen(pin: TopicPin) -> Pins:
    return Pins(at=pin.at, topics={pin.topic: pin})


def test_a_topic_that_nothing_was_removed_from_proves_everything() -> None:
    """Whatever its retention is."""
    assert topic(partition(0), partition(1), kept_ms=HOUR).provable_since({}, {}) == {0: 0, 1: 0}


def test_what_stands_behind_halfways_first_message_must_be_there() -> None:
    """The time of another producer's record before it proves nothing."""
    trimmed = topic(partition(0, start=7, first_at=NOW - 1_000 * HOUR), partition(1))
    assert trimmed.provable_since({0: NOW - 3 * HOUR, 1: NOW - 9 * HOUR}, {}) == {0: NOW - 3 * HOUR, 1: 0}


@pytest.mark.parametrize("kept_ms", [5 * HOUR, None], ids=["by age", "by size"])
def test_a_trimmed_partition_without_messages_proves_nothing(kept_ms: int | None) -> None:
    """A retention that was short for a while, or a person, has the same effect as age: no time shows what was there."""
    trimmed = topic(partition(0, start=7), partition(1, start=3), kept_ms=kept_ms)
    assert trimmed.provable_since({0: NOW - 2 * HOUR}, {}) == {0: NOW - 2 * HOUR, 1: NOW}
    assert trimmed.provable_since({0: NOW - 2 * HOUR, 1: NOW - HOUR}, {}) == {0: NOW - 2 * HOUR, 1: NOW - HOUR}


def test_in_a_compacted_topic_a_tombstone_may_have_come_and_gone() -> None:
    """What is older than tombstones are kept is not proved."""
    assert topic(partition(0), compacted=True).provable_since({}, {}) == {0: NOW - HOUR}


def test_the_configuration_tells_what_is_too_young_to_be_removed() -> None:
    """By age, or as a tombstone of a compacted topic; by size anything can be."""
    assert topic(partition(0), kept_ms=5 * HOUR).kept_since == NOW - 5 * HOUR
    assert topic(partition(0), kept_ms=5 * HOUR, compacted=True).kept_since == NOW - HOUR
    assert topic(partition(0)).kept_since == 0


def test_each_shard_of_op_tells_for_itself() -> None:
    """By its first marker; one that has lost all of them proves nothing."""
    pin = topic(partition(0), partition(1, start=5, first_at=NOW - HOUR), partition(2, start=5))
    assert pin.whole_since({}) == {0: 0, 1: NOW - HOUR, 2: NOW}


def test_a_place_where_a_log_ended_proves_all_that_was_written_later() -> None:
    """An idle partition that has lost everything still proves losses since the audit that saw it end there."""
    ends = Ends(
        seen=(
            seen(topic(partition(0, end=3), partition(1, end=9), at=NOW - 3 * HOUR)),
            seen(topic(partition(0, end=7), partition(1, end=9), at=NOW - 2 * HOUR)),
            seen(topic(partition(0, end=8), partition(1, end=9), at=NOW - HOUR)),
        )
    )
    now = topic(partition(0, start=7, end=20), partition(1, start=9, end=9), partition(2, start=4))
    assert ends.since(now) == {0: NOW - 2 * HOUR, 1: NOW - 3 * HOUR}
    assert now.provable_since({}, ends.since(now)) == {0: NOW - 2 * HOUR, 1: NOW - 3 * HOUR, 2: NOW}
    assert now.whole_since(ends.since(now)) == {0: NOW - 2 * HOUR, 1: NOW - 3 * HOUR, 2: NOW}


def test_the_ends_of_another_topic_of_the_name_prove_nothing() -> None:
    """A topic that was created again, or is shorter than it was."""
    ends = Ends(seen=(seen(topic(partition(0, end=50), at=NOW - HOUR)),))
    assert ends.since(topic(partition(0, start=7), made="2")) == {}
    assert ends.since(topic(partition(0, start=7, end=20))) == {}


def test_many_ends_are_thinned_out_and_keep_the_oldest_that_is_still_there() -> None:
    """So a file of them stays small. Gaps are small for young audits and larger for old ones."""
    ends = Ends()
    for hour in range(1_000):
        ends = ends.followed_by(seen(topic(partition(0, end=100 + hour), at=NOW + hour * HOUR)))
    times = [(pins.at - NOW) // HOUR for pins in ends.seen]
    assert len(times) == 32
    assert times[0] == 0
    assert times[-2:] == [998, 999]
    assert all((999 - older) <= 2 * (999 - newer) + 3 for older, newer in pairwise(times))
    trimmed = seen(topic(partition(0, start=600, end=1_100), at=NOW + 1_001 * HOUR))
    assert all(pins.topics["orders"].partitions[0].end >= 600 for pins in ends.followed_by(trimmed).seen)


def test_pins_are_read_as_they_were_written() -> None:
    """A file that holds something else is refused."""
    pins = seen(topic(partition(0, start=5)))
    assert Pins.from_json(pins.to_json()) == Pins.of(pins.content) == pins
    for wrong in ("7", "no JSON"):
        with pytest.raises(PipelineError, match="no offsets of an earlier run"):
            Pins.from_json(wrong)
