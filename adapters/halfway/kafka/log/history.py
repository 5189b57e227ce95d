"""The port `History`: reads back the records of one transaction, off the event loop and within limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, Message, TopicPartition

from halfway.coordinator.ports import LoggedOp, OpsRead, PlacesRead
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.records.codec import UndecodableError, decode_audit
from halfway.kafka.records.lane_records import headers_of, op_in
from halfway.protocol.errors import KafkaUnavailableError, OverloadedError
from halfway.protocol.records import AuditEvent

T = TypeVar("T")

AT_ONCE: Final = 2
"""The most histories that are read at once."""
MAX_WAITING: Final = 32
MAX_RECORDS: Final = 100_000
"""The most records that are read of op or the audit trail, from each of the known times."""
MAX_TOPIC_RECORDS: Final = 50_000
_MAX_READ_S: Final = 5.0
_BATCH: Final = 1_000
_POLL_S: Final = 0.2
_MAX_LAG_MS: Final = 30_000
"""The timestamps of a commit's messages are at most this much later than that of its op marker."""
_MARKERS_S: Final = 1.0
"""How long it may take until a commit's transaction markers are written."""
_EOF: Final = KafkaError._PARTITION_EOF  # noqa: SLF001 - the names of librdkafka's own errors start so
_REFUSED: Final = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED)


