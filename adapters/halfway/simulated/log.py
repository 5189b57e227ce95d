"""One partition: its records and control records, its open transactions, and what it remembers of producers."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, NamedTuple

from confluent_kafka import KafkaError

Headers = list[tuple[str, bytes | None]]
Place = tuple[str, int]
CREATE_TIME: Final = 1
APPEND_TIME: Final = 2
NO_SEQUENCE: Final = -1
_REMEMBERED_BATCHES: Final = 5
_BATCH_OVERHEAD: Final = 61
_RECORD_OVERHEAD: Final = 7
_HEADER_OVERHEAD: Final = 2
_SEQUENCES: Final = 2**31

DEFAULTS: Final[Mapping[str, str]] = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "delete.retention.ms": "86400000",
    "max.compaction.lag.ms": "9223372036854775807",
    "max.message.bytes": "1048588",
    "message.timestamp.after.max.ms": "3600000",
    "message.timestamp.before.max.ms": "9223372036854775807",
    "message.timestamp.type": "CreateTime",
    "min.cleanable.dirty.ratio": "0.5",
    "min.compaction.lag.ms": "0",
    "min.insync.replicas": "1",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
    "segment.bytes": "1073741824",
    "segment.ms": "604800000",
    "unclean.leader.election.enable": "false",
}
"""The settings of a topic that this broker knows, with Kafka 4's defaults."""


class RefusedError(Exception):
    """The broker refuses a request; `code` is Kafka's error code. If it is `in_doubt`, it may still do it later."""

    def __init__(self, code: int, *, in_doubt: bool = False) -> None:
        super().__init__(KafkaError(code).name())
        self.code = code
        self.in_doubt = in_doubt


class NewRecord(NamedTuple):
    """A record as a producer sends it; `timestamp` in ms."""

    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp: int

    @property
    def size(self) -> int:
        """About the bytes that it takes in a batch."""
        named = sum(_HEADER_OVERHEAD + len(name.encode()) + len(value or b"") for name, value in self.headers)
        return _RECORD_OVERHEAD + len(self.key or b"") + len(self.value or b"") + named


@dataclass(slots=True, kw_only=True, eq=False)
class Record:
    """A record at its offset; `control` is the outcome that a marker writes."""

    offset: int
    timestamp: int
    appended_at: int
    producer: int
    epoch: int
    sequence: int
    transactional: bool
    key: bytes | None = None
    value: bytes | None = None
    headers: Headers = field(default_factory=list)
    control: str | None = None
    aborted: bool = False
    removed_from: int | None = None
    """When compaction may remove it, if it is a tombstone or a marker that compaction has met."""


