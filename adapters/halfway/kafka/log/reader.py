"""Reads partitions: to an end and on from there, and single records by their offset.

The position of a reader includes control records.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import structlog
from confluent_kafka import (
    OFFSET_END,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined] # public, but not for mypy
    AdminClient,
    ListOffsetsResultInfo,
    OffsetSpec,
)

from halfway.coordinator.operations import answer_all
from halfway.coordinator.ports import Observer
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.threads import Loop, drop_last
from halfway.kafka.records.codec import UndecodableError
from halfway.kafka.records.lane_records import note_skipped
from halfway.protocol.errors import KafkaUnavailableError

log = structlog.get_logger(__name__)

T = TypeVar("T")

BATCH: Final = 1_000
_METADATA_S: Final = 2.0
_EOF: Final = KafkaError._PARTITION_EOF  # noqa: SLF001 - the names of librdkafka's own errors start so
LEADER_MOVES: Final = frozenset(
    {
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError._NOENT,  # noqa: SLF001 - no leader is found in the client's metadata
    }
)
"""Errors that last until the broker and the client agree on the leader of a partition: retry the request."""
# Errors that librdkafka reports and then recovers from by itself.
_TRANSIENT: Final = LEADER_MOVES | frozenset(
    {
        KafkaError._TRANSPORT,  # noqa: SLF001
        KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
        KafkaError._RESOLVE,  # noqa: SLF001
        KafkaError._TIMED_OUT,  # noqa: SLF001
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.OFFSET_OUT_OF_RANGE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.NETWORK_EXCEPTION,
    }
)

Place = tuple[str, int]


def refresh_leaders(client: Consumer | AdminClient, topic: str, timeout_s: float) -> bool:
    """Make a client look up the leaders of a topic; return whether Kafka answered. Blocks.

    librdkafka sends the leader epoch that it has cached. If the broker answers that this epoch is older than its own,
    librdkafka still keeps the old epoch for up to 15 minutes.
    """
    try:
        client.list_topics(topic, timeout=timeout_s)
    except KafkaException:
        return False
    return True


class Reader:
    """A read_committed consumer that assigns itself partitions. `positions`: how far each is read without a gap.

    A position is the offset after the last record, or the end of the partition for committed reads (its LSO): only the
    LSO moves a position past control records and aborted records.
    """

    def __init__(
        self, config: KafkaConfig, handling_lock: AbstractContextManager[object] | None = None, /, **overrides: Any
    ) -> None:
        """Create the consumer; nothing is read before `add`. Records are handled while `handling_lock` is held."""
        self._handling_lock = nullcontext() if handling_lock is None else handling_lock
        self._consumer = Consumer(config.consumer(**{"enable.partition.eof": True, **overrides}))
        self.positions: dict[Place, int] = {}
        self.moved_at = -math.inf
        """When reading last moved a position, on `time.monotonic()`."""
        self.went_back: set[Place] = set()
        """Partitions with a record before the position: the log has lost its end, and is read from its beginning."""
        self.records = 0
        """The number of records that were handled so far."""

    def add(self, starts: Mapping[Place, int]) -> None:
        """Read more partitions, each from an offset (or a logical one, such as OFFSET_BEGINNING)."""
        known = {topic for topic, _ in self.positions}
        for topic in {topic for topic, _ in starts} - known:
            # A first fetch without known leaders waits for 500 ms or 1 s. If Kafka does not answer, `read` raises.
            refresh_leaders(self._consumer, topic, _METADATA_S)
        for place, offset in starts.items():
            self.positions[place] = offset
        self._consumer.incremental_assign([TopicPartition(*place, offset) for place, offset in starts.items()])

    def remove(self, places: Iterable[Place]) -> None:
        """Stop reading these partitions."""
        removed = [place for place in places if place in self.positions]
        for place in removed:
            del self.positions[place]
        if removed:
            self._consumer.incremental_unassign([TopicPartition(*place) for place in removed])

    def read(self, timeout: float, handle: Callable[[Place, Message], None]) -> set[Place]:
        """Handle the records of the next `timeout` seconds; return the partitions with a record or an end-of-partition.

        Raises:
            KafkaException: Kafka refuses to let a partition be read.

        """
        active: set[Place] = set()
        # `consume` waits for a whole batch: wait for one message, then take those that have arrived already.
        first = self._consumer.poll(timeout)
        if first is None:
            return active
        with self._handling_lock:
            failure = self._handle_batch(first, handle, active)
        if failure is not None:
            raise KafkaException(failure)
        return active

    def _handle_batch(
        self, first: Message, handle: Callable[[Place, Message], None], active: set[Place]
    ) -> KafkaError | None:
        failure: KafkaError | None = None
        positions = self.positions
        moved = False
        for message in (first, *self._consumer.consume(BATCH, 0)):
            error = message.error()
            if error is not None and error.code() != _EOF:
                # Raised after the other messages are handled: the consumer has already moved past them.
                failure = failure if error.code() in _TRANSIENT else error
                continue
            place = (message.topic() or "", message.partition() or 0)
            offset = message.offset()
            position = positions.get(place)
            if position is None or offset is None:
                continue
            if error is None:
                if 0 <= offset < position:
                    self.went_back.add(place)
                handle(place, message)
                self.records += 1
                offset += 1
            if offset > position:
                positions[place] = offset
                moved = True
            active.add(place)
        if moved:
            self.moved_at = time.monotonic()
        return failure

    def read_until(
        self, targets: Mapping[Place, int], deadline: float, handle: Callable[[Place, Message], None]
    ) -> bool:
        """Read until each position has reached its target or `deadline` (monotonic) passes; return whether all have."""
        while any(self.positions[place] < target for place, target in targets.items()):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.read(min(left, 0.2), handle)
        return True

    def first_since(self, times: Mapping[Place, int], timeout: float) -> dict[Place, int]:
        """Return, for each partition, an offset before which no record has the given time (ms) or a later one.

        Kafka searches only below the LSO, although records at the LSO may be committed a moment later. If it finds
        nothing, the offset is the LSO from before the search.

        Raises:
            KafkaException: Kafka did not answer for a partition, which must not be read as "there is no such record".

        """
        ends = self._offsets_for_times(dict.fromkeys(times, OFFSET_END), timeout)
        offsets = self._offsets_for_times(times, timeout)
        return {place: ends[place] if offset < 0 else offset for place, offset in offsets.items()}

    def _offsets_for_times(self, times: Mapping[Place, int], timeout: float) -> dict[Place, int]:
        entries = [TopicPartition(*place, at) for place, at in times.items()]
        results = self._consumer.offsets_for_times(entries, timeout=timeout)
        failure = next((entry.error for entry in results if entry.error is not None), None)
        if failure is not None:
            raise KafkaException(failure)
        return {(entry.topic, entry.partition): entry.offset for entry in results}

    def close(self) -> None:
        """Close the consumer; it is in no group, so this does not wait for one."""
        self._consumer.close()


RETRY_S: Final = 0.1
_TRY_S: Final = 2.0
"""How long an answer is waited for before the request is sent again over a new connection."""
_LEAST_S: Final = 0.1
_NO_ANSWER: Final = KafkaError._TIMED_OUT  # noqa: SLF001 - the names of librdkafka's own errors start so


class PartitionEnds:
    """End offsets of a topic's partitions.

    An answer is never older than its call: a call that arrives while a request is under way waits for the next request,
    which covers the partitions of all waiting calls.
    """

    def __init__(
        self,
        config: KafkaConfig,
        topic: str,
        *,
        timeout_s: float = 5.0,
        isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    ) -> None:
        """Keep the topic; `timeout_s` bounds one request. Under READ_COMMITTED the end is the LSO."""
        self._isolation = isolation
        self._config = config
        self._admin: AdminClient | None = None
        self._topic = topic
        self._timeout_s = timeout_s
        self._waiters: dict[int, list[asyncio.Future[int]]] = {}
        self._running: asyncio.Task[None] | None = None

    async def end(self, partition: int, *, deadline: float) -> int:
        """Return the end offset of a partition, read after this call.

        Raises:
            KafkaUnavailableError: Kafka did not answer in time.

        """
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(partition, []).append(future)
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        try:
            async with asyncio.timeout_at(deadline):
                return await future
        except TimeoutError:
            raise KafkaUnavailableError(f"Kafka did not return the end offset of {self._topic} in time") from None

    async def stop(self) -> None:
        """Cancel the requests under way."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _run(self) -> None:
        try:
            while self._waiters:
                waiters, self._waiters = self._waiters, {}
                try:
                    ends = await self._request(waiters)
                except Exception as error:  # noqa: BLE001 - every waiting caller must get it
                    ends = dict.fromkeys(waiters, _unavailable(self._topic, str(error)))
                for partition, futures in waiters.items():
                    answer_all((future, ends[partition]) for future in futures)
        finally:
            self._running = None

    async def _request(self, partitions: Iterable[int]) -> dict[int, int | Exception]:
        if self._admin is None:
            self._admin = AdminClient(self._config.admin())
        # Serve the client's queued log lines.
        self._admin.poll(0)
        until = time.monotonic() + self._timeout_s
        ends: dict[int, int | Exception] = {}
        missing = set(partitions)
        while missing:
            places = [(self._topic, partition) for partition in missing]
            left = max(_LEAST_S, until - time.monotonic())
            answers = request_ends(self._admin, places, self._isolation, min(_TRY_S, left))
            silent = False
            for (_, partition), answer in answers.items():
                try:
                    ends[partition] = (await asyncio.wrap_future(answer)).offset
                except KafkaException as exception:
                    error = exception.args[0]
                    ends[partition] = _unavailable(self._topic, error.str())
                    silent = silent or error.code() == _NO_ANSWER
                    if error.code() in LEADER_MOVES or error.code() == _NO_ANSWER:
                        continue
                missing.remove(partition)
            if silent:
                # The connection may be dead without a sign.
                held, self._admin = [self._admin], None
                drop_last(held)
                self._admin = AdminClient(self._config.admin())
            if missing and not await self._refresh(self._admin, until):
                break
        return ends

    async def _refresh(self, admin: AdminClient, until: float) -> bool:
        """Refresh the leaders, and return whether there is time for another request."""
        await asyncio.sleep(RETRY_S)
        left = until - time.monotonic()
        if left <= 0 or not await asyncio.to_thread(refresh_leaders, admin, self._topic, left):
            return False
        return time.monotonic() < until


