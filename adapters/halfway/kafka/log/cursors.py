"""The port `CursorStore`: cursors as the offsets of the consumer group `<prefix>cursors`.

See docs/protocol.md#scan-and-check-back.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import msgspec
import structlog
from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, TopicPartition

from halfway.coordinator.logging import LogSummary
from halfway.coordinator.ports import Cursors, Observer
from halfway.kafka.clients.config import KafkaConfig, denial
from halfway.kafka.clients.seam import Consumer
from halfway.protocol.errors import ConfigurationError, KafkaUnavailableError
from halfway.protocol.outcomes import EndCounts

log = structlog.get_logger(__name__)
_not_committed: Final = LogSummary(log, "warning", "cursors_not_committed")

T = TypeVar("T")
_TIMEOUT_S: Final = 10.0
_RETRY_S: Final = 0.2
_POLL_S: Final = 0.05
_FIND_COORDINATOR_MS: Final = 6_000
_ANSWER_MS: Final = 3_000
"""How long one answer is waited for: after that the request goes over a new connection."""
_RECOMMIT_S: Final = 60.0
"""How often cursors that have not moved are committed: Kafka forgets the offsets of an idle group after days."""
_STOP_S: Final = 2.0
"""How long `stop` waits for a commit, then for the consumer. A cursor that is not committed only costs reading."""


class KafkaCursors:
    """Commits and loads cursors with a consumer that has no assignment, on a thread of its own.

    Commits that arrive while one is under way are merged into the next, with the newest cursors of each shard.
    """

    def __init__(self, config: KafkaConfig, observer: Observer) -> None:
        self._config = config
        self._observer = observer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="halfway-cursors")
        self._consumer: Consumer | None = None
        self._in_flight = 0
        self._stop_by = math.inf
        self._failure: KafkaError | None = None
        self._newest: dict[int, Cursors] = {}
        self._confirmed: dict[int, tuple[Cursors, float]] = {}
        """The cursors that Kafka has confirmed for each shard, and when."""
        self._distrusted: set[int] = set()
        """Shards whose committed cursors are those of a log that is gone."""
        self._committing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await asyncio.wrap_future(self._thread.submit(self._open))

    async def stop(self) -> None:
        """Commit the waiting cursors and end the thread, within seconds even if Kafka does not answer."""
        self._stop_by = time.monotonic() + _STOP_S
        if self._committing is not None:
            await asyncio.wait([self._committing], timeout=_STOP_S)
        await asyncio.wrap_future(self._thread.submit(self._close))
        self._thread.shutdown(wait=False)

    async def commit(self, cursors: Mapping[int, Cursors]) -> None:
        """Commit the cursors that have moved, and now and then the others too.

        A failure is logged, and the next scan tries again.
        """
        self._newest.update((shard, pair) for shard, pair in cursors.items() if not self._is_confirmed(shard, pair))
        while self._newest or self._committing is not None:
            if self._committing is None:
                newest, self._newest = self._newest, {}
                self._committing = asyncio.create_task(self._commit_all(newest))
            await asyncio.shield(self._committing)

    def distrust(self, shards: Collection[int]) -> None:
        """Load no cursors of these shards until new ones are committed: their log is another one now."""
        self._distrusted.update(shards)
        for shard in shards:
            self._newest.pop(shard, None)

    def _is_confirmed(self, shard: int, cursors: Cursors) -> bool:
        confirmed, at = self._confirmed.get(shard, (None, 0.0))
        return confirmed == cursors and shard not in self._newest and time.monotonic() - at < _RECOMMIT_S

    async def _commit_all(self, cursors: Mapping[int, Cursors]) -> None:
        for shard in cursors:
            self._confirmed.pop(shard, None)
        trusted = self._distrusted.intersection(cursors)
        try:
            await asyncio.wrap_future(self._submit(lambda consumer: self._commit(consumer, cursors)))
            self._confirmed.update((shard, (pair, time.monotonic())) for shard, pair in cursors.items())
            self._distrusted -= trusted
        except KafkaException as exception:
            error = exception.args[0]
            remedy = denial(error.code(), self._config, group=self._config.cursors_group)
            _not_committed.note({"error": error.str(), "remedy": remedy}, shards=sorted(cursors))
        except KafkaUnavailableError as unavailable:
            _not_committed.note({"error": unavailable.detail}, shards=sorted(cursors))
        finally:
            self._committing = None

    def load(self, shards: Sequence[int]) -> Mapping[int, Cursors]:
        """Return the committed cursors of shards; a shard without any is left out. Blocks: do not call it on the loop.

        Raises:
            KafkaUnavailableError: Kafka did not answer in time.
            ConfigurationError: halfway may not use the consumer group.
        """
        return self._submit(lambda consumer: self._load(consumer, shards)).result()

    # --- on the cursors' thread

    def _submit(self, call: Callable[[Consumer], T]) -> Future[T]:
        def run() -> T:
            if self._consumer is None:
                raise KafkaUnavailableError("halfway is not running")
            return call(self._consumer)

        return self._thread.submit(run)

    def _open(self) -> None:
        self._consumer = self._config.make_consumer(
            on_commit=self._on_commit,
            **{
                # How long a commit waits to find the group's coordinator, and how long for its answer. Closing the
                # consumer waits for both too.
                "session.timeout.ms": _FIND_COORDINATOR_MS,
                "socket.timeout.ms": _ANSWER_MS,
            },
        )

    def _close(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            # While Kafka is silent, closing waits for the answers to commits: do not wait for it here.
            closing = threading.Thread(target=consumer.close, name="halfway-cursors-close", daemon=True)
            closing.start()
            closing.join(_STOP_S)

    def _commit(self, consumer: Consumer, cursors: Mapping[int, Cursors]) -> None:
        offsets = [
            entry
            for shard, cursor in cursors.items()
            for entry in (
                TopicPartition(self._config.half_topic, shard, cursor.half, _metadata(cursor.half)),
                TopicPartition(self._config.op_topic, shard, cursor.op, _metadata(cursor.op)),
                *self._entries_of(shard, cursor.ends),
            )
        ]
        # A synchronous commit would block until librdkafka finds the group's coordinator.
        consumer.commit(offsets=offsets, asynchronous=True)
        self._in_flight += 1
        deadline = time.monotonic() + _TIMEOUT_S
        while self._in_flight:
            if time.monotonic() > min(deadline, self._stop_by):
                raise KafkaUnavailableError("Kafka did not answer in time")
            consumer.poll(_POLL_S)
        if self._failure is not None:
            raise KafkaException(self._failure)

    def _entries_of(self, shard: int, ends: EndCounts | None) -> list[TopicPartition]:
        """Return the entry that stores ends: at parked, which has no cursor, and which earlier releases do not read."""
        if ends is None:
            return []
        metadata = msgspec.json.encode(ends).decode()
        return [TopicPartition(self._config.parked_topic, shard, ends.position, metadata)]

    def _on_commit(self, error: KafkaError | None, offsets: list[TopicPartition]) -> None:
        """Handle the answer to a commit; answers arrive in the order of the commits."""
        self._in_flight -= 1
        self._failure = error or next((entry.error for entry in offsets if entry.error is not None), None)

    def _load(self, consumer: Consumer, shards: Sequence[int]) -> dict[int, Cursors]:
        for shard in shards:
            self._confirmed.pop(shard, None)  # another instance may have committed since
        half, op, parked = self._config.half_topic, self._config.op_topic, self._config.parked_topic
        partitions = [TopicPartition(topic, shard) for shard in shards for topic in (half, op, parked)]
        committed = {(entry.topic, entry.partition): entry for entry in self._request_committed(consumer, partitions)}
        cursors: dict[int, Cursors] = {}
        for shard in shards:
            pair = committed[half, shard], committed[op, shard]
            at_half, at_op = (entry.offset for entry in pair)
            if OFFSET_INVALID in (at_half, at_op) or shard in self._distrusted:
                continue
            if any(entry.metadata != _metadata(entry.offset) for entry in pair):
                # Another tool has set these offsets and does not know what is pending: read from the beginning.
                log.warning("cursors_skipped", shard=shard, half=at_half, op=at_op, reason="not committed by halfway")
                self._observer.skipped_record(self._config.cursors_group, "foreign_cursor")
                continue
            cursors[shard] = Cursors(half=at_half, op=at_op, ends=_ends(committed[parked, shard]))
        return cursors

    def _request_committed(self, consumer: Consumer, partitions: list[TopicPartition]) -> list[TopicPartition]:
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                return _without_errors(consumer.committed(partitions, timeout=max(0.1, deadline - time.monotonic())))
            except KafkaException as exception:
                error = exception.args[0]
                if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                    raise ConfigurationError(
                        f"Kafka does not let halfway use consumer group {self._config.cursors_group!r}: "
                        "allow Read and Describe on it"
                    ) from exception
                if time.monotonic() + _RETRY_S > deadline:
                    raise KafkaUnavailableError(f"the cursors could not be read: {error.str()}") from exception
                time.sleep(_RETRY_S)


def _metadata(offset: int) -> str:
    """Return the metadata of a cursor, which distinguishes our cursors from offsets that another tool has set."""
    return f"halfway {offset}"


def _ends(entry: TopicPartition) -> EndCounts | None:
    """Return the ends that an entry stores, None if it stores none: an earlier release, or another tool, wrote it."""
    try:
        ends = msgspec.json.decode(entry.metadata or "", type=EndCounts)
    except msgspec.DecodeError:
        return None
    return ends if ends.position == entry.offset else None


def _without_errors(offsets: list[TopicPartition] | None) -> list[TopicPartition]:
    """Return the offsets; KafkaException if one of them has an error."""
    for entry in offsets or ():
        if entry.error is not None:
            raise KafkaException(entry.error)
    return offsets or []