_BY_OFFSET: Final = attrgetter("offset")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Records that are appended or refused together."""

    records: Sequence[NewRecord]
    producer: int
    epoch: int
    sequence: int
    transactional: bool

    @property
    def size(self) -> int:
        return _BATCH_OVERHEAD + sum(record.size for record in self.records)


@dataclass(slots=True)
class _Producer:
    epoch: int
    last: int = NO_SEQUENCE
    batches: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_BATCHES))
    """First sequence, last sequence and base offset of the last batches."""


class Partition:
    """The log of a partition; `settings` are those of its topic and may change."""

    def __init__(self, settings: Mapping[str, str], broker: int, replicas: Sequence[int]) -> None:
        """Start empty, led by a broker."""
        self._settings = settings
        self.leader: int | None = broker
        self.replicas = tuple(replicas)
        self.isr = tuple(replicas)
        self.records: list[Record] = []
        self.start = 0
        self.end = 0
        self._open: dict[int, int] = {}
        """By producer id: the first offset of its open transaction."""
        self._producers: dict[int, _Producer] = {}
        self._segments = [0]
        self._segment_since: int | None = None

    # --- reading

    @property
    def stable(self) -> int:
        """The last stable offset (LSO): readers of committed records get no further."""
        return min(self._open.values(), default=self.end)

    def from_offset(self, offset: int) -> Iterator[Record]:
        """Yield what stands at an offset and behind it, control records too."""
        for place in range(bisect_left(self.records, offset, key=_BY_OFFSET), len(self.records)):
            yield self.records[place]

    def since(self, timestamp: int, limit: int) -> Record | None:
        """Return the first record before `limit` with this time or a later one."""
        return next((one for one in self.records if one.timestamp >= timestamp and one.offset < limit), None)

    @property
    def transactions(self) -> Mapping[int, int]:
        """The producers with an open transaction, each with its first offset."""
        return self._open

    # --- writing

    def require_writable(self) -> None:
        """Raise RefusedError if no leader, or too few replicas in sync, take a record."""
        if self.leader is None:
            raise RefusedError(KafkaError.LEADER_NOT_AVAILABLE)
        if len(self.isr) < min(int(self._settings["min.insync.replicas"]), len(self.replicas)):
            raise RefusedError(KafkaError.NOT_ENOUGH_REPLICAS)

    def append(self, batch: Batch, now: int) -> int:
        """Append a batch with acks=all and return its base offset; RefusedError if nothing is appended."""
        self.require_writable()
        self._validate(batch, now)
        known = self._producers.get(batch.producer)
        last = (batch.sequence + len(batch.records) - 1) % _SEQUENCES
        if known is not None:
            if batch.epoch < known.epoch:
                raise RefusedError(KafkaError.INVALID_PRODUCER_EPOCH)
            repeated = next(
                (base for first, end, base in known.batches if (first, end) == (batch.sequence, last)), None
            )
            if repeated is not None and batch.epoch == known.epoch:
                return repeated
            expected = 0 if batch.epoch > known.epoch else (known.last + 1) % _SEQUENCES
            if batch.sequence != expected:
                raise RefusedError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER)
        if known is None or batch.epoch > known.epoch:
            known = self._producers[batch.producer] = _Producer(batch.epoch)
        base = self.end
        if batch.transactional:
            self._open.setdefault(batch.producer, base)
        known.last = last
        known.batches.append((batch.sequence, last, base))
        by_append = self._settings["message.timestamp.type"] == "LogAppendTime"
        for place, new in enumerate(batch.records):
            self._add(
                Record(
                    offset=base + place,
                    timestamp=now if by_append else new.timestamp,
                    appended_at=now,
                    producer=batch.producer,
                    epoch=batch.epoch,
                    sequence=(batch.sequence + place) % _SEQUENCES,
                    transactional=batch.transactional,
                    key=new.key,
                    value=new.value,
                    headers=new.headers,
                )
            )
        return base

    def _validate(self, batch: Batch, now: int) -> None:
        settings = self._settings
        if batch.size > int(settings["max.message.bytes"]):
            raise RefusedError(KafkaError.MSG_SIZE_TOO_LARGE)
        if settings["message.timestamp.type"] == "CreateTime":
            earliest = now - int(settings["message.timestamp.before.max.ms"])
            latest = now + int(settings["message.timestamp.after.max.ms"])
            if any(not earliest <= record.timestamp <= latest for record in batch.records):
                raise RefusedError(KafkaError.INVALID_TIMESTAMP)
        if "compact" in settings["cleanup.policy"] and any(record.key is None for record in batch.records):
            raise RefusedError(KafkaError.INVALID_RECORD)

    def mark(self, producer: int, epoch: int, *, commit: bool, now: int) -> None:
        """Write the marker that ends a producer's transaction; a producer with a lower epoch is fenced by it."""
        self.require_writable()
        first = self._open.pop(producer, None)
        if first is not None and not commit:
            for record in self.from_offset(first):
                record.aborted = record.aborted or record.producer == producer
        known = self._producers.setdefault(producer, _Producer(epoch))
        if epoch > known.epoch:
            self._producers[producer] = _Producer(epoch)
        self._add(
            Record(
                offset=self.end,
                timestamp=now,
                appended_at=now,
                producer=producer,
                epoch=epoch,
                sequence=NO_SEQUENCE,
                transactional=True,
                control="commit" if commit else "abort",
            )
        )

    def _add(self, record: Record) -> None:
        now = record.appended_at
        if self._segment_since is None:
            self._segment_since = now
        elif now - self._segment_since >= int(self._settings["segment.ms"]):
            self.roll()
            self._segment_since = now
        self.records.append(record)
        self.end = record.offset + 1

    # --- what the log loses

    def roll(self) -> None:
        """Begin a new segment: only those before it are compacted, or deleted when they are old."""
        if self._segments[-1] != self.end:
            self._segments.append(self.end)
            self._segment_since = None

    def clean(self, now: int) -> None:
        """Delete old segments and compact the others, as the topic's settings say."""
        policy = self._settings["cleanup.policy"]
        if "delete" in policy:
            self._retain(now)
        if "compact" in policy:
            self._compact(now)

    def _retain(self, now: int) -> None:
        kept_ms = int(self._settings["retention.ms"])
        while kept_ms >= 0 and len(self._segments) > 1:
            following = self._segments[1]
            times = [record.timestamp for record in self.records if record.offset < following]
            if following > self.stable or (times and max(times) >= now - kept_ms):
                return
            self.delete_before(following)

    def delete_before(self, offset: int) -> None:
        """Move the log start, as retention and a DeleteRecords request do."""
        self.start = max(self.start, min(offset, self.end))
        self.records = self.records[bisect_left(self.records, self.start, key=_BY_OFFSET) :]
        self._segments = [self.start, *(base for base in self._segments if base > self.start)]

    def _compact(self, now: int) -> None:
        until = min(self.stable, self._segments[-1])
        lag_ms = int(self._settings["min.compaction.lag.ms"])
        young = (one.offset for one in self.records if one.offset < until and one.timestamp > now - lag_ms)
        until = min(until, next(young, until))
        newest: dict[bytes | None, int] = {}
        for record in self.records:
            if record.offset < until and record.control is None and not record.aborted:
                newest[record.key] = record.offset
        kept_ms = int(self._settings["delete.retention.ms"])
        kept: list[Record] = []
        for record in self.records:
            if record.offset < until and not self._is_kept(record, newest, now, kept_ms):
                continue
            kept.append(record)
        self.records = kept

    @staticmethod
    def _is_kept(record: Record, newest: Mapping[bytes | None, int], now: int, kept_ms: int) -> bool:
        if record.control is None and (record.aborted or newest[record.key] != record.offset):
            return False
        if record.control is not None or record.value is None:
            if record.removed_from is None:
                record.removed_from = now + kept_ms
            return now < record.removed_from
        return True

    def truncate(self, end: int) -> None:
        """Lose the records from an offset on, as after an unclean election; what they said of producers is lost too."""
        self.records = self.records[: bisect_left(self.records, end, key=_BY_OFFSET)]
        self.end = min(self.end, max(end, self.start))
        self._segments = [base for base in self._segments if base <= self.end] or [self.start]
        self._open.clear()
        self._producers.clear()
        open_records: dict[int, list[Record]] = {}
        for record in self.records:
            known = self._producers.get(record.producer)
            if known is None or known.epoch < record.epoch:
                known = self._producers[record.producer] = _Producer(record.epoch)
            if record.control is not None:
                open_records.pop(record.producer, None)
                continue
            known.last = record.sequence
            if record.transactional:
                open_records.setdefault(record.producer, []).append(record)
        for producer, records in open_records.items():  # their markers are lost
            self._open[producer] = records[0].offset
            for record in records:
                record.aborted = False
