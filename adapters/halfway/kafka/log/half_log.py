"""Appends what the lane does not write, with an idempotent producer: first prepares (docs/protocol.md#prepare).

It also reads payloads back that the cache has evicted, and returns the end offset of half[s].
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

import structlog
from confluent_kafka import KafkaError, KafkaException, Message

from halfway.coordinator.operations import Deadlines, tick_of
from halfway.coordinator.ports import Appended, Observer
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.librdkafka_events import ROUND_TRIPS
from halfway.kafka.clients.reader import PartitionEnds
from halfway.kafka.clients.seam import Producer, Properties
from halfway.kafka.clients.threads import Loop, answer_all
from halfway.kafka.clients.transactional_producer import OUT_OF_SEQUENCE
from halfway.kafka.log.history import RecordReader
from halfway.kafka.records.codec import Headers, decode_half, decode_parked, encode_half, half_headers
from halfway.protocol.errors import MessageTooLargeError, OutcomeUnknownError, OverloadedError, TopicUnavailableError
from halfway.protocol.records import Half, Parked
from halfway.protocol.transactions import State

log = structlog.get_logger(__name__)

_POLL_S: Final = 0.1
_TOO_LARGE: Final = KafkaError.MSG_SIZE_TOO_LARGE
_FATAL: Final = KafkaError._FATAL  # noqa: SLF001 - the names of librdkafka's own errors start so
_REPLACE_S: Final = 1.0
"""The least time between two replacements of the producer."""
_SILENT_S: Final = 10.0
"""How long the polling thread may be at one call, and a failed producer in use. Both take milliseconds."""
_UNREPORTED: Final = 4
"""How many prepare time-outs records may wait for a delivery report: librdkafka gives each record up after one."""

T = TypeVar("T")


Record = tuple[bytes, bytes | None, Headers, T]
"""Key, value and headers of a record to append, and what its caller knows it by."""


class _Append(Generic[T]):
    """The records of one call of `append`, until each has its delivery report."""

    __slots__ = ("_client", "_reports", "_topic", "appended", "deadline", "is_late", "waiting")

    def __init__(self, topic: str, deadline: float, client: _Client, reports: _Reports, appended: Appended[T]) -> None:
        self._topic = topic
        self._client = client
        self._reports = reports
        self.deadline = deadline
        self.appended = appended
        self.waiting: dict[bytes, tuple[T, int]] = {}
        """The records without a delivery report, by key: what its caller knows it by, and its bytes."""
        self.is_late = False

    def answer_late(self) -> None:
        self.is_late = True
        detail = f"Kafka did not confirm a record of {self._topic} in time"
        self.appended([(token, OutcomeUnknownError(detail)) for token, _ in self.waiting.values()])

    def report(self, error: KafkaError | None, message: Message) -> None:
        """Take a delivery report, on the polling thread."""
        if error is not None and error.code() != _TOO_LARGE:
            self._client.failed(error)
        self._reports.append((self, error, message))


_Reports = list[tuple[_Append[Any], KafkaError | None, Message]]


class _Client:
    """A producer, and the fatal error that ended it."""

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self.made_at = time.monotonic()
        self.fatal: str | None = None
        self.code: int | None = None

    def failed(self, error: KafkaError) -> None:
        """Note the error of a record: once the producer has failed, its records fail with `_FATAL`."""
        if error.fatal() or error.code() == _FATAL:
            self.fatal = self.fatal or error.str()

    def poll(self, timeout: float) -> None:
        """Serve the delivery reports. A fatal error is raised here, once; what it stops is served by the next poll.

        Any other exception was raised by a report. It must not end the thread, so it ends the producer.
        """
        try:
            self.producer.poll(timeout)
        except KafkaException as exception:
            self.fatal, self.code = exception.args[0].str(), exception.args[0].code()
        except Exception as error:
            log.exception("delivery_report_failed")
            self.fatal = repr(error)


class RecordWriter:
    """Appends records with acks=all; `append` on the loop's thread, polling on a thread of its own.

    The records in flight are bounded in number and bytes. A producer with a fatal error is replaced; the outcome of the
    records it had in flight is unknown. `trouble` says if the writer works no more.
    """

    def __init__(
        self,
        config: KafkaConfig,
        *,
        name: str,
        properties: Properties | None = None,
        on_lost_sequence: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Keep the configuration and further properties of its producer; nothing connects before `start`.

        `on_lost_sequence` is called on the loop's thread if a partition has lost records of a producer.
        """
        self._on_lost_sequence = on_lost_sequence
        self._config = config
        self._name = name
        self._properties = {"linger.ms": 0} | (properties or {})
        self._thread = threading.Thread(target=self._run, name=f"halfway-{name}", daemon=True)
        self._stopping = threading.Event()
        # On the loop's thread.
        self._appends: set[_Append[Any]] = set()
        self._empty = asyncio.Event()
        self._deadlines: Deadlines[_Append[Any]] = Deadlines(_Append.answer_late)
        self._records = 0
        self._bytes = 0
        self._reported_at = 0.0
        """When a record last got its report, or the first of those that wait was appended (`time.monotonic`)."""
        # On the polling thread, except the reference to the producer, which `append` reads.
        self._reports: _Reports = []
        self._loop: Loop | None = None
        self._client: _Client | None = None
        self._polled_at = 0.0
        """When the polling thread last began a poll of a working producer (`time.monotonic`)."""

    def start(self) -> None:
        """Create the producer and the thread that polls it; call it on the loop's thread."""
        self._loop = Loop(asyncio.get_running_loop())
        self._client = self._make()
        self._polled_at = time.monotonic()
        self._thread.start()

    async def stop(self) -> None:
        """Wait up to the prepare time-out for the records in flight, then end the thread."""
        if self._appends:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.prepare_timeout_s):
                    await self._empty.wait()
        self._stopping.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        for one in list(self._appends):
            self._forget(one)
            if not one.is_late:
                one.answer_late()

    @property
    def trouble(self) -> str | None:
        """Why nothing can be appended through this instance, None if it can be; not whether Kafka answers."""
        if self._client is None or self._stopping.is_set():
            return None
        now = time.monotonic()
        if not self._thread.is_alive():
            return f"the thread that writes {self._name} has ended"
        if (silent_s := now - self._polled_at) > _SILENT_S:
            return f"the writer of {self._name} has not had a working producer for {silent_s:.0f} s"
        unreported_s = now - self._reported_at
        if self._records and unreported_s > _UNREPORTED * self._config.prepare_timeout_s:
            return f"the writer of {self._name} has had no delivery report for {unreported_s:.0f} s"
        return None

    @property
    def in_flight(self) -> tuple[int, int]:
        """Records and bytes that wait for a delivery report."""
        return self._records, self._bytes

    def append(
        self, topic: str, partition: int, records: Sequence[Record[T]], appended: Appended[T], *, deadline: float
    ) -> None:
        """Append records of different keys in their order, and pass the offset of each, or its error, to `appended`.

        Errors:
            OutcomeUnknownError: the record may or may not have been stored.
            TopicUnavailableError: the topic's limit was lowered below the record's size; nothing was stored.
            OverloadedError: too much is in flight, or there is no time left; nothing was stored.

        """
        client = self._client
        if client is None or self._stopping.is_set():
            appended([(token, OverloadedError("halfway is not running")) for *_, token in records])
            return
        if deadline <= asyncio.get_running_loop().time():
            appended([(token, OverloadedError("no time was left to write to Kafka")) for *_, token in records])
            return
        one = _Append(topic, deadline, client, self._reports, appended)
        produce, report, waiting = client.producer.produce, one.report, one.waiting
        most, most_bytes = self._config.writer_in_flight, self._config.writer_in_flight_bytes
        refused: list[tuple[T, int | Exception]] = []
        for key, value, headers, token in records:
            size = len(key) + len(value or b"")
            if self._records >= most or (self._bytes and self._bytes + size > most_bytes):
                detail = f"{self._records} records with {self._bytes} bytes wait for Kafka already"
                refused.append((token, OverloadedError(detail)))
                continue
            try:
                produce(topic, value, key, partition, report, None, 0, headers)
            except Exception as error:  # noqa: BLE001 - whatever it is, its caller gets it
                refused.append((token, _refusal(topic, error)))
                continue
            waiting[key] = token, size
            self._records += 1
            self._bytes += size
        if waiting:
            if not self._appends:
                self._reported_at = time.monotonic()
            self._appends.add(one)
            self._empty.clear()
            self._deadlines.watch(one, tick_of(deadline))
        if refused:
            appended(refused)

    def append_one(
        self, topic: str, partition: int, *, key: bytes, value: bytes | None, headers: Headers, deadline: float
    ) -> asyncio.Future[int]:
        """Append one record; the future is its offset, or one of the errors of `append`."""
        stored: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        self.append(topic, partition, [(key, value, headers, stored)], answer_all, deadline=deadline)
        return stored

    def _forget(self, one: _Append[Any]) -> None:
        self._deadlines.forget(one, tick_of(one.deadline))
        self._appends.discard(one)
        if not self._appends:
            self._empty.set()

    # --- the polling thread

    def _make(self) -> _Client:
        producer = self._config.make_producer(
            **{
                **self._properties,
                # Under load what comes meanwhile shares the next request, which costs the broker hardly more than a
                # request with one record; nothing waits if nothing is under way.
                "max.in.flight.requests.per.connection": 2,
                "queue.buffering.max.messages": self._config.writer_in_flight + 1_000,
                "queue.buffering.max.kbytes": 2 * self._config.writer_in_flight_bytes // 1024,
            }
        )
        return _Client(producer)

    def _run(self) -> None:
        while not self._stopping.is_set():
            client = self._client
            self._poll(client, _POLL_S)
            if client is not None and client.fatal is not None:
                self._replace(client, client.fatal)
        if self._client is not None:
            self._retire(self._client)

    def _poll(self, client: _Client | None, timeout: float) -> None:
        if client is not None:
            if client.fatal is None:
                self._polled_at = time.monotonic()
            client.poll(timeout)
        if self._reports and self._loop is not None:
            reports = self._reports.copy()
            self._reports.clear()
            self._loop.post(self._take_reports, reports)

    def _replace(self, failed: _Client, reason: str) -> None:
        # A missing ACL, for example, ends every producer as soon as it connects.
        self._stopping.wait(max(0.0, failed.made_at + _REPLACE_S - time.monotonic()))
        try:
            fresh = self._make()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next attempt may succeed
            log.warning("producer_not_replaced", writer=self._name, reason=reason, error=str(error))
            self._stopping.wait(_POLL_S)
            return
        log.warning("producer_replaced", writer=self._name, reason=reason)
        if failed.code in OUT_OF_SEQUENCE and self._loop is not None:
            self._loop.post(self._on_lost_sequence, reason)
        self._client = fresh
        self._retire(failed, fresh)

    def _retire(self, client: _Client, successor: _Client | None = None) -> None:
        """Purge the records that a producer still holds; their delivery reports fail the callers' futures.

        Its successor is already in use and is polled meanwhile.
        """
        producer = client.producer
        with suppress(KafkaException):
            producer.purge(in_queue=True, in_flight=True, blocking=True)
        until = time.monotonic() + 2 * self._config.prepare_timeout_s
        self._poll(client, 0)
        while len(producer) and time.monotonic() < until:
            if successor is None:
                self._poll(client, _POLL_S)
            else:
                self._poll(successor, _POLL_S)
                self._poll(client, 0)
        self._poll(client, 0)

    # --- the loop's thread again

    def _take_reports(self, reports: _Reports) -> None:
        results: dict[_Append[Any], list[tuple[Any, int | Exception]]] = {}
        self._reported_at = time.monotonic()
        for one, error, message in reports:
            token, size = one.waiting.pop(message.key())  # type: ignore[arg-type] # records are produced with bytes
            self._records -= 1
            self._bytes -= size
            if not one.waiting:
                self._forget(one)
            if not one.is_late:
                result = message.offset() if error is None else _failure(error, message)
                results.setdefault(one, []).append((token, -1 if result is None else result))
        for one, some in results.items():
            one.appended(some)


