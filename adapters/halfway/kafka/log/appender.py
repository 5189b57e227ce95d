"""Appends the records that the lane does not write, with an idempotent, non-transactional producer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from halfway.domain.errors import MessageTooLargeError, OutcomeUnknownError, OverloadedError
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.loop import Loop
from halfway.kafka.records.codec import Headers
from halfway.service.answers import Deadlines, Reply, answer_all

log = structlog.get_logger(__name__)

_POLL_S: Final = 0.1
_TOO_LARGE: Final = KafkaError.MSG_SIZE_TOO_LARGE
_QUEUE_FULL: Final = KafkaError._QUEUE_FULL  # noqa: SLF001 - the names of librdkafka's own errors start so

MakeProducer = Callable[[dict[str, Any]], Producer]


class Appending(NamedTuple):
    """A record to append; the reply is its offset."""

    key: bytes
    value: bytes | None
    headers: Headers
    reply: Reply[int]

    @property
    def size(self) -> int:
        """Bytes of key and value."""
        return len(self.key) + len(self.value or b"")


class _List:
    """Records that were handed over together, and have one deadline."""

    __slots__ = ("_report", "_topic", "deadline", "is_late", "waiting")

    def __init__(self, topic: str, deadline: float, report: _Report) -> None:
        self._topic = topic
        self.deadline = deadline
        self.waiting: dict[bytes, Appending] = {}
        """The records without a delivery report, by key."""
        self.is_late = False
        self._report = report

    def answer_late(self) -> None:
        """Answer those that are late, each with an error of its own."""
        self.is_late = True
        answer_all([(record.reply, _not_in_time(self._topic)) for record in self.waiting.values()])

    def delivered(self, error: KafkaError | None, message: Message) -> None:
        """Hear of a record's delivery, on the polling thread."""
        self._report(self, error, message)


_Report = Callable[[_List, KafkaError | None, Message], None]


class _Client:
    """A producer, and the fatal error that ended it."""

    producer: Producer

    def __init__(self) -> None:
        self.fatal: str | None = None

    def failed(self, error: KafkaError) -> None:
        """Note an error that the producer reports."""
        if error.fatal():
            self.fatal = error.str()


