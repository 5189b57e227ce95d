"""What a write must pass before a Kafka transaction begins with it (DESIGN section 4: what is checked before begin)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import structlog

from halfway.domain.errors import (
    HalfwayError,
    KafkaUnavailableError,
    MessageTooLargeError,
    NotAuthorisedError,
    NotWrittenError,
    TopicUnavailableError,
)
from halfway.kafka.config import KafkaConfig
from halfway.kafka.lane_queue import Submission
from halfway.kafka.lane_records import Encoded, encode, oversized
from halfway.kafka.loop import Answer, Loop
from halfway.kafka.quarantine import Quarantine
from halfway.service.ports import LaneWrite, Observer, ShardListener

log = structlog.get_logger()

_METADATA_TIMEOUT_S: Final = 5.0
_DOES_NOT_EXIST: Final = "topic {!r} does not exist: create it, and the end can be done"


class Destinations(Protocol):
    """Fresh metadata of real topics, for the lane's threads."""

    def fresh(self, names: Iterable[str], timeout: float) -> set[str]:
        """Return the topics that do not exist, by metadata at most 1 s old; blocks up to `timeout` seconds.

        Raises:
            KafkaUnavailableError: the broker did not tell in time; with a field `topic` where that is about one topic.
            NotAuthorisedError: the broker does not let halfway see the topic in the field `topic`.

        """


@dataclass(frozen=True, kw_only=True)
class LaneContext:
    """What both writers of an incarnation, the lane and the one for suspects, work with."""

    config: KafkaConfig
    loop: Loop
    listener: ShardListener
    observer: Observer
    destinations: Destinations
    quarantine: Quarantine
    shards: set[int]
    """The shards that may be written for; changed on the loop's thread only."""
    largest: int
    """`message.max.bytes` of the lane's producers."""


def largest_by_topic(write: LaneWrite) -> dict[str, int]:
    """Return the real topics of a write, each with the size of its largest message in bytes."""
    largest: dict[str, int] = {}
    for message in write.messages:
        largest[message.topic] = max(largest.get(message.topic, 0), message.size)
    return largest


def admit(context: LaneContext, batch: Sequence[Submission], answers: list[Answer]) -> list[tuple[Submission, Encoded]]:
    """Return what may be written, encoded; whatever may not goes to `answers` with its error.

    Dropped are writes past their deadline, whose caller has gone, of a shard that was given up, or no longer current
    (NotWrittenError); those with a topic that fresh metadata lacks (TopicUnavailableError) and those with a record that
    the producer would refuse (MessageTooLargeError), so that `produce` cannot fail half way.
    """
    wanted = still_wanted(context, batch, answers)
    unusable = _unusable(context, wanted)
    admitted: list[tuple[Submission, Encoded]] = []
    for submission in wanted:
        result = _encoded(context, submission.write, unusable)
        if isinstance(result, HalfwayError):
            answers.append((submission.future, result))
        else:
            admitted.append((submission, result))
    return admitted


def still_wanted(context: LaneContext, batch: Sequence[Submission], answers: list[Answer]) -> list[Submission]:
    """Return what may still be written by its deadline, its shard and the service; the rest is NotWrittenError."""
    now = time.monotonic()
    return [submission for submission in batch if _wanted(context, submission, now, answers)]


def _wanted(context: LaneContext, submission: Submission, now: float, answers: list[Answer]) -> bool:
    write = submission.write
    if submission.future.done():
        return False
    reason = None
    if submission.expires < now:
        reason = "its deadline passed before it could begin"
    elif write.shard not in context.shards:
        reason = f"shard {write.shard} was given up"
    elif not context.listener.current(write):
        reason = "it is no longer current"
    if reason is None:
        return True
    answers.append((submission.future, NotWrittenError(f"{write.id}: {reason}", id=write.id)))
    return False


def _unusable(context: LaneContext, wanted: Sequence[Submission]) -> dict[str, _Refusal]:
    """Return, for each topic that cannot be written to, what makes the error for a caller."""
    names = {message.topic for submission in wanted for message in submission.write.messages}
    if not names:
        return {}
    deadline = time.monotonic() + _METADATA_TIMEOUT_S
    try:
        missing = context.destinations.fresh(names, _METADATA_TIMEOUT_S)
    except (NotAuthorisedError, KafkaUnavailableError) as error:
        if "topic" not in error.fields:
            raise
    else:
        return {name: _Refusal(TopicUnavailableError, name, _DOES_NOT_EXIST.format(name)) for name in missing}
    unusable: dict[str, _Refusal] = {}
    for name in names:  # one topic spoils the answer for all: ask one by one
        try:
            if context.destinations.fresh([name], max(0.0, deadline - time.monotonic())):
                unusable[name] = _Refusal(TopicUnavailableError, name, _DOES_NOT_EXIST.format(name))
        except NotAuthorisedError as error:
            unusable[name] = _Refusal(NotAuthorisedError, name, error.detail)
        except KafkaUnavailableError as error:
            # Once time is over, only those are held up of which Kafka has not told.
            if "topic" not in error.fields and time.monotonic() < deadline:
                raise
            unusable[name] = _Refusal(TopicUnavailableError, name, error.detail)
    return unusable


class _Refusal(NamedTuple):
    error: type[TopicUnavailableError | NotAuthorisedError]
    topic: str
    detail: str


def _encoded(context: LaneContext, write: LaneWrite, unusable: Mapping[str, _Refusal]) -> Encoded | HalfwayError:
    if unusable:
        refusal = next((unusable[message.topic] for message in write.messages if message.topic in unusable), None)
        if refusal is not None:
            return refusal.error(refusal.detail, topic=refusal.topic)
    try:
        encoded = encode(write)
    except Exception as error:
        log.exception("lane_write_not_encoded", id=write.id, shard=write.shard)
        return NotWrittenError(f"{write.id}: it could not be encoded: {error!r}", id=write.id)
    topic = oversized(write, encoded, context.config, context.largest)
    if topic is not None:
        return MessageTooLargeError(f"a record of {write.id} for topic {topic!r} is too large", topic=topic)
    return encoded
