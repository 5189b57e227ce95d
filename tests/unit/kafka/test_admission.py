"""What may be written is told apart from what may not, in bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from halfway.domain.errors import KafkaUnavailableError, NotAuthorisedError, TopicUnavailableError
from halfway.domain.records import Message
from halfway.kafka.admission import LaneContext, admit
from halfway.kafka.lane_queue import Submission
from halfway.kafka.loop import Answer
from halfway.service.ports import LaneWrite, Written

SLOW_S = 2.0


class SlowDestinations:
    """Tells of a topic that starts with `hidden` that it may not be seen, slowly; of `good` ones at once."""

    def __init__(self) -> None:
        self.now = 0.0
        self.granted: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def fresh(self, names: Iterable[str], timeout: float) -> set[str]:
        self.granted.append(self.now + timeout)
        for name in sorted(names):
            if name.startswith("hidden"):
                if timeout < SLOW_S:
                    self.now += timeout
                    raise KafkaUnavailableError("not in time")
                self.now += SLOW_S
                raise NotAuthorisedError("hidden", topic=name)
        return set()


def submission(topic: str) -> Submission:
    message = (Message(topic=topic, value=b"v"),)
    write = LaneWrite(shard=0, id=topic, group="g", state="COMMITTED", prepared_at=1, messages=message, deadline=0)
    future: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
    return Submission(write, future, 1e9)


async def test_many_topics_that_cannot_be_seen_hold_up_a_batch_for_one_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When it is over, ends to topics of which Kafka has not told are refused; the others are written."""
    slow = SlowDestinations()
    monkeypatch.setattr("halfway.kafka.admission.time", slow)
    listener = SimpleNamespace(current=lambda _write: True)
    config = SimpleNamespace(op_topic="op", half_topic="half", parked_topic="parked")
    context: Any = SimpleNamespace(destinations=slow, shards={0}, listener=listener, config=config, largest=1_000_000)
    batch = [submission(name) for name in (*(f"hidden-{number}" for number in range(20)), "good")]
    answers: list[Answer] = []
    admitted = admit(cast("LaneContext", context), batch, answers)
    assert [work.write.id for work, _ in admitted] == ["good"]
    assert len(answers) == 20
    assert {type(error) for _, error in answers} == {NotAuthorisedError, TopicUnavailableError}
    assert max(slow.granted) == slow.granted[0]
