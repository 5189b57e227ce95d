"""What was acknowledged against what stands in the real topic, as a `read_committed` consumer sees it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

COMMITTED: Final = b"+"
"""Marks an id whose commit was answered 200."""
UNCONFIRMED: Final = b"?"
"""Marks an id whose commit was sent and not answered so: it may stand or not, but not twice."""
ONLY_MESSAGE: Final = b"1/1"
"""The header `halfway-message` of a transaction of one message."""

Copies = Counter[tuple[bytes | None, bytes | None]]
"""How often each message was read, by the headers `halfway-transaction-id` and `halfway-message`."""
Ends = Mapping[int, int]

_READ_S: Final = 120.0
_ASK_S: Final = 30.0
_AT_ONCE: Final = 5_000
_LOOK_S: Final = 0.1


class AuditError(Exception):
    """The topic could not be read to its end."""


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """The transactions whose commit was sent."""

    committed: frozenset[bytes]
    unconfirmed: frozenset[bytes]

    @classmethod
    def read(cls, path: Path) -> Sent:
        """Read what the load wrote down."""
        lines = path.read_bytes().splitlines()
        return cls(
            committed=frozenset(line[1:] for line in lines if line.startswith(COMMITTED)),
            unconfirmed=frozenset(line[1:] for line in lines if line.startswith(UNCONFIRMED)),
        )


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit found, in messages.

    `missing`: acknowledged, and not there. `doubled`: there more than once. `extra`: of no transaction whose commit was
    sent, or not one that the transaction has.
    """

    read: int
    missing: int
    doubled: int
    extra: int

    @property
    def clean(self) -> bool:
        """Whether everything stands exactly as it was acknowledged."""
        return not (self.missing or self.doubled or self.extra)


def judge(sent: Sent, copies: Copies) -> Verdict:
    """Compare what was sent, one message a transaction, with what was read."""
    maybe = sent.committed | sent.unconfirmed
    return Verdict(
        read=copies.total(),
        missing=sum((one, ONLY_MESSAGE) not in copies for one in sent.committed),
        doubled=sum(count > 1 for count in copies.values()),
        extra=sum(message != ONLY_MESSAGE or one not in maybe for one, message in copies),
    )


class Auditor:
    """Reads the real topic."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        """Keep where it is; each call connects anew."""
        self._servers = bootstrap_servers
        self._topic = topic

    def ends(self) -> dict[int, int]:
        """Return the end of each partition, records of Kafka transactions that are still open included."""
        with _Reader(self._servers, "read_uncommitted") as consumer:
            partitions = consumer.list_topics(self._topic, timeout=_ASK_S).topics[self._topic].partitions
            return {
                number: consumer.get_watermark_offsets(TopicPartition(self._topic, number), timeout=_ASK_S)[1]
                for number in partitions
            }

    def copies(self, began: Ends) -> Copies:
        """Count the committed messages from where each partition ended before to where it ends now.

        Raises:
            AuditError: its end was not reached in time.

        """
        ends = self.ends()
        left = {number for number, end in ends.items() if end > began.get(number, 0)}
        found: Copies = Counter()
        deadline = time.monotonic() + _READ_S
        with _Reader(self._servers, "read_committed") as consumer:
            consumer.assign([TopicPartition(self._topic, number, began.get(number, 0)) for number in left])
            while left:
                if time.monotonic() > deadline:
                    raise AuditError(f"{self._topic} was not read to its end within {_READ_S:g} s: {left} are left")
                found.update(_headers(message) for message in _records(consumer, ends, left))
        return found


class _Reader:
    """A consumer that is closed in any case."""

    def __init__(self, bootstrap_servers: str, isolation: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap_servers,
                "group.id": "bench-audit",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "enable.partition.eof": True,
                "isolation.level": isolation,
                "queued.max.messages.kbytes": 65_536,
            }
        )

    def __enter__(self) -> Consumer:
        return self._consumer

    def __exit__(self, *_: object) -> None:
        self._consumer.close()


def _records(consumer: Consumer, ends: Ends, left: set[int]) -> Iterable[Message]:
    """Give what was read; a partition whose end was reached is taken out of `left`."""
    for message in consumer.consume(_AT_ONCE, _LOOK_S):
        error = message.error()
        if error is None:
            yield message
        elif error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - the names of librdkafka's own errors start so
            raise KafkaException(error)
        else:
            partition, offset = message.partition(), message.offset()
            # A read_committed consumer takes the last stable offset for the end, which may be behind for a moment.
            if partition is not None and offset is not None and offset >= ends[partition]:
                left.discard(partition)


def _headers(message: Message) -> tuple[bytes | None, bytes | None]:
    found: dict[str, object] = dict(message.headers() or ())
    return _bytes(found.get("halfway-transaction-id")), _bytes(found.get("halfway-message"))


def _bytes(value: object) -> bytes | None:
    return value if isinstance(value, bytes) else None