def _refusal(topic: str, error: Exception) -> Exception:
    """Return the error of a record that the producer did not take."""
    if isinstance(error, BufferError):
        return OverloadedError("too many records wait for Kafka already")
    if not isinstance(error, KafkaException):
        return error
    cause = error.args[0]
    if cause.code() == _TOO_LARGE:
        return _limit_lowered(topic)
    # The polling thread has seen this fatal error or will see it: the caller's retry goes to the next producer.
    return OverloadedError(f"the producer is being replaced: {cause.str()}")


def _failure(error: KafkaError, message: Message) -> Exception:
    if error.code() == _TOO_LARGE:
        return _limit_lowered(message.topic())
    return OutcomeUnknownError(f"Kafka did not confirm a record of {message.topic()}: {error.str()}")


def _limit_lowered(topic: str | None) -> TopicUnavailableError:
    """Return the error of a record that its topic refuses, although it is no larger than what halfway accepts."""
    return TopicUnavailableError(
        f"halfway's topic {topic} takes no record of this size, because its max.message.bytes is smaller than halfway "
        "needs: an operator must raise it (topic_unsafe in the log names the command)",
        topic=topic,
    )


_PREPARED: Final = State.PREPARED.value


class KafkaHalfLog:
    """First prepares in `<prefix>half`, and the records of half and parked by their offsets."""

    def __init__(self, config: KafkaConfig, observer: Observer) -> None:
        self._config = config
        self._topic = config.half_topic
        self._most_bytes = config.half_record_bytes
        self._parked_topic = config.parked_topic
        self.on_lost_sequence: Callable[[str], None] = lambda _: None
        """Called if half has lost records that this instance has written."""
        self._writer = RecordWriter(
            config,
            name="half",
            properties={
                "statistics.interval.ms": ROUND_TRIPS.EVERY_MS,
                "stats_cb": ROUND_TRIPS.note,
            },
            on_lost_sequence=self._lost_sequence,
        )
        self._reader = RecordReader(config, observer)
        self._ends = PartitionEnds(config, config.half_topic)

    async def start(self) -> None:
        """Start the threads; the topics must exist."""
        self._writer.start()
        self._reader.start()

    async def stop(self) -> None:
        """Wait up to the prepare time-out for the records in flight, then end the threads."""
        await self._writer.stop()
        await self._reader.stop()
        await self._ends.stop()

    def _lost_sequence(self, reason: str) -> None:
        self.on_lost_sequence(reason)

    @property
    def trouble(self) -> str | None:
        """Why this instance can store no prepare, None if it can; not whether Kafka answers."""
        return self._writer.trouble

    def append(self, shard: int, halves: Sequence[tuple[Half, T]], appended: Appended[T], *, deadline: float) -> None:
        """Append half records with acks=all, and pass their offsets or errors to `appended`; the port lists them."""
        records: list[Record[T]] = []
        refused: list[tuple[T, int | Exception]] = []
        for half, token in halves:
            try:
                key, value = self._encoded(half)
            except Exception as error:  # noqa: BLE001 - whatever it is, its caller gets it
                refused.append((token, error))
            else:
                records.append((key, value, half_headers(half, _PREPARED), token))
        if refused:
            appended(refused)
        self._writer.append(self._topic, shard, records, appended, deadline=deadline)

    def _encoded(self, half: Half) -> tuple[bytes, bytes]:
        key, value = half.id.encode(), encode_half(half)
        if len(key) + len(value) > self._most_bytes:
            raise MessageTooLargeError(
                f"the transaction takes {len(value)} bytes as a record, {self._most_bytes} at most: "
                "send fewer or smaller messages"
            )
        return key, value

    async def read_half(self, shard: int, offset: int, transaction_id: str, *, deadline: float) -> Half:
        """Read the half record at an offset and verify its key; the port lists the errors."""
        return await self._reader.read(
            (self._topic, shard), offset, transaction_id.encode(), decode_half, deadline=deadline
        )

    async def read_parked(self, shard: int, offset: int, transaction_id: str, *, deadline: float) -> Parked:
        """Read the parked record at an offset and verify its key; the port lists the errors."""
        return await self._reader.read(
            (self._parked_topic, shard), offset, transaction_id.encode(), decode_parked, deadline=deadline
        )

    async def half_end(self, shard: int, *, deadline: float) -> int:
        """Return the end offset of half[s] under `read_uncommitted`; KafkaUnavailableError past the deadline."""
        return await self._ends.end(shard, deadline=deadline)
