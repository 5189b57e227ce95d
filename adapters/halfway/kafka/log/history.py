"""Reads records back, off the event loop and within limits: those of one transaction, or single ones by their offset.

`KafkaHistory` is the port `History`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import structlog
from confluent_kafka import KafkaError, KafkaException, Message

from halfway.coordinator.ports import LoggedOp, Observer, OpsRead, PlacesRead
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.reader import Place, Reader
from halfway.kafka.clients.threads import Loop, answer_all
from halfway.kafka.records.codec import UndecodableError
from halfway.kafka.records.lane_records import headers_of, note_skipped, op_in
from halfway.protocol.errors import KafkaUnavailableError

log = structlog.get_logger(__name__)

T = TypeVar("T")

MAX_RECORDS: Final = 100_000
"""The most records that are read of op, from each of the known times."""
MAX_TOPIC_RECORDS: Final = 50_000
_MAX_READ_S: Final = 5.0
_POLL_S: Final = 0.2
_LEAST_S: Final = 0.1
_MAX_LAG_MS: Final = 30_000
"""The timestamps of a commit's messages are at most this much later than that of its op marker."""
_MARKERS_S: Final = 1.0
"""How long it may take until a commit's transaction markers are written."""
_REFUSED: Final = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED)


class KafkaHistory:
    """Each read uses a consumer and a thread of its own."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config

    async def ops(self, shard: int, transaction_id: str, *, starts: Sequence[int], deadline: float) -> OpsRead:
        """Read the op markers of an id; the port lists the errors."""
        return await self._read(lambda until: self._ops(shard, transaction_id, starts, until), deadline)

    async def places(self, transaction_id: str, topics: Sequence[str], *, at_ms: int, deadline: float) -> PlacesRead:
        """Find the messages of a commit in their topics."""
        return await self._read(lambda until: self._find_messages(transaction_id, topics, at_ms, until), deadline)

    async def _read(self, work: Callable[[float], T], deadline: float) -> T:
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        until = time.monotonic() + min(_MAX_READ_S, left / 2)
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.to_thread(work, until)
        except TimeoutError:
            raise KafkaUnavailableError("the history could not be read in time: try again") from None
        except KafkaException as exception:
            raise KafkaUnavailableError(f"the history could not be read: {exception.args[0].str()}") from exception

    # --- on a thread

    def _ops(self, shard: int, transaction_id: str, starts: Sequence[int], until: float) -> OpsRead:
        place, key = (self._config.op_topic, shard), transaction_id.encode()
        by_offset: dict[int, LoggedOp] = {}
        ended = False

        def handle(_: Place, message: Message) -> None:
            nonlocal ended
            if message.key() == key and not ended and (logged := self._op(message)) is not None:
                by_offset[logged.offset] = logged
                ended = logged.op.kind.final and bool(starts)  # without a start, a later use of the id may follow

        with Reader(self._config) as reader:
            offsets, complete = self._offsets(reader, place, starts, until)
            ended = not offsets
            for number, start in enumerate(offsets):
                position = reader.positions.get(place, -1)
                if start < position or ended:
                    continue
                # The records between the last one read and this start are left out.
                complete = complete and position < 0
                reader.add({place: start})
                enough = reader.records + MAX_RECORDS
                following = next(iter(offsets[number + 1 :]), None)
                while not ended and time.monotonic() < until:
                    if reader.records >= enough and (following is None or reader.positions[place] < following):
                        break
                    reader.read(_POLL_S, handle)
                    if place in reader.at_end:
                        ended = True
            return OpsRead(ops=tuple(by_offset[offset] for offset in sorted(by_offset)), complete=complete and ended)

    def _offsets(self, reader: Reader, place: Place, starts: Sequence[int], until: float) -> tuple[list[int], bool]:
        """Return the offsets of the given times; without times, the offset from which the end of the log is read."""
        if not starts:
            low, high = reader.span(place, _left(until))
            start = max(low, high - MAX_RECORDS)
            return [start], start == low
        found = {reader.offsets_for_times({place: at}, _left(until))[place] for at in starts}
        return sorted(offset for offset in found if offset >= 0), True

    def _op(self, message: Message) -> LoggedOp | None:
        try:
            op = op_in(message, self._config.shards)
        except UndecodableError:
            return None  # the owner of the shard has logged and counted it
        return LoggedOp(offset=message.offset() or 0, timestamp=message.timestamp()[1], op=op)

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
        unfinished: set[Place] = set()

        def handle(place: Place, message: Message) -> None:
            if message.timestamp()[1] > at_ms + _MAX_LAG_MS:
                unfinished.discard(place)
            number = self._message_number(message, transaction_id)
            if number is not None:
                places[number] = (place[1], message.offset() or 0)

        with Reader(self._config) as reader:
            times = dict.fromkeys(reader.places(topic, _left(until)), at_ms)
            found = reader.offsets_for_times(times, _left(until))
            starts = {place: offset for place, offset in found.items() if offset >= 0}
            unfinished.update(starts)
            reader.add(starts)
            markers_until = time.monotonic() + (_MARKERS_S if time.time() * 1000 - at_ms < _MAX_LAG_MS else 0.0)
            while len(places) < expected and reader.records < MAX_TOPIC_RECORDS and time.monotonic() < until:
                if unfinished <= reader.at_end and time.monotonic() > markers_until:
                    break
                reader.read(_POLL_S, handle)
        return places

    def _message_number(self, message: Message, transaction_id: str) -> int | None:
        """Return the number of a transaction's message, None if the message is of another transaction."""
        headers: dict[str, bytes | None] = dict(headers_of(message))  # type: ignore[arg-type]
        if headers.get("halfway-transaction-id") != transaction_id.encode():
            return None
        name, prefix = self._config.prefix_header
        number = (headers.get("halfway-message") or b"").partition(b"/")[0]
        return int(number) if headers.get(name) == prefix and number.isdigit() else None


