"""The port `CursorStore`: cursors as the offsets of the consumer group `<prefix>cursors`.

See docs/protocol.md#scan-and-check-back.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import structlog
from confluent_kafka import OFFSET_INVALID, Consumer, KafkaError, KafkaException, TopicPartition

from halfway.domain.errors import ConfigurationError, KafkaUnavailableError
from halfway.kafka.clients.config import KafkaConfig
from halfway.service.ports import Cursors, Observer

log = structlog.get_logger(__name__)

T = TypeVar("T")
_TIMEOUT_S: Final = 10.0
_RETRY_S: Final = 0.2
_POLL_S: Final = 0.05
_COORDINATOR_MS: Final = 6_000
_AGAIN_S: Final = 60.0
"""How long cursors that have not moved are left alone: Kafka forgets the offsets of an idle group after days."""
_STOP_S: Final = 2.0
"""How long a stop waits for a commit, then for the consumer: a cursor that is not committed only costs reading."""


class KafkaCursors:
    """Commits and loads cursors with a consumer that has no assignment, on a thread of its own.

    While a commit is under way, later ones are merged into one: the newest cursors of each shard.
    """

    def __init__(self, config: KafkaConfig, observer: Observer) -> None:
        """Keep the configuration; nothing connects before `start`."""
        self._config = config
        self._observer = observer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="halfway-cursors")
        self._consumer: Consumer | None = None
        self._unanswered = 0
        self._stop_by = math.inf
        self._failure: KafkaError | None = None
        self._newest: dict[int, Cursors] = {}
        self._stands: dict[int, tuple[Cursors, float]] = {}
        """What Kafka has confirmed for each shard, and when."""
        self._committing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Create the consumer."""
        await asyncio.wrap_future(self._thread.submit(self._open))

    async def stop(self) -> None:
        """Commit the cursors that wait and end the thread, within seconds even if Kafka does not answer."""
        self._stop_by = time.monotonic() + _STOP_S
        if self._committing is not None:
            await asyncio.wait([self._committing], timeout=_STOP_S)
        await asyncio.wrap_future(self._thread.submit(self._close))
        self._thread.shutdown(wait=False)

    async def commit(self, cursors: Mapping[int, Cursors]) -> None:
        """Commit the cursors of shards that have moved, and others now and then.

        A failure is logged, and the next scan tries again.
        """
        self._newest.update((shard, given) for shard, given in cursors.items() if not self._stand(shard, given))
        while self._newest or self._committing is not None:
            if self._committing is None:
                newest, self._newest = self._newest, {}
                self._committing = asyncio.create_task(self._commit_all(newest))
            await asyncio.shield(self._committing)

    def _stand(self, shard: int, cursors: Cursors) -> bool:
        stands, at = self._stands.get(shard, (None, 0.0))
        return stands == cursors and shard not in self._newest and time.monotonic() - at < _AGAIN_S

    async def _commit_all(self, cursors: Mapping[int, Cursors]) -> None:
        for shard in cursors:
            self._stands.pop(shard, None)
        try:
            await asyncio.wrap_future(self._submit(lambda consumer: self._commit(consumer, cursors)))
            self._stands.update((shard, (given, time.monotonic())) for shard, given in cursors.items())
        except KafkaException as exception:
            log.warning("cursors_not_committed", shards=sorted(cursors), error=exception.args[0].str())
        except KafkaUnavailableError as error:
            log.warning("cursors_not_committed", shards=sorted(cursors), error=error.detail)
        finally:
            self._committing = None

    def load(self, shards: Sequence[int]) -> Mapping[int, Cursors]:
        """Return the committed cursors of shards, none for one that never had any. Blocks: do not call it on the loop.

        Raises:
            KafkaUnavailableError: Kafka did not answer in time.
            ConfigurationError: halfway may not use the consumer group.

        """
        return self._submit(lambda consumer: self._load(consumer, shards)).result()

    # --- the cursors' thread

    def _submit(self, call: Callable[[Consumer], T]) -> Future[T]:
        def run() -> T:
            if self._consumer is None:
                raise KafkaUnavailableError("halfway is not running")
            return call(self._consumer)

        return self._thread.submit(run)

    def _open(self) -> None:
        self._consumer = Consumer(
            self._config.consumer(
                on_commit=self._answered,
                **{
                    # How long a commit waits to find the group's coordinator, and then for its answer; closing the
                    # consumer waits for both too.
                    "session.timeout.ms": _COORDINATOR_MS,
                    "socket.timeout.ms": round(_TIMEOUT_S * 1000),
                },
            )
        )

    def _close(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            # Closing waits for the answers to its commits for as long as Kafka is silent: do not wait for it here.
            closing = threading.Thread(target=consumer.close, name="halfway-cursors-close", daemon=True)
            closing.start()
            closing.join(_STOP_S)

    def _commit(self, consumer: Consumer, cursors: Mapping[int, Cursors]) -> None:
        offsets = [
            place
            for shard, cursor in cursors.items()
            for place in (
                TopicPartition(self._config.half_topic, shard, cursor.half, _mark(cursor.half)),
                TopicPartition(self._config.op_topic, shard, cursor.op, _mark(cursor.op)),
            )
        ]
        # A synchronous commit would block for as long as librdkafka looks for the group's coordinator.
        consumer.commit(offsets=offsets, asynchronous=True)
        self._unanswered += 1
        deadline = time.monotonic() + _TIMEOUT_S
        while self._unanswered:
            if time.monotonic() > min(deadline, self._stop_by):
                raise KafkaUnavailableError("Kafka did not answer in time")
            consumer.poll(_POLL_S)
        if self._failure is not None:
            raise KafkaException(self._failure)

    def _answered(self, error: KafkaError | None, places: list[TopicPartition]) -> None:
        """Handle the answer to a commit; answers come in the order of the commits."""
        self._unanswered -= 1
        self._failure = error or next((place.error for place in places if place.error is not None), None)

    def _load(self, consumer: Consumer, shards: Sequence[int]) -> dict[int, Cursors]:
        for shard in shards:
            self._stands.pop(shard, None)  # another instance may have committed since
        half, op = self._config.half_topic, self._config.op_topic
        asked = [TopicPartition(topic, shard) for shard in shards for topic in (half, op)]
        found = {(place.topic, place.partition): place for place in self._committed(consumer, asked)}
        cursors: dict[int, Cursors] = {}
        for shard in shards:
            pair = found[half, shard], found[op, shard]
            at_half, at_op = (place.offset for place in pair)
            if OFFSET_INVALID in (at_half, at_op):
                continue
            if any(place.metadata != _mark(place.offset) for place in pair):
                # Another tool has set these offsets and cannot know what is pending: read from the beginning.
                log.warning("cursors_skipped", shard=shard, half=at_half, op=at_op, reason="not committed by halfway")
                self._observer.skipped_record(self._config.cursors_group, "foreign_cursor")
                continue
            cursors[shard] = Cursors(half=at_half, op=at_op)
        return cursors

    def _committed(self, consumer: Consumer, asked: list[TopicPartition]) -> list[TopicPartition]:
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                return _sound(consumer.committed(asked, timeout=max(0.1, deadline - time.monotonic())))
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


def _mark(offset: int) -> str:
    """Return the metadata of a cursor, which tells our cursors from offsets that another tool has set."""
    return f"halfway {offset}"


def _sound(places: list[TopicPartition] | None) -> list[TopicPartition]:
    """Return the offsets if none of them has an error."""
    for place in places or ():
        if place.error is not None:
            raise KafkaException(place.error)
    return places or []