def request_ends(
    admin: AdminClient, places: Iterable[Place], isolation: IsolationLevel, timeout_s: float
) -> dict[Place, Future[ListOffsetsResultInfo]]:
    """Request end offsets. After an error in LEADER_MOVES, call `refresh_leaders` and request them again."""
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call] # confluent-kafka leaves it out
    specs = {TopicPartition(*place): latest for place in places}
    answers = admin.list_offsets(specs, isolation_level=isolation, request_timeout=timeout_s)
    return {(place.topic, place.partition): answer for place, answer in answers.items()}


def _unavailable(topic: str, reason: str) -> KafkaUnavailableError:
    return KafkaUnavailableError(f"Kafka did not return the end offset of {topic}: {reason}")


MAX_WAITING: Final = 2_000
_REQUESTS: Final = 500
_POLL_S: Final = 0.1
_FIRST_METADATA_S: Final = 1.0
_MAX_READ_GAP: Final = 200
"""A gap of up to this many records is read, not skipped: a seek costs a round trip."""


@dataclass(kw_only=True, eq=False)
class _ReadRequest:
    """The request for one record; `deadline` is on `time.monotonic()`."""

    place: Place
    offset: int
    key: bytes
    decode: Callable[[bytes | None], Any]
    deadline: float
    future: asyncio.Future[Any]
    result: Any = field(default=None)