def _left(until: float) -> float:
    return max(_LEAST_S, until - time.monotonic())


def _error_detail(topic: str, error: KafkaError) -> str:
    if error.code() in _REFUSED:
        return f"Kafka does not let halfway read {topic}: grant it Read (ACL) to see the offsets of messages"
    return f"{topic} could not be read: {error.str()}"


MAX_READS: Final = 2_000
_REQUESTS: Final = 500
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

        Raises KafkaUnavailableError: the record could not be read in time, or the record at the offset has another key.
        """
        if self._loop is None:
            raise KafkaUnavailableError("halfway is not running")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        request = _ReadRequest(
            place=place, offset=offset, key=key, decode=decode, deadline=self._loop.monotonic(deadline), future=future
        )
        with self._condition:
            if self._stopping or len(self._waiting) >= MAX_READS:
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
        overrides = {
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
        with Reader(self._config, **overrides) as reader:
            reader.batch = 0  # those behind a record are rarely the ones that are requested
            while batch := self._next():
                self._read_batch(reader, batch)

    def _next(self) -> list[_ReadRequest]:
        """Wait for requested records; return an empty list only after `stop`."""
        with self._condition:
            while not self._waiting and not self._stopping:
                self._condition.wait()
            if self._stopping:
                return []
            batch, self._waiting = self._waiting[:_REQUESTS], self._waiting[_REQUESTS:]
            return batch

    def _read_batch(self, reader: Reader, batch: list[_ReadRequest]) -> None:
        """Each row has the requests for one partition, with the lowest offset last."""
        rows: dict[Place, list[_ReadRequest]] = {}
        for request in sorted(batch, key=lambda request: request.offset, reverse=True):
            rows.setdefault(request.place, []).append(request)
        until = max(request.deadline for request in batch)
        try:
            reader.add({place: row[-1].offset for place, row in rows.items()})
            while rows and not self._stopping and (left := until - time.monotonic()) > 0:
                if not self._read_some(reader, rows, min(left, _POLL_S)) and self._waiting:
                    # Records behind an open Kafka transaction must not hold up the others.
                    self._put_back(rows)
                    break
        except Exception:
            # The thread must continue to serve the other callers.
            log.exception("readback_failed")
            for row in rows.values():
                self._answer_row(row, KafkaUnavailableError("a record could not be read"))
        reader.remove(list(reader.positions))
        # The callers of the remaining rows have given up.

    def _read_some(self, reader: Reader, rows: dict[Place, list[_ReadRequest]], timeout: float) -> bool:
        """Answer the requests for the records that arrive; return whether anything has."""

        def handle(place: Place, message: Message) -> None:
            row, offset = rows.get(place, []), message.offset() or 0
            self._answer_lost(place, row, offset)
            for request in _pop_before(row, offset + 1):
                self._answer_row([request], self._decoded(request, message))

        failed = False
        try:
            reader.read(timeout, handle)
        except KafkaException as exception:
            failed = True
            error, place = exception.args
            log.warning("readback_failed", topic=place[0], error=error.str())
            self._answer_row(rows.pop(place, []), KafkaUnavailableError(f"{place[0]} cannot be read: {error.str()}"))
        for place in reader.heard.intersection(rows):
            row, position = rows[place], reader.positions[place]
            self._answer_lost(place, row, position)
            if not row:
                del rows[place]
                reader.remove([place])
            elif row[-1].offset > position + _MAX_READ_GAP and place not in reader.at_end:
                reader.add({place: row[-1].offset})
        return failed or bool(reader.heard)

    def _answer_lost(self, place: Place, row: list[_ReadRequest], offset: int) -> None:
        lost = list(_pop_before(row, offset))
        self._answer_row(lost, KafkaUnavailableError(f"the record is no longer in {place[0]}[{place[1]}]"))

    def _put_back(self, rows: dict[Place, list[_ReadRequest]]) -> None:
        now = time.monotonic()
        with self._condition:
            self._waiting += [request for row in rows.values() for request in row if request.deadline > now]

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
