"""Writes as they wait for the lane."""

from halfway.coordinator.ports import LaneWrite
from halfway.protocol.records import Message, size_of
from halfway.protocol.transactions import State


def submission(name: str, *messages: Message, deadline: float = 0) -> LaneWrite:
    """Return a commit."""
    return LaneWrite(
        shard=0,
        id=name,
        group="g",
        state=State.COMMITTED,
        prepared_at=1,
        messages=messages,
        size=size_of(messages),
        deadline=deadline,
    )
