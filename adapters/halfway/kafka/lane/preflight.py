"""The checks that a write must pass before its Kafka transaction begins (docs/protocol.md#end-the-lane)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import structlog
from msgspec import structs

from halfway.domain.errors import (
    HalfwayError,
    KafkaUnavailableError,
    MessageTooLargeError,
    NotAuthorisedError,
    NotWrittenError,
    TopicUnavailableError,
)
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.loop import Answer, Loop
from halfway.kafka.lane.quarantine import Quarantine
from halfway.kafka.lane.queue import Submission
from halfway.kafka.records.lane_records import ANY_PARTITION, Encoded, UserRecord, encode, oversized
from halfway.kafka.topics.partition_availability import WritablePartitions
from halfway.service.ports import LaneWrite, Observer, ShardListener

log = structlog.get_logger()

_METADATA_TIMEOUT_S: Final = 5.0
_DOES_NOT_EXIST: Final = "topic {!r} does not exist: create it, and the end can be done"
_NOT_SHOWN: Final = "topic {!r} has just changed its partitions: try again"

Shows = Callable[[str, int], bool]
"""Whether the producer that will write knows as many partitions of a topic: it refuses to write to one beyond them."""


class Destinations(Protocol):
    """Fresh metadata of real topics, for the lane's threads."""

    def fresh(self, names: Iterable[str], timeout: float) -> Mapping[str, WritablePartitions | None]:
        """Return where messages may go, None for a topic that does not exist, by metadata at most 1 s old; blocks.

        Raises:
            KafkaUnavailableError: the broker did not answer in time; with a field `topic` if that is about one topic.
            NotAuthorisedError: the broker does not let halfway see the topic in the field `topic`.

        """


@dataclass(frozen=True, kw_only=True)
class LaneContext:
    """What both writers of an incarnation share: the lane and the lane for suspects."""

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


def admit(
    context: LaneContext, batch: Sequence[Submission], answers: list[Answer], shows: Shows
) -> list[tuple[Submission, Encoded]]:
    """Return the writes that may be written, encoded; each of the others goes to `answers` with its error.

    Dropped are writes past their deadline, whose caller has gone, of a shard that was given up, or no longer current
    (NotWrittenError); those with a topic or partition that fresh metadata lacks, or that takes no records now
    (TopicUnavailableError), those with a record that the producer would refuse (MessageTooLargeError), and those that
    cannot be encoded, so that `produce` cannot fail half way, and a partition that is closed holds nobody else up.
    """
    wanted = still_wanted(context, batch, answers)
    targets = _targets(context, wanted, shows)
    admitted: list[tuple[Submission, Encoded]] = []
    for submission in wanted:
        result = _encoded(context, submission, targets)
        if isinstance(result, HalfwayError):
            answers.append((submission.reply, result))
        else:
            admitted.append((submission, result))
    return admitted


def still_wanted(context: LaneContext, batch: Sequence[Submission], answers: list[Answer]) -> list[Submission]:
    """Return what may still be written by its deadline, its shard and the service; the rest is NotWrittenError."""
    now = time.monotonic()
    return [submission for submission in batch if _wanted(context, submission, now, answers)]


def _wanted(context: LaneContext, submission: Submission, now: float, answers: list[Answer]) -> bool:
    write = submission.write
    if submission.reply.done():
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
    answers.append((submission.reply, NotWrittenError(f"{write.id}: {reason}", id=write.id)))
    return False


def _targets(
    context: LaneContext, wanted: Sequence[Submission], shows: Shows
) -> dict[str, _Refusal | WritablePartitions]:
    """Return, for each topic that not every message of a batch can go to, why not, or where to.

    Nearly always there are none, and then no message is checked further.
    """
    names: set[str] = set()
    chosen: set[str] = set()
    for submission in wanted:
        for message in submission.write.messages:
            names.add(message.topic)
            if message.partition is not None:
                chosen.add(message.topic)
    if not names:
        return {}
    targets: dict[str, _Refusal | WritablePartitions] = {}
    for name, found in _found(context, names).items():
        if found is None:
            targets[name] = _Refusal(TopicUnavailableError, name, _DOES_NOT_EXIST.format(name))
        elif isinstance(found, _Refusal):
            targets[name] = found
        elif name in chosen and not shows(name, found.partitions):
            targets[name] = _Refusal(TopicUnavailableError, name, _NOT_SHOWN.format(name))
        elif found.closed or name in chosen:
            targets[name] = found
    return targets


def _found(context: LaneContext, names: set[str]) -> Mapping[str, WritablePartitions | _Refusal | None]:
    """Look topics up: all at once, or one by one if one of them makes the request for all fail."""
    deadline = time.monotonic() + _METADATA_TIMEOUT_S
    try:
        return context.destinations.fresh(names, _METADATA_TIMEOUT_S)
    except (NotAuthorisedError, KafkaUnavailableError) as error:
        if "topic" not in error.fields:
            raise
    found: dict[str, WritablePartitions | _Refusal | None] = {}
    for name in names:
        try:
            found |= context.destinations.fresh([name], max(0.0, deadline - time.monotonic()))
        except NotAuthorisedError as error:
            found[name] = _Refusal(NotAuthorisedError, name, error.detail)
        except KafkaUnavailableError as error:
            # Once time is over, only the topics that Kafka has not described are held up.
            if "topic" not in error.fields and time.monotonic() < deadline:
                raise
            found[name] = _Refusal(TopicUnavailableError, name, error.detail)
    return found


class _Refusal(NamedTuple):
    error: type[TopicUnavailableError | NotAuthorisedError]
    topic: str
    detail: str


def _refused(write: LaneWrite, targets: Mapping[str, _Refusal | WritablePartitions]) -> HalfwayError | None:
    """Return why one of a write's messages cannot be written now, None if all can."""
    for message in write.messages:
        target = targets.get(message.topic)
        if isinstance(target, _Refusal):
            return target.error(target.detail, topic=target.topic)
        detail = None if target is None else target.refusal(message.partition, message.key)
        if detail is not None:
            return TopicUnavailableError(detail, topic=message.topic)
    return None


def _steered(message: UserRecord, targets: Mapping[str, _Refusal | WritablePartitions]) -> UserRecord:
    """Choose an open partition for a message that may go to any."""
    target = targets.get(message.topic)
    if (
        message.partition == ANY_PARTITION
        and message.key is None
        and isinstance(target, WritablePartitions)
        and target.closed
    ):
        return structs.replace(message, partition=target.any_open())
    return message


def _encoded(
    context: LaneContext, submission: Submission, targets: Mapping[str, _Refusal | WritablePartitions]
) -> Encoded | HalfwayError:
    write = submission.write
    if targets:
        refusal = _refused(write, targets)
        if refusal is not None:
            return refusal
    try:
        encoded = encode(write, context.config)
        if targets:
            encoded = structs.replace(encoded, real=[_steered(message, targets) for message in encoded.real])
    except Exception:
        # It would fail the same way again, so the caller does not repeat it; the error may hold parts of the payload.
        log.exception("lane_write_not_encoded", id=write.id, shard=write.shard)
        return HalfwayError(f"a record of {write.id!r} cannot be encoded: the log of the coordinator says why")
    topic = oversized(submission.size, encoded, context.config, context.largest)
    if topic is not None:
        return MessageTooLargeError(f"a record of {write.id} for topic {topic!r} is too large", topic=topic)
    return encoded
