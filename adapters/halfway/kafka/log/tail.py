"""The tail: reading half[s] of the owned shards from their barriers on (docs/protocol.md#ownership-and-fencing).

The position of a reader includes control records.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import structlog
from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, Message, TopicPartition

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.denials import explained
from halfway.kafka.clients.threads import Loop, OwnedThread
from halfway.kafka.clients.transactional_producer import ProducerFailedError, kafka_error
from halfway.kafka.records.codec import BARRIER_KEY, UndecodableError
from halfway.kafka.records.lane_records import (
    NewerReleaseError,
    barrier_in,
    demand_no_newer,
    half_in,
    note_skipped,
    overwritten_id,
)
from halfway.protocol.records import FOREIGN, Foreign, Half

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient


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


class PartitionReader:
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


log = structlog.get_logger()

Records = Sequence[tuple[int, str, Half | Foreign | None]]
OnAppended = Callable[[int, Records, int], None]
"""Called on the loop's thread: shard, records, the position reached without a gap."""

_POLL_S: Final = 0.1
_OUTSTANDING: Final = 8
_PAUSE_S: Final = 0.5
_ASIDE_S: Final = 0.02
# Kafka reports the end of a partition behind a control record only with an empty answer. Nearly all records are this
# instance's own and applied already: gathering them saves an answer, and a turn of the loop, for each.
_GATHERED: Final = {"fetch.wait.max.ms": 50, "fetch.min.bytes": 65_536}


@dataclass(frozen=True, kw_only=True, slots=True)
class TailEvents:
    """What a tail reports, on the loop's thread."""

    appended: OnAppended
    foreign_barrier: Callable[[int], None]
    """Another incarnation has acquired the shard."""
    newer: Callable[[int], None]
    """The shard contains a record that only a newer release can read; the tail reads it no further."""
    failed: Callable[[ProducerFailedError], None]


class Tail(OwnedThread):
    """A thread with a consumer. It stops reading while a few batches wait for the loop."""

    def __init__(
        self,
        config: KafkaConfig,
        incarnation: str,
        loop: Loop,
        has_applied: Callable[[int, int, bytes | None], bool],
        skipped: Callable[[str, str], None],
        events: TailEvents,
    ) -> None:
        """Pass events to the loop's thread; `skipped` counts a record by topic and reason, on any thread.

        `has_applied` returns, by shard, offset and key, if a record is already applied; the tail's thread calls it.
        """
        super().__init__(self._run, "halfway-tail")
        self._config = config
        self._incarnation = incarnation
        self._loop = loop
        self._has_applied = has_applied
        self._skipped = skipped
        self._events = events
        self._changes: deque[tuple[int, int | None]] = deque()
        self._stopped = threading.Event()
        self._room = threading.Semaphore(_OUTSTANDING)
        self._aside: list[tuple[int, int, Message]] = []
        """What was not applied when it was read: shard, offset, record."""
        self._batch: dict[int, list[tuple[int, str, Half | Foreign | None]]] = {}

    def add(self, shard: int, offset: int) -> None:
        """Read half[shard] from an offset on."""
        self._changes.append((shard, offset))

    def remove(self, shard: int) -> None:
        """Stop reading half[shard]; records that were already posted still come."""
        self._changes.append((shard, None))

    def stop(self) -> None:
        """Make the thread end; `join` waits for it."""
        self._stopped.set()

    def _run(self) -> None:
        reader: PartitionReader | None = None
        try:
            reader = PartitionReader(self._config, **_GATHERED)
            while not self._stopped.is_set():
                heard = None
                try:
                    self._change(reader)
                    heard = reader.read(_POLL_S, self._handle)
                except KafkaException as error:
                    cause = kafka_error(error)
                    remedy = None if cause is None else explained(cause.code(), self._config)
                    log.warning("tail_failed", error=str(error), remedy=remedy)
                    self._stopped.wait(_PAUSE_S)
                _demand_no_loss(reader)
                self._read_aside(reader)
                if heard is None:
                    heard = {(self._config.half_topic, shard) for shard in self._batch}
                for place in heard:
                    self._post(place[1], reader.positions.get(place))
        except ProducerFailedError as error:
            self._loop.post(self._events.failed, error)
        except Exception as error:
            log.exception("tail_thread_failed")
            self._loop.post(self._events.failed, ProducerFailedError("tail", repr(error)))
        finally:
            if reader is not None:
                reader.close()

    def _change(self, reader: PartitionReader) -> None:
        topic = self._config.half_topic
        while self._changes:
            shard, offset = self._changes.popleft()
            reader.remove([(topic, shard)])
            self._batch.pop(shard, None)
            if offset is not None:
                reader.add({(topic, shard): offset})

    def _handle(self, place: Place, message: Message) -> None:
        offset = message.offset()
        if offset is not None and not self._has_applied(place[1], offset, message.key()):
            self._aside.append((place[1], offset, message))

    def _read_aside(self, reader: PartitionReader) -> None:
        """Decode what is not applied; most are this instance's own, and their acknowledgement is on its way."""
        aside, self._aside = self._aside, []
        if aside:
            self._stopped.wait(_ASIDE_S)
        for shard, offset, message in aside:
            place = (self._config.half_topic, shard)
            if place not in reader.positions or self._has_applied(shard, offset, message.key()):
                continue
            try:
                self._decode(shard, offset, message)
            except NewerReleaseError as error:
                log.error("newer_release_found", shard=shard, error=str(error), remedy=error.remedy)  # noqa: TRY400 - the error says it all
                reader.remove([place])
                self._batch.pop(shard, None)
                self._loop.post(self._events.newer, shard)

    def _decode(self, shard: int, offset: int, message: Message) -> None:
        try:
            if message.key() == BARRIER_KEY:
                if barrier_in(message).incarnation != self._incarnation:
                    self._loop.post(self._events.foreign_barrier, shard)
            else:
                self._batch.setdefault(shard, []).append((offset, *half_in(message, self._config.shards)))
        except UndecodableError as error:
            demand_no_newer(message, error, self._config.skip_records)
            note_skipped(message, error, self._skipped)
            name = overwritten_id(message, self._config.shards, self._config.skip_records)
            if name is not None:
                self._batch.setdefault(shard, []).append((offset, name, FOREIGN))

    def _post(self, shard: int, position: int | None) -> None:
        records = self._batch.pop(shard, [])
        if position is None:
            return
        while not self._room.acquire(timeout=_POLL_S):
            if self._stopped.is_set():
                return
        self._loop.post(self._appended, shard, records, position)

    def _appended(self, shard: int, records: Records, position: int) -> None:
        self._room.release()
        self._events.appended(shard, records, position)


def _demand_no_loss(reader: PartitionReader) -> None:
    """Raise ProducerFailedError if a partition ends before what was read of it: its owner must compare its fold."""
    for topic, shard in reader.went_back:
        raise ProducerFailedError("log", f"{topic}[{shard}] has lost its end")