class KafkaHistory:
    """Each read uses a consumer and a thread of its own. A few run at once, and the others wait."""

    def __init__(self, config: KafkaConfig, *, audited: bool) -> None:
        """Keep the configuration; nothing connects before the first read. `audited`: an audit trail exists."""
        self._audited = audited
        self._config = config
        self._places = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0

    async def ops(self, shard: int, transaction_id: str, *, starts: Sequence[int], deadline: float) -> OpsRead:
        """Read the op markers of an id; the port lists the errors."""
        return await self._read(lambda until: self._ops(shard, transaction_id, starts, until), deadline)

    async def places(self, transaction_id: str, topics: Sequence[str], *, at_ms: int, deadline: float) -> PlacesRead:
        """Find the messages of a commit in their topics."""
        return await self._read(lambda until: self._find_messages(transaction_id, topics, at_ms, until), deadline)

    async def acts(self, transaction_id: str, *, since_ms: int, deadline: float) -> Sequence[AuditEvent]:
        """Read the audit events of an id from a time on."""
        if not self._audited:
            return ()
        return await self._read(lambda until: self._acts(transaction_id, since_ms, until), deadline)

    async def _read(self, work: Callable[[float], T], deadline: float) -> T:
        if self._waiting >= MAX_WAITING:
            raise OverloadedError(f"{self._waiting} histories are being read already: try again later")
        loop = asyncio.get_running_loop()
        self._waiting += 1
        try:
            async with asyncio.timeout_at(deadline), self._places:
                until = time.monotonic() + min(_MAX_READ_S, max(0.0, deadline - loop.time()) / 2)
                return await asyncio.to_thread(work, until)
        except TimeoutError:
            raise KafkaUnavailableError("the history could not be read in time: try again") from None
        except KafkaException as exception:
            raise KafkaUnavailableError(f"the history could not be read: {exception.args[0].str()}") from exception
        finally:
            self._waiting -= 1

    # --- on a thread

    def _ops(self, shard: int, transaction_id: str, starts: Sequence[int], until: float) -> OpsRead:
        topic, key = self._config.op_topic, transaction_id.encode()
        with self._consumer() as consumer:
            offsets, complete = self._offsets(consumer, topic, shard, starts, until)
            by_offset: dict[int, LoggedOp] = {}
            position, ended = -1, not offsets
            for start in offsets:
                if start < position or ended:
                    continue
                # The records between the last one read and this start are left out.
                complete = complete and position < 0
                consumer.assign([TopicPartition(topic, shard, start)])
                following = min((later for later in offsets if later > start), default=None)
                for read, message in enumerate(_records(consumer, until)):
                    if message is None:
                        ended = True
                        break
                    position = (message.offset() or 0) + 1
                    if message.key() == key and (logged := self._op(message)) is not None:
                        by_offset[logged.offset] = logged
                        ended = logged.op.kind.final
                    if ended or (read >= MAX_RECORDS and (following is None or position < following)):
                        break
            return OpsRead(ops=_by_offset(by_offset), complete=complete and ended)

    def _offsets(
        self, consumer: Consumer, topic: str, shard: int, starts: Sequence[int], until: float
    ) -> tuple[list[int], bool]:
        """Return the offsets of the given times; without times, the offset from which the end of the log is read."""
        left = max(0.1, until - time.monotonic())
        if not starts:
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, shard), timeout=left)
            start = max(low, high - MAX_RECORDS)
            return [start], start == low
        offsets = []
        for at in starts:
            (place,) = consumer.offsets_for_times([TopicPartition(topic, shard, at)], left)
            if place.error is not None:
                raise KafkaException(place.error)
            if place.offset >= 0:
                offsets.append(place.offset)
        return sorted(set(offsets)), True

    def _op(self, message: Message) -> LoggedOp | None:
        try:
            op = op_in(message, self._config.shards)
        except UndecodableError:
            return None  # the owner of the shard has logged and counted it
        return LoggedOp(offset=message.offset() or 0, timestamp=message.timestamp()[1], op=op)

    def _acts(self, transaction_id: str, since_ms: int, until: float) -> Sequence[AuditEvent]:
        topic, key = self._config.topic("audit"), transaction_id.encode()
        events: dict[str, AuditEvent] = {}
        with self._consumer() as consumer:
            (place,) = consumer.offsets_for_times(
                [TopicPartition(topic, 0, since_ms)], max(0.1, until - time.monotonic())
            )
            if place.error is not None or place.offset < 0:
                return ()
            consumer.assign([place])
            for read, message in enumerate(_records(consumer, until)):
                if message is None or read >= MAX_RECORDS:
                    break
                if message.key() == key:
                    with suppress(UndecodableError):  # halfway did not write it
                        event = decode_audit(message.value())
                        events[event.id] = event
        return tuple(events.values())

    def _find_messages(self, transaction_id: str, topics: Sequence[str], at_ms: int, until: float) -> PlacesRead:
        places: dict[int, tuple[int, int]] = {}
        details = []
        for topic in dict.fromkeys(topics):
            expected = topics.count(topic)
            try:
                located = self._find_in_topic(transaction_id, topic, expected, at_ms, until)
            except KafkaException as exception:
                details.append(_error_detail(topic, exception.args[0]))
                continue
            places.update(located)
            if len(located) < expected:
                details.append(
                    f"{expected - len(located)} of {expected} messages were not found in {topic}: it is compacted, "
                    "they are past its retention, or too much was written at the same time"
                )
        return PlacesRead(places=places, detail="; ".join(details) or None)

    def _find_in_topic(
        self, transaction_id: str, topic: str, expected: int, at_ms: int, until: float
    ) -> dict[int, tuple[int, int]]:
        places: dict[int, tuple[int, int]] = {}
        with self._consumer() as consumer:
            left = max(0.1, until - time.monotonic())
            metadata = consumer.list_topics(topic, timeout=left).topics[topic]
            if metadata.error is not None:
                raise KafkaException(metadata.error)
            times = [TopicPartition(topic, number, at_ms) for number in metadata.partitions]
            starts = [start for start in consumer.offsets_for_times(times, left) if start.offset != OFFSET_END]
            if any(start.error is not None for start in starts):
                raise KafkaException(next(start.error for start in starts if start.error is not None))
            consumer.assign(starts)
            unfinished = {start.partition for start in starts}
            at_end: set[int] = set()
            read = 0
            markers_until = time.monotonic() + (_MARKERS_S if time.time() * 1000 - at_ms < _MAX_LAG_MS else 0.0)
            while len(places) < expected and read < MAX_TOPIC_RECORDS and time.monotonic() < until:
                if unfinished <= at_end and time.monotonic() > markers_until:
                    break
                for message in consumer.consume(_BATCH, _POLL_S):
                    partition = message.partition() or 0
                    if (error := message.error()) is not None:
                        if error.code() != _EOF:
                            raise KafkaException(error)
                        at_end.add(partition)
                        continue
                    read += 1
                    at_end.discard(partition)
                    if message.timestamp()[1] > at_ms + _MAX_LAG_MS:
                        unfinished.discard(partition)
                    number = self._message_number(message, transaction_id)
                    if number is not None:
                        places[number] = (partition, message.offset() or 0)
        return places

    def _message_number(self, message: Message, transaction_id: str) -> int | None:
        """Return the number of a transaction's message, None if the message is of another transaction."""
        headers: dict[str, bytes | None] = dict(headers_of(message))  # type: ignore[arg-type]
        if headers.get("halfway-transaction-id") != transaction_id.encode():
            return None
        name, prefix = self._config.prefix_header
        number = (headers.get("halfway-message") or b"").partition(b"/")[0]
        return int(number) if headers.get(name) == prefix and number.isdigit() else None

    @contextmanager
    def _consumer(self) -> Iterator[Consumer]:
        consumer = Consumer(self._config.consumer(**{"enable.partition.eof": True, "auto.offset.reset": "earliest"}))
        try:
            yield consumer
        finally:
            consumer.close()


def _records(consumer: Consumer, until: float) -> Iterator[Message | None]:
    """Yield records, and None at the end of the partition; stop when the time is up."""
    while time.monotonic() < until:
        for message in consumer.consume(_BATCH, _POLL_S):
            error = message.error()
            if error is None:
                yield message
            elif error.code() == _EOF:
                yield None
            else:
                raise KafkaException(error)


def _by_offset(ops: dict[int, LoggedOp]) -> tuple[LoggedOp, ...]:
    return tuple(ops[offset] for offset in sorted(ops))


def _error_detail(topic: str, error: KafkaError) -> str:
    if error.code() in _REFUSED:
        return f"Kafka does not let halfway read {topic}: grant it Read (ACL) to see the offsets of messages"
    return f"{topic} could not be read: {error.str()}"
