"""Reads partitions. All that reads records of Kafka reads them with a `Reader`.

What it guarantees:

- Records are handled once each and in their order, under read_committed unless an override says otherwise.
- A position never goes back. It moves past control records and aborted records with the end that Kafka reports, which
  is the LSO: the beginning of an open Kafka transaction holds it up. The real end is what `ends` and `PartitionEnds`
  return (read_uncommitted), so who reads up to that end has read everything that was written before it asked.
- Errors that pass (leaders that move, brokers that are away, an offset that was deleted) are waited for. `read` raises
  any other, after it has handled what it has received. A caller bounds the wait with a deadline, or with `moved_at`.
- If a log has lost its end, librdkafka begins again at the first record; `went_back` names the partition.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Self, TypeVar

import structlog
from confluent_kafka import OFFSET_END, IsolationLevel, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined] # public, but not for mypy
    ListOffsetsResultInfo,
    OffsetSpec,
)

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.seam import Admin, KnowsTopics
from halfway.kafka.clients.threads import answer_all, drop_last
from halfway.protocol.errors import KafkaUnavailableError

log = structlog.get_logger(__name__)

T = TypeVar("T")

BATCH: Final = 1_000
_METADATA_S: Final = 2.0
_POLL_S: Final = 0.2
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


def refresh_leaders(client: KnowsTopics, topic: str, timeout_s: float) -> bool:
    """Make a client look up the leaders of a topic; return whether Kafka answered. Blocks.

    librdkafka sends the leader epoch that it has cached. If the broker answers that this epoch is older than its own,
    librdkafka still keeps the old epoch for up to 15 minutes.
    """
    try:
        client.list_topics(topic, timeout=timeout_s)
    except KafkaException:
        return False
    return True


Handle = Callable[[Place, Message], None]


class Reader:
    """A consumer that assigns itself partitions; used on one thread."""

    def __init__(
        self, config: KafkaConfig, handling_lock: AbstractContextManager[object] | None = None, /, **overrides: Any
    ) -> None:
        """Create the consumer; nothing is read before `add`. Records are handled while `handling_lock` is held."""
        self.batch = BATCH
        """How many records one read handles at most, after the first."""
        self._handling_lock = nullcontext() if handling_lock is None else handling_lock
        self._consumer = config.make_consumer(**{"enable.partition.eof": True, **overrides})
        self._known: set[str] = set()
        self.positions: dict[Place, int] = {}
        """How far each partition is read without a gap: the offset after the last record, or the reported end."""
        self.at_end: set[Place] = set()
        """Partitions whose end was reported after their last record."""
        self.heard: set[Place] = set()
        """The partitions with a record or an end-of-partition in the last read, also if it has raised an error."""
        self.moved_at = -math.inf
        """When reading last moved a position, on `time.monotonic()`."""
        self.went_back: set[Place] = set()
        """Partitions with a record before the position: the log has lost its end, and is read from its beginning."""
        self.records = 0
        """The number of records that were handled so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the consumer; it is in no group, so this does not wait for one."""
        self._consumer.close()

    def add(self, starts: Mapping[Place, int]) -> None:
        """Read partitions, each from an offset or a logical one, such as OFFSET_BEGINNING; also if it is read already.

        Do not call it while records are handled.
        """
        for topic in {topic for topic, _ in starts} - self._known:
            # A first fetch without known leaders waits for 500 ms or 1 s. If Kafka does not answer, `read` raises.
            refresh_leaders(self._consumer, topic, _METADATA_S)
            self._known.add(topic)
        self.remove(starts)
        self.positions.update(starts)
        self._consumer.incremental_assign([TopicPartition(*place, offset) for place, offset in starts.items()])

    def remove(self, places: Iterable[Place]) -> None:
        """Stop reading these partitions."""
        removed = [place for place in places if place in self.positions]
        for place in removed:
            del self.positions[place]
        self.at_end.difference_update(removed)
        if removed:
            self._consumer.incremental_unassign([TopicPartition(*place) for place in removed])

    def read(self, timeout: float, handle: Handle) -> None:
        """Handle the records of the next `timeout` seconds; `heard` names their partitions.

        Raises KafkaException: Kafka refuses to let a partition be read; its arguments are the error and the partition.
        """
        self.heard = set()
        # `consume` waits for a whole batch: wait for one message, then take those that have arrived already.
        first = self._consumer.poll(timeout)
        if first is None:
            return
        with self._handling_lock:
            failure = self._handle_batch(first, handle)
        if failure is not None:
            raise failure

    def _handle_batch(self, first: Message, handle: Handle) -> KafkaException | None:
        failure: KafkaException | None = None
        positions, at_end, heard = self.positions, self.at_end, self.heard
        moved = False
        for message in (first, *self._consumer.consume(self.batch, 0)):
            error = message.error()
            place = (message.topic() or "", message.partition() or 0)
            if error is not None and error.code() != _EOF:
                # Raised after the other messages are handled: the consumer has already moved past them.
                failure = failure if error.code() in _TRANSIENT else KafkaException(error, place)
                continue
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
                if at_end:
                    at_end.discard(place)
            elif offset >= position:  # a leader that was just elected may report an earlier end
                at_end.add(place)
            if offset > position:
                positions[place] = offset
                moved = True
            heard.add(place)
        if moved:
            self.moved_at = time.monotonic()
        return failure

    def read_until(self, targets: Mapping[Place, int], deadline: float, handle: Handle) -> bool:
        """Read until each position has reached its target or `deadline` (monotonic) passes; return whether all have."""
        while any(self.positions[place] < target for place, target in targets.items()):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.read(min(left, _POLL_S), handle)
        return True

    def stands_still(self, seconds: float, since: float) -> bool:
        """Return whether no position has moved for that long, counted from `since` (monotonic) at the earliest."""
        return time.monotonic() - max(since, self.moved_at) > seconds

    # --- what Kafka knows of the partitions. These raise KafkaException if it does not answer for one of them.

    def first_since(self, times: Mapping[Place, int], timeout: float) -> dict[Place, int]:
        """Return, for each partition, an offset before which no record has the given time (ms) or a later one.

        Kafka searches only below the LSO, although records at the LSO may be committed a moment later. If it finds
        nothing, the offset is the LSO from before the search.
        """
        ends = self.offsets_for_times(dict.fromkeys(times, OFFSET_END), timeout)
        offsets = self.offsets_for_times(times, timeout)
        return {place: ends[place] if offset < 0 else offset for place, offset in offsets.items()}

    def offsets_for_times(self, times: Mapping[Place, int], timeout: float) -> dict[Place, int]:
        """Return the offset of the first record of each partition since a time (ms), OFFSET_END if there is none."""
        entries = [TopicPartition(*place, at) for place, at in times.items()]
        results = self._consumer.offsets_for_times(entries, timeout=timeout)
        failure = next((entry.error for entry in results if entry.error is not None), None)
        if failure is not None:
            raise KafkaException(failure)
        return {(entry.topic, entry.partition): entry.offset for entry in results}

    def span(self, place: Place, timeout: float) -> tuple[int, int]:
        """Return the first offset of a partition, and its end as this reader sees it (the LSO if read_committed)."""
        low, high = self._consumer.get_watermark_offsets(TopicPartition(*place), timeout=timeout)
        return low, high

    def places(self, topic: str, timeout: float) -> list[Place]:
        metadata = self._consumer.list_topics(topic, timeout=timeout).topics[topic]
        if metadata.error is not None:
            raise KafkaException(metadata.error)
        return [(topic, number) for number in metadata.partitions]


RETRY_S: Final = 0.1
_TRY_S: Final = 2.0
"""How long an answer is waited for before the request is sent again over a new connection."""
_LEAST_S: Final = 0.1
_LOOK_S: Final = 0.5
_REQUEST_S: Final = 10.0
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
        self._admin: Admin | None = None
        self._topic = topic
        self._timeout_s = timeout_s
        self._waiters: dict[int, list[asyncio.Future[int]]] = {}
        self._running: asyncio.Task[None] | None = None

    async def end(self, partition: int, *, deadline: float) -> int:
        """Return the end offset of a partition, read after this call.

        Raises KafkaUnavailableError: Kafka did not answer in time.
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
            self._admin = self._config.make_admin()
        # Serve the client's queued log lines.
        self._admin.poll(0)
        until = time.monotonic() + self._timeout_s
        ends: dict[int, int | Exception] = {}
        missing = set(partitions)
        while missing:
            places = [(self._topic, partition) for partition in missing]
            left = max(_LEAST_S, until - time.monotonic())
            answers = request_offsets(self._admin, places, min(_TRY_S, left), isolation=self._isolation)
            silent = False
            for (_, partition), answer in answers.items():
                try:
                    ends[partition] = offset_of(await asyncio.wrap_future(answer))
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
                self._admin = self._config.make_admin()
            if missing and not await self._refresh(self._admin, until):
                break
        return ends

    async def _refresh(self, admin: Admin, until: float) -> bool:
        """Refresh the leaders, and return whether there is time for another request."""
        await asyncio.sleep(RETRY_S)
        left = until - time.monotonic()
        if left <= 0 or not await asyncio.to_thread(refresh_leaders, admin, self._topic, left):
            return False
        return time.monotonic() < until


