"""Writes as they wait for the lane."""

import asyncio

from halfway.domain.records import Message, size_of
from halfway.domain.transaction import State
from halfway.kafka.lane.queue import Submission
from halfway.service.ports import LaneWrite, Written


def submission(name: str, *messages: Message, expires: float = 0) -> Submission:
    """Return a commit that nobody waits for; `expires` is on the monotonic clock."""
    write = LaneWrite(
        shard=0,
        id=name,
        group="g",
        state=State.COMMITTED,
        prepared_at=1,
        messages=messages,
        size=size_of(messages),
        deadline=0,
    )
    answer: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
    return Submission.of(write, answer, expires)