class RecordWriter:
    """Appends records with acks=all; `append` on the loop's thread, polling on a thread of its own.

    The records in flight are bounded in number and bytes. A producer with a fatal error is replaced; the outcome of the
    records it had in flight is unknown.
    """

    def __init__(
        self, config: KafkaConfig, *, name: str, linger_ms: float = 0, make_producer: MakeProducer = Producer
    ) -> None:
        """Keep the configuration; nothing connects before `start`."""
        self._config = config
        self._name = name
        self._linger_ms = linger_ms
        self._make_producer = make_producer
        self._thread = threading.Thread(target=self._run, name=f"halfway-{name}", daemon=True)
        self._stopping = threading.Event()
        # On the loop's thread.
        self._lists: set[_List] = set()
        self._empty = asyncio.Event()
        self._deadlines = Deadlines()
        self._records = 0
        self._bytes = 0
        # On the polling thread, except the reference to the producer, which `append` reads.
        self._results: list[tuple[_List, bytes, int | Exception]] = []
        """List, key, and offset or error of what was delivered."""
        self._loop: Loop | None = None
        self._client: _Client | None = None

    def start(self) -> None:
        """Create the producer and the thread that polls it; call it on the loop's thread."""
        self._loop = Loop(asyncio.get_running_loop())
        self._client = self._make()
        self._thread.start()

    async def stop(self) -> None:
        """Wait up to the prepare time-out for the records in flight, then end the thread."""
        if self._lists:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.prepare_timeout_s):
                    await self._empty.wait()
        self._stopping.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        for one in list(self._lists):
            self._forget(one)
            if not one.is_late:
                one.answer_late()

    @property
    def in_flight(self) -> tuple[int, int]:
        """Records and bytes that wait for a delivery report."""
        return self._records, self._bytes

    def append(self, topic: str, partition: int, records: Sequence[Appending], *, deadline: float) -> None:
        """Append records of different keys in their order; each reply is its offset once it is delivered.

        Replies:
            OutcomeUnknownError: the record may or may not have been stored.
            MessageTooLargeError: the record is larger than the topic allows; nothing was stored.
            OverloadedError: too much is in flight, or there is no time left; nothing was stored.

        """
        client = self._client
        left = deadline - asyncio.get_running_loop().time()
        one = _List(topic, deadline, partial(self._delivered, client))
        refused: list[tuple[Reply[int], Exception]] = []
        for record in records:
            try:
                self._admit(record.size, left)
                self._produce(client, one, topic, partition, record)
            except Exception as error:  # noqa: BLE001 - whatever it is, its caller gets it
                refused.append((record.reply, error))
                continue
            one.waiting[record.key] = record
            self._records += 1
            self._bytes += record.size
        if one.waiting:
            self._lists.add(one)
            self._empty.clear()
            self._deadlines.watch(one.answer_late, deadline)
        answer_all(refused)

    def append_one(
        self, topic: str, partition: int, *, key: bytes, value: bytes | None, headers: Headers, deadline: float
    ) -> asyncio.Future[int]:
        """Append one record; the future is its offset, or one of the errors of `append`."""
        stored: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.append(topic, partition, [Appending(key, value, headers, stored)], deadline=deadline)
        return stored

    def _admit(self, size: int, left: float) -> None:
        if self._stopping.is_set() or self._client is None:
            raise OverloadedError("halfway is not running")
        if left <= 0:
            raise OverloadedError("no time was left to write to Kafka")
        over_records = self._records >= self._config.writer_in_flight
        if over_records or (self._bytes and self._bytes + size > self._config.writer_in_flight_bytes):
            raise OverloadedError(f"{self._records} records with {self._bytes} bytes wait for Kafka already")

    @staticmethod
    def _produce(client: _Client | None, one: _List, topic: str, partition: int, record: Appending) -> None:
        if client is None:
            raise OverloadedError("halfway is not running")
        key, value, headers, _ = record
        try:
            client.producer.produce(topic, value, key, partition, one.delivered, None, 0, headers)
        except BufferError:
            raise OverloadedError("too many records wait for Kafka already") from None
        except KafkaException as exception:
            error = exception.args[0]
            if error.code() == _TOO_LARGE:
                raise MessageTooLargeError(f"a record is larger than halfway's topic {topic} takes") from exception
            # The polling thread has seen this fatal error or will see it: the caller's retry goes to the next producer.
            raise OverloadedError(f"the producer is being replaced: {error.str()}") from exception

    def _forget(self, one: _List) -> None:
        self._deadlines.forget(one.answer_late, one.deadline)
        self._lists.discard(one)
        if not self._lists:
            self._empty.set()

    # --- the polling thread

    def _make(self) -> _Client:
        client = _Client()
        client.producer = self._make_producer(
            self._config.producer(
                **{
                    "linger.ms": self._linger_ms,
                    # Under load what comes meanwhile shares the next request, which costs the broker hardly more than a
                    # request with one record; nothing waits if nothing is under way.
                    "max.in.flight.requests.per.connection": 2,
                    "queue.buffering.max.messages": self._config.writer_in_flight + 1_000,
                    "queue.buffering.max.kbytes": 2 * self._config.writer_in_flight_bytes // 1024,
                    "error_cb": client.failed,
                }
            )
        )
        return client

    def _delivered(self, client: _Client | None, one: _List, error: KafkaError | None, message: Message) -> None:
        result: int | Exception
        if error is None:
            offset = message.offset()
            result = -1 if offset is None else offset
        elif error.code() == _TOO_LARGE:
            result = MessageTooLargeError(f"a record is larger than halfway's topic {message.topic()} takes")
        else:
            result = OutcomeUnknownError(f"Kafka did not confirm a record of {message.topic()}: {error.str()}")
            if client is not None:
                client.failed(error)
        key = message.key()
        self._results.append((one, key if isinstance(key, bytes) else b"", result))

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
            client.producer.poll(timeout)
        if self._results and self._loop is not None:
            results, self._results = self._results, []
            self._loop.post(self._finish_records, results)

    def _replace(self, failed: _Client, reason: str) -> None:
        try:
            fresh = self._make()
        except KafkaException as exception:
            log.warning("producer_not_replaced", writer=self._name, reason=exception.args[0].str())
            self._stopping.wait(_POLL_S)
            return
        log.warning("producer_replaced", writer=self._name, reason=reason)
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

    def _finish_records(self, results: Iterable[tuple[_List, bytes, int | Exception]]) -> None:
        answers: list[tuple[Reply[int], int | Exception]] = []
        for one, key, result in results:
            record = one.waiting.pop(key)
            self._records -= 1
            self._bytes -= record.size
            if not one.waiting:
                self._forget(one)
            if not one.is_late:
                answers.append((record.reply, result))
        answer_all(answers)


def _not_in_time(topic: str) -> OutcomeUnknownError:
    return OutcomeUnknownError(f"Kafka did not confirm a record of {topic} in time")
