"""Reads assigned partitions and tracks the position in each, control records included."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, Message, TopicPartition

from halfway.kafka.clients.config import KafkaConfig

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

BATCH: Final = 1_000
_MEET_S: Final = 2.0
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
"""Errors of a broker or the client until both know the same leader of a partition: ask again."""
# Errors that librdkafka reports although it recovers from them by itself.
_PASSING: Final = LEADER_MOVES | frozenset(
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


def meet(client: Consumer | AdminClient, topic: str, timeout_s: float) -> bool:
    """Have a client look up the leaders of a topic; return whether Kafka answered. Blocks.

    librdkafka asks with the leader epoch that it has cached. If the broker answers that this epoch is older than the
    broker's own, librdkafka still keeps it for up to 15 minutes.
    """
    try:
        client.list_topics(topic, timeout=timeout_s)
    except KafkaException:
        return False
    return True


class PartitionReader:
    """A read_committed consumer with assigned partitions only. `positions` holds how far each is read without a gap.

    A position is the offset after the last record, or the end of the partition for committed reads (its LSO): only the
    LSO gets a position past control records and aborted records.
    """

    def __init__(
        self, config: KafkaConfig, handling_lock: AbstractContextManager[object] | None = None, /, **over: Any
    ) -> None:
        """Create the consumer; nothing is read before `add`. Records are handled while `handling_lock` is held."""
        self._handling_lock = nullcontext() if handling_lock is None else handling_lock
        self._consumer = Consumer(config.consumer(**{"enable.partition.eof": True, **over}))
        self.positions: dict[Place, int] = {}
        self.moved_at = -math.inf
        """When reading last moved a position, on `time.monotonic()`."""
        self.records = 0
        """How many records were handled so far."""

    def add(self, starts: Mapping[Place, int]) -> None:
        """Read more partitions, each from an offset (or a logical one, such as OFFSET_BEGINNING)."""
        known = {topic for topic, _ in self.positions}
        for topic in {topic for topic, _ in starts} - known:
            # A fetch that begins without leaders waits for 500 ms or 1 s. If Kafka does not answer, it reports that.
            meet(self._consumer, topic, _MEET_S)
        for place, offset in starts.items():
            self.positions[place] = offset
        self._consumer.incremental_assign([TopicPartition(*place, offset) for place, offset in starts.items()])

    def remove(self, places: Iterable[Place]) -> None:
        """Stop reading these partitions."""
        gone = [place for place in places if place in self.positions]
        for place in gone:
            del self.positions[place]
        if gone:
            self._consumer.incremental_unassign([TopicPartition(*place) for place in gone])

    def read(self, timeout: float, handle: Callable[[Place, Message], None]) -> set[Place]:
        """Handle the records of the next `timeout` seconds; return the partitions that gave a record or their end.

        Raises:
            KafkaException: Kafka refuses reads of a partition.

        """
        heard: set[Place] = set()
        # `consume` waits for a whole batch: wait for one message, then take those that are there already.
        first = self._consumer.poll(timeout)
        if first is None:
            return heard
        with self._handling_lock:
            failure = self._handle_batch(first, handle, heard)
        if failure is not None:
            raise KafkaException(failure)
        return heard

    def _handle_batch(
        self, first: Message, handle: Callable[[Place, Message], None], heard: set[Place]
    ) -> KafkaError | None:
        failure: KafkaError | None = None
        positions = self.positions
        moved = False
        for message in (first, *self._consumer.consume(BATCH, 0)):
            error = message.error()
            if error is not None and error.code() != _EOF:
                # Raised after the other messages are handled: the consumer has already moved past them.
                failure = failure if error.code() in _PASSING else error
                continue
            place = (message.topic() or "", message.partition() or 0)
            offset = message.offset()
            position = positions.get(place)
            if position is None or offset is None:
                continue
            if error is None:
                handle(place, message)
                self.records += 1
                offset += 1
            if offset > position:
                positions[place] = offset
                moved = True
            heard.add(place)
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
        """Return by partition an offset before which no record has that time (ms) or a later one.

        Kafka searches below the LSO only, although records at the LSO may be committed a moment later. If it finds
        nothing, the offset is the LSO as it was before the search.

        Raises:
            KafkaException: Kafka did not answer for a partition, which must not be taken for "there is none".

        """
        ends = self._offsets_for_times(dict.fromkeys(times, OFFSET_END), timeout)
        found = self._offsets_for_times(times, timeout)
        return {place: ends[place] if offset < 0 else offset for place, offset in found.items()}

    def _offsets_for_times(self, times: Mapping[Place, int], timeout: float) -> dict[Place, int]:
        asked = [TopicPartition(*place, at) for place, at in times.items()]
        found = self._consumer.offsets_for_times(asked, timeout=timeout)
        failure = next((entry.error for entry in found if entry.error is not None), None)
        if failure is not None:
            raise KafkaException(failure)
        return {(entry.topic, entry.partition): entry.offset for entry in found}

    def close(self) -> None:
        """Close the consumer; it is in no group, so this does not wait for one."""
        self._consumer.close()
