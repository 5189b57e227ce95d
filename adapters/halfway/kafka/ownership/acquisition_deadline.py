"""How long an acquisition may take, and the error that it raises."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.log.partition_reader import PartitionReader

_KINDS: Final = ("half", "op", "parked", "owners")


def stuck_remedy(config: KafkaConfig, shard: int) -> str:
    """Return what an operator can do if a shard cannot be acquired, and the error has no remedy of its own."""
    bootstrap = config.properties["bootstrap.servers"]
    topics = "|".join(config.topic(kind).replace(".", "[.]") for kind in _KINDS)
    hanging = "; ".join(
        f"kafka-transactions.sh --bootstrap-server {bootstrap} find-hanging --topic {config.topic(kind)} "
        f"--partition {shard}"
        for kind in _KINDS
    )
    return (
        f"see whether partition {shard} has a leader and enough replicas in sync in each of the topics: "
        f"kafka-topics.sh --bootstrap-server {bootstrap} --describe --topic '{topics}'; then look for a hanging Kafka "
        f"transaction: {hanging}; and end it: kafka-transactions.sh --bootstrap-server {bootstrap} abort --topic TOPIC "
        f"--partition {shard} --start-offset OFFSET, with the topic and the offset that were printed"
    )


CLOCK: Final = (
    "set the clock of this instance or of the brokers right, or raise message.timestamp.after.max.ms and "
    "message.timestamp.before.max.ms of the internal topics"
)


class AcquireError(Exception):
    """An acquisition failed; the shard may be tried again.

    `fenced`: another instance is acquiring the shard. `outdated`: only a newer release can read some record of the log.
    `remedy`: what the operator can do if the error persists; None for `stuck_remedy`.
    """

    def __init__(
        self, step: str, detail: str, *, remedy: str | None = None, fenced: bool = False, outdated: bool = False
    ) -> None:
        """Keep the step and what happened there."""
        super().__init__(f"{step}: {detail}")
        self.remedy = remedy
        self.fenced = fenced
        self.outdated = outdated


@dataclass(frozen=True, kw_only=True)
class AcquisitionDeadline:
    """The deadline of one acquisition, which is extended while its reader makes progress.

    Reading a long log may take its time: without an owner record all of half is read.
    """

    until: float
    """On `time.monotonic()`, like every time here."""
    stall_s: float
    """How long reading may make no progress."""
    reader: PartitionReader
    cancelled: Callable[[], bool]

    @property
    def deadline(self) -> float:
        """The deadline as of now; the reader's progress extends it."""
        return max(self.until, self.reader.moved_at + self.stall_s)

    def is_stalled(self, since: float) -> bool:
        """Return whether the reader has made no progress for too long, counted from `since` at the earliest."""
        return time.monotonic() - max(since, self.reader.moved_at) > self.stall_s

    def check(self, step: str) -> None:
        """Raise AcquireError if the shard is no longer wanted, or the deadline has passed."""
        self.check_wanted(step)
        if time.monotonic() >= self.deadline:
            raise AcquireError(step, "out of time")

    def check_wanted(self, step: str) -> None:
        """Raise AcquireError if the shard is no longer wanted."""
        if self.cancelled():
            raise AcquireError(step, "the shard is no longer wanted")
