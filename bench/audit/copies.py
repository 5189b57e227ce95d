"""Compares the acknowledged transactions with the real topic, as a `read_committed` consumer sees it."""

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
"""Marks an id whose commit was sent and not confirmed: its message may be written or not, but not twice."""
ONLY_MESSAGE: Final = b"1/1"
"""The header `halfway-message` of a transaction of one message."""

Copies = Counter[tuple[bytes | None, bytes | None]]
"""How often each message was read, by the headers `halfway-transaction-id` and `halfway-message`."""
Ends = Mapping[int, int]

_READ_S: Final = 120.0
_REQUEST_S: Final = 30.0
_BATCH: Final = 5_000
_POLL_S: Final = 0.1


class AuditError(Exception):
    """The topic could not be read to its end."""


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """The transactions whose commit was sent."""

    committed: frozenset[bytes]
    unconfirmed: frozenset[bytes]

    @classmethod
    def read(cls, path: Path) -> Sent:
        """Read the file of a load."""
        lines = path.read_bytes().splitlines()
        return cls(
            committed=frozenset(line[1:] for line in lines if line.startswith(COMMITTED)),
            unconfirmed=frozenset(line[1:] for line in lines if line.startswith(UNCONFIRMED)),
        )


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an audit, in messages.

    `missing`: acknowledged, but missing. `doubled`: written more than once. `extra`: of no transaction whose commit was
    sent, or not a message of its transaction.
    """

    read: int
    missing: int
    doubled: int
    extra: int

    @property
    def clean(self) -> bool:
        """Whether the topic contains exactly what was acknowledged."""
        return not (self.missing or self.doubled or self.extra)


def judge(sent: Sent, copies: Copies) -> Verdict:
    """Compare the sent transactions, with one message each, with the messages that were read."""
    sent_ids = sent.committed | sent.unconfirmed
    return Verdict(
        read=copies.total(),
        missing=sum((transaction_id, ONLY_MESSAGE) not in copies for transaction_id in sent.committed),
        doubled=sum(count > 1 for count in copies.values()),
        extra=sum(message != ONLY_MESSAGE or transaction_id not in sent_ids for transaction_id, message in copies),
    )


class Auditor:
    """Reads the real topic."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        """Keep the address; each call makes a new connection."""
        self._servers = bootstrap_servers
        self._topic = topic

    def ends(self) -> dict[int, int]:
        """Return the end offset of each partition, including records of open Kafka transactions."""
        with _Reader(self._servers, "read_uncommitted") as consumer:
            partitions = consumer.list_topics(self._topic, timeout=_REQUEST_S).topics[self._topic].partitions
            return {
                number: consumer.get_watermark_offsets(TopicPartition(self._topic, number), timeout=_REQUEST_S)[1]
                for number in partitions
            }

    def copies(self, start_offsets: Ends) -> Copies:
        """Count the committed messages between the earlier and the current end of each partition.

        Raises:
            AuditError: the end was not reached in time.

        """
        ends = self.ends()
        left = {number for number, end in ends.items() if end > start_offsets.get(number, 0)}
        found: Copies = Counter()
        deadline = time.monotonic() + _READ_S
        with _Reader(self._servers, "read_committed") as consumer:
            consumer.assign([TopicPartition(self._topic, number, start_offsets.get(number, 0)) for number in left])
            while left:
                if time.monotonic() > deadline:
                    raise AuditError(f"{self._topic} was not read to its end within {_READ_S:g} s: {left} are left")
                found.update(_headers(message) for message in _records(consumer, ends, left))
        return found


class _Reader:
    """A context manager for a consumer, which it always closes."""

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
    """Yield the records; remove a partition from `left` when its end is reached."""
    for message in consumer.consume(_BATCH, _POLL_S):
        error = message.error()
        if error is None:
            yield message
        elif error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - the names of librdkafka's own errors start so
            raise KafkaException(error)
        else:
            partition, offset = message.partition(), message.offset()
            # To a read_committed consumer the LSO is the end, which may be lower for a moment.
            if partition is not None and offset is not None and offset >= ends[partition]:
                left.discard(partition)


def _headers(message: Message) -> tuple[bytes | None, bytes | None]:
    headers: dict[str, object] = dict(message.headers() or ())
    return _bytes(headers.get("halfway-transaction-id")), _bytes(headers.get("halfway-message"))


def _bytes(value: object) -> bytes | None:
    return value if isinstance(value, bytes) else None
