"""A small compacted topic with one partition, such as `<prefix>groups`, as a table that every instance follows."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar

import structlog
from confluent_kafka import Consumer, IsolationLevel, KafkaError, Message, TopicPartition

from halfway.domain.errors import KafkaUnavailableError
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.loop import Loop
from halfway.kafka.log.end_offsets import PartitionEnds
from halfway.kafka.records.codec import UndecodableError
from halfway.kafka.records.validation import note_skipped
from halfway.service.ports import Observer

log = structlog.get_logger(__name__)

_BATCH: Final = 500
_POLL_S: Final = 0.2
_EOF: Final = KafkaError._PARTITION_EOF  # noqa: SLF001 - the names of librdkafka's own errors start so

T = TypeVar("T")


class CompactedTable(ABC, Generic[T]):
    """Reads a topic from its beginning and then follows it, on a thread of its own.

    A subclass decodes the records and applies them. `kind` is the name of the topic without its prefix.
    """

    not_read_event: ClassVar[str]
    """The log event if the topic cannot be read."""

    def __init__(self, config: KafkaConfig, kind: str, observer: Observer, /, **overrides: Any) -> None:
        """Keep the configuration; nothing connects before `start`. `overrides` are more properties of the consumer."""
        self._overrides = overrides
        self._config = config
        self._topic = config.topic(kind)
        self._observer = observer
        # The LSO: an open Kafka transaction of an instance that died must not hold up the readers.
        self._ends = PartitionEnds(config, self._topic, isolation=IsolationLevel.READ_COMMITTED)
        self._thread = threading.Thread(target=self._run, name=f"halfway-{kind}-tail", daemon=True)
        self._stopping = threading.Event()
        self._loop: Loop | None = None
        self._position = 0
        self._waiters: dict[asyncio.Future[None], int] = {}

    @abstractmethod
    def _decode(self, message: Message) -> tuple[str, T | None]:
        """Return the key and the value of a record, None for a tombstone, or raise UndecodableError.

        Called on the reading thread.
        """

    @abstractmethod
    def _changed(self, name: str, value: T | None) -> None:
        """Apply a record; called on the event loop."""

    async def start(self, *, deadline: float) -> None:
        """Start to follow the topic, and return once it is read to its end; the topic must exist.

        Raises:
            KafkaUnavailableError: the topic could not be read in time; call `stop`.

        """
        self._loop = Loop(asyncio.get_running_loop())
        self._thread.start()
        await self._read_up_to(await self._ends.end(0, deadline=deadline), deadline)

    async def stop(self) -> None:
        """End the thread and the consumers."""
        self._stopping.set()
        await self._ends.stop()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    async def refresh(self, *, deadline: float) -> None:
        """Return once every earlier write is read, or raise KafkaUnavailableError at the deadline."""
        await self._read_up_to(await self._ends.end(0, deadline=deadline), deadline)

    async def _read_up_to(self, position: int, deadline: float) -> None:
        if self._position >= position:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[future] = position
        try:
            async with asyncio.timeout_at(deadline):
                await future
        except TimeoutError:
            raise KafkaUnavailableError(f"{self._topic} could not be read in time") from None
        finally:
            del self._waiters[future]

    def _apply(self, changes: Sequence[tuple[str, T | None]], position: int) -> None:
        for name, value in changes:
            self._changed(name, value)
        self._position = max(self._position, position)
        for future, target in self._waiters.items():
            if target <= self._position and not future.done():
                future.set_result(None)

    # --- on the reading thread

    def _run(self) -> None:
        consumer = Consumer(self._config.consumer(**{"enable.partition.eof": True, **self._overrides}))
        try:
            consumer.assign([TopicPartition(self._topic, 0, 0)])
            while not self._stopping.is_set():
                try:
                    self._read(consumer)
                except Exception:
                    # Continue after any error: never reading the table again would be worse.
                    log.exception(self.not_read_event, topic=self._topic)
                    self._stopping.wait(1)
        finally:
            consumer.close()

    def _read(self, consumer: Consumer) -> None:
        first = consumer.poll(_POLL_S)
        if first is not None:
            self._take((first, *consumer.consume(_BATCH, 0)))

    def _take(self, messages: Sequence[Message]) -> None:
        changes: list[tuple[str, T | None]] = []
        position = 0
        for message in messages:
            error, offset = message.error(), message.offset()
            if error is not None and error.code() != _EOF:
                log.warning(self.not_read_event, topic=self._topic, error=error.str())
            elif offset is not None and error is not None:
                position = max(position, offset)
            elif offset is not None:
                position = max(position, offset + 1)
                try:
                    changes.append(self._decode(message))
                except UndecodableError as undecodable:
                    note_skipped(message, undecodable, self._observer.skipped_record)
        if self._loop is not None and position:
            self._loop.post(self._apply, changes, position)