def request_offsets(
    admin: Admin,
    places: Iterable[Place],
    timeout_s: float,
    *,
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    earliest: bool = False,
) -> dict[Place, Future[ListOffsetsResultInfo]]:
    """Request ends, or the `earliest` offsets. After an error in LEADER_MOVES, `refresh_leaders` and request again."""
    spec = OffsetSpec.earliest() if earliest else OffsetSpec.latest()  # type: ignore[no-untyped-call]
    specs: dict[TopicPartition, Any] = {TopicPartition(*place): spec for place in places}
    answers = admin.list_offsets(specs, isolation_level=isolation, request_timeout=timeout_s) if specs else {}
    return {(place.topic, place.partition): answer for place, answer in answers.items()}


def offset_of(answer: ListOffsetsResultInfo) -> int:
    """Return the offset in an answer.

    Raises KafkaException: librdkafka has no offset and no error, in an election: request again.
    """
    if answer.offset < 0:
        raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE, "Kafka has not returned an offset"))
    return answer.offset


def ends(admin: Admin, places: Collection[Place], check: Callable[[], None]) -> dict[Place, int]:
    """Return the real ends of partitions; blocks until Kafka answers or `check` raises.

    Raises KafkaException: Kafka refuses.
    """
    while True:
        futures = request_offsets(admin, places, _REQUEST_S)
        while wait(futures.values(), _LOOK_S).not_done:
            check()
        try:
            return {place: offset_of(future.result()) for place, future in futures.items()}
        except KafkaException as error:
            if error.args[0].code() not in LEADER_MOVES:
                raise
        check()
        time.sleep(RETRY_S)
        for topic in {topic for topic, _ in places}:
            refresh_leaders(admin, topic, _LOOK_S)


def _unavailable(topic: str, reason: str) -> KafkaUnavailableError:
    return KafkaUnavailableError(f"Kafka did not return the end offset of {topic}: {reason}")
