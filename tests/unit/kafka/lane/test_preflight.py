"""Preflight separates the writes that may be written from the others, in bounded time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from halfway.coordinator.ports import LaneAnswer, LaneWrite
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.lane.transaction import LaneContext, admit
from halfway.kafka.records.lane_records import RecordLimits
from halfway.kafka.topics.metadata import WritablePartitions
from halfway.protocol.errors import (
    HalfwayError,
    KafkaUnavailableError,
    NotAuthorisedError,
    NotWrittenError,
    TopicUnavailableError,
)
from halfway.protocol.ids import partition_for_key
from halfway.protocol.records import Message
from tests.support.submissions import submission

SLOW_S = 2.0


class SlowDestinations:
    """Refuses, slowly, topics that start with `hidden`; answers at once for `good` ones."""

    def __init__(self) -> None:
        self.now = 0.0
        self.granted: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def fresh(self, names: Iterable[str], timeout: float) -> Mapping[str, WritablePartitions | None]:
        self.granted.append(self.now + timeout)
        requested = sorted(names)
        for name in requested:
            if name.startswith("hidden"):
                if timeout < SLOW_S:
                    self.now += timeout
                    raise KafkaUnavailableError("not in time")
                self.now += SLOW_S
                raise NotAuthorisedError("hidden", topic=name)
        return {name: WritablePartitions(name, 1) for name in requested}


class Known:
    """Returns the answers that a test sets."""

    def __init__(self, *openings: WritablePartitions) -> None:
        self.openings = {partitions.topic: partitions for partitions in openings}

    def fresh(self, names: Iterable[str], timeout: float) -> Mapping[str, WritablePartitions | None]:
        assert timeout > 0
        return {name: self.openings.get(name) for name in names}


def unexpired(name: str, *messages: Message) -> LaneWrite:
    return submission(name, *(messages or (Message(topic=name, value=b"v"),)), deadline=1e9)


def shown(_topic: str, _partitions: int) -> bool:
    return True


def context_with(destinations: SlowDestinations | Known) -> LaneContext:
    listener = SimpleNamespace(may_still_be_written=lambda _write: True)
    config = KafkaConfig(properties={"bootstrap.servers": "unused:1"}, max_prepare_bytes=100_000)
    context: Any = SimpleNamespace(
        destinations=destinations,
        shards={0},
        listener=listener,
        config=config,
        loop=SimpleNamespace(time=lambda: 0.0),
        limits=RecordLimits.needed(config),
    )
    return cast("LaneContext", context)


async def test_many_topics_that_cannot_be_seen_hold_up_a_batch_for_one_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the deadline ends to topics that Kafka has not described are refused; the others are written."""
    slow = SlowDestinations()
    monkeypatch.setattr("halfway.kafka.lane.transaction.time", slow)
    batch = [unexpired(name) for name in (*(f"hidden-{number}" for number in range(20)), "good")]
    answers: list[LaneAnswer] = []
    admitted = admit(context_with(slow), batch, answers, shown)
    assert [work.write.id for work in admitted] == ["good"]
    assert len(answers) == 20
    assert {type(error) for _, error in answers} == {NotAuthorisedError, TopicUnavailableError}
    assert max(slow.granted) == slow.granted[0]


async def test_a_write_that_is_overtaken_while_its_topics_are_looked_up_is_not_written() -> None:
    """A check may say commit in the meantime: the rollback of a policy must not follow it."""
    current = True

    class Overtaken(Known):
        def fresh(self, names: Iterable[str], timeout: float) -> Mapping[str, WritablePartitions | None]:
            nonlocal current
            current = False
            return super().fresh(names, timeout)

    context: Any = context_with(Overtaken(WritablePartitions("orders", 1)))
    context.listener.may_still_be_written = lambda _write: current
    answers: list[LaneAnswer] = []
    assert admit(context, [unexpired("orders")], answers, shown) == []
    assert [type(error) for _, error in answers] == [NotWrittenError]


def refusals(answers: list[LaneAnswer]) -> list[str]:
    assert {type(error) for _, error in answers} <= {TopicUnavailableError}
    return [str(error) for _, error in answers]


async def test_no_kafka_transaction_begins_with_a_partition_that_takes_nothing() -> None:
    """Its ends are refused and stay pending; ends to other partitions and topics are written."""
    half_closed = WritablePartitions("orders", 2, {partition_for_key(b"shut", 2): "has no leader"})
    open_key = next(key for key in (b"%d" % n for n in range(9)) if partition_for_key(key, 2) not in half_closed.closed)
    batch = [
        unexpired("shut", Message(topic="points", value=b"v"), Message(topic="orders", key=b"shut", value=b"v")),
        unexpired("open", Message(topic="orders", key=open_key, value=b"v")),
        unexpired("elsewhere", Message(topic="points", value=b"v")),
        unexpired("named", Message(topic="orders", partition=next(iter(half_closed.closed)), value=b"v")),
    ]
    answers: list[LaneAnswer] = []
    admitted = admit(context_with(Known(half_closed, WritablePartitions("points", 1))), batch, answers, shown)
    assert [work.write.id for work in admitted] == ["open", "elsewhere"]
    assert all("orders" in detail and "has no leader" in detail for detail in refusals(answers))
    assert [write for write, _ in answers] == [batch[0], batch[3]]


async def test_a_message_that_may_go_anywhere_goes_where_it_can() -> None:
    """It is refused only if every partition is closed."""
    partly_closed = WritablePartitions("orders", 3, {0: "has no leader", 2: "has no leader"})
    none = WritablePartitions("points", 1, {0: "has no leader"})
    batch = [
        unexpired(f"{topic}-{n}", Message(topic=topic, value=b"v")) for topic in ("orders", "points") for n in range(9)
    ]
    answers: list[LaneAnswer] = []
    admitted = admit(context_with(Known(partly_closed, none)), batch, answers, shown)
    assert {message.partition for encoded in admitted for message in encoded.real} == {1}
    assert len(admitted) == len(refusals(answers)) == 9


async def test_a_partition_that_is_not_there_is_refused_before_anything_begins() -> None:
    """A partition that the topic has lost, and one that the producer does not know yet."""
    batch = [
        unexpired("lost", Message(topic="orders", partition=2, value=b"v")),
        unexpired("unshown", Message(topic="points", partition=1, value=b"v")),
        unexpired("there", Message(topic="orders", partition=1, value=b"v")),
    ]
    answers: list[LaneAnswer] = []
    destinations = Known(WritablePartitions("orders", 2), WritablePartitions("points", 2))
    admitted = admit(context_with(destinations), batch, answers, lambda topic, _partitions: topic != "points")
    assert [work.write.id for work in admitted] == ["there"]
    lost, unshown = refusals(answers)
    assert "no partition 2" in lost
    assert "points" in unshown


async def test_a_write_that_cannot_be_encoded_fails_at_once_and_alone() -> None:
    """A retry would fail in the same way: NotWrittenError would be retried until the deadline."""
    batch = [unexpired("bad\udcff"), unexpired("good")]
    answers: list[LaneAnswer] = []
    admitted = admit(
        context_with(Known(WritablePartitions("bad\udcff", 1), WritablePartitions("good", 1))), batch, answers, shown
    )
    assert [work.write.id for work in admitted] == ["good"]
    [(write, error)] = answers
    assert write is batch[0]
    assert isinstance(error, HalfwayError)
    assert not isinstance(error, NotWrittenError)
    assert error.code == "internal"