class RecordReader:
    """Reads records at known offsets, many at a time, with a consumer and a thread of its own."""

    def __init__(self, config: KafkaConfig, observer: Observer) -> None:
        """Keep the configuration; nothing connects before `start`."""
        self._config = config
        self._observer = observer
        self._condition = threading.Condition()
        self._waiting: list[_ReadRequest] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="halfway-readback", daemon=True)
        self._loop: Loop | None = None
        self._futures: set[asyncio.Future[Any]] = set()

    def start(self) -> None:
        """Start the thread; call it on the loop's thread."""
        self._loop = Loop(asyncio.get_running_loop())
        self._thread.start()

    async def stop(self) -> None:
        """End the thread; callers that still wait get KafkaUnavailableError."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        for future in list(self._futures):
            if not future.done():
                future.set_exception(KafkaUnavailableError("halfway was stopped"))

    async def read(
        self, place: Place, offset: int, key: bytes, decode: Callable[[bytes | None], T], *, deadline: float
    ) -> T:
        """Return the decoded value of the record at an offset whose key is `key`.

        Raises:
            KafkaUnavailableError: the record could not be read in time, or the record at the offset has another key.

        """
        if self._loop is None:
            raise KafkaUnavailableError("halfway is not running")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        request = _ReadRequest(
            place=place,
            offset=offset,
            key=key,
            decode=decode,
            deadline=self._loop.monotonic(deadline),
            future=future,
        )
        with self._condition:
            if self._stopping or len(self._waiting) >= MAX_WAITING:
                raise KafkaUnavailableError(f"{len(self._waiting)} reads are already waiting for Kafka")
            self._waiting.append(request)
            self._condition.notify()
        self._futures.add(future)
        try:
            async with asyncio.timeout_at(deadline):
                return await future
        except TimeoutError:
            raise KafkaUnavailableError(
                f"the record at {_label(place, offset)} could not be read in time", topic=place[0]
            ) from None
        finally:
            self._futures.discard(future)

    # --- the reading thread

    def _run(self) -> None:
        consumer = Consumer(
            self._config.consumer(
                **{
                    "enable.partition.eof": True,
                    # A missing offset must be an error, not a reason to read the whole partition.
                    "auto.offset.reset": "error",
                    # Fetch only the requested records, and nothing ahead.
                    "queued.min.messages": 1,
                    "fetch.wait.max.ms": 50,
                    # A caller waits for the record.
                    "socket.timeout.ms": 3_000,
                    "fetch.queue.backoff.ms": 5,
                    "max.partition.fetch.bytes": 256 * 1024,
                }
            )
        )
        try:
            # Without metadata the first read would wait up to a second for librdkafka's own refresh.
            with suppress(KafkaException):
                consumer.list_topics(self._config.half_topic, timeout=_FIRST_METADATA_S)
            while batch := self._next():
                self._read_batch(consumer, batch)
        finally:
            consumer.close()

    def _next(self) -> list[_ReadRequest]:
        """Wait for requested records; return an empty list only after `stop`."""
        with self._condition:
            while not self._waiting and not self._stopping:
                self._condition.wait()
            if self._stopping:
                return []
            batch, self._waiting = self._waiting[:_REQUESTS], self._waiting[_REQUESTS:]
            return batch

    def _read_batch(self, consumer: Consumer, batch: list[_ReadRequest]) -> None:
        rows: dict[Place, list[_ReadRequest]] = {}
        for request in sorted(batch, key=lambda request: request.offset, reverse=True):
            rows.setdefault(request.place, []).append(request)
        until = max(request.deadline for request in batch)
        try:
            consumer.assign([TopicPartition(*place, row[-1].offset) for place, row in rows.items()])
            while rows and not self._stopping and (left := until - time.monotonic()) > 0:
                message = consumer.poll(min(left, _POLL_S))
                if message is not None:
                    self._take(consumer, rows, message)
                elif self._waiting:
                    # Records behind an open Kafka transaction must not hold up the others.
                    self._put_back(rows)
                    break
            consumer.unassign()
        except KafkaException as exception:
            log.warning("readback_failed", error=exception.args[0].str())
            for row in rows.values():
                self._answer_row(row, KafkaUnavailableError(f"Kafka cannot be read: {exception.args[0].str()}"))
        except Exception:
            # The thread must continue to serve the other callers.
            log.exception("readback_failed")
            for row in rows.values():
                self._answer_row(row, KafkaUnavailableError("a record could not be read"))
        # The callers of the remaining rows have given up.

    def _put_back(self, rows: dict[Place, list[_ReadRequest]]) -> None:
        now = time.monotonic()
        with self._condition:
            self._waiting += [request for row in rows.values() for request in row if request.deadline > now]

    def _take(self, consumer: Consumer, rows: dict[Place, list[_ReadRequest]], message: Message) -> None:
        """Answer the callers that wait for this record; each row is sorted, with the lowest offset last."""
        place = (message.topic() or "", message.partition() or 0)
        row, error, offset = rows.get(place), message.error(), message.offset()
        if row is None or offset is None:
            return
        if error is not None and error.code() != _EOF:
            if not error.retriable():
                self._answer_row(row, KafkaUnavailableError(f"{place[0]} cannot be read: {error.str()}"))
                del rows[place]
            return
        skipped = list(_pop_before(row, offset))
        self._answer_row(skipped, KafkaUnavailableError(f"the record is no longer in {place[0]}[{place[1]}]"))
        if error is None:
            for request in _pop_before(row, offset + 1):
                self._answer_row([request], self._decoded(request, message))
        if not row:
            del rows[place]
            consumer.incremental_unassign([TopicPartition(*place)])
        elif row[-1].offset > offset + _MAX_READ_GAP and error is None:
            consumer.seek(TopicPartition(*place, row[-1].offset))

    def _decoded(self, request: _ReadRequest, message: Message) -> Any:
        if message.key() != request.key:
            return KafkaUnavailableError(f"another record is at {_label(request.place, request.offset)}")
        try:
            return request.decode(message.value())
        except UndecodableError as error:
            note_skipped(message, error, self._observer.skipped_record)
            return KafkaUnavailableError(f"the record at {_label(request.place, request.offset)} cannot be decoded")

    def _answer_row(self, row: list[_ReadRequest], result: Any) -> None:
        if row and self._loop is not None:
            self._loop.post(answer_all, [(request.future, result) for request in row])


def _pop_before(row: list[_ReadRequest], offset: int) -> Iterator[_ReadRequest]:
    """Remove the records before an offset from a row, and yield them."""
    while row and row[-1].offset < offset:
        yield row.pop()


def _label(place: Place, offset: int) -> str:
    return f"{place[0]}[{place[1]}]@{offset}"
