"""Writes records that depend on everything before them in the log, from any instance.

All instances write with one transactional id. An instance that initialises it fences the others: Kafka rejects records
that they had decided on and not yet committed. See docs/protocol.md#changes-of-groups.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from confluent_kafka import KafkaError, KafkaException, Message

from halfway.domain.errors import HalfwayError, KafkaUnavailableError, MessageTooLargeError
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.transactional_producer import ProducerFailedError, TransactionalProducer
from halfway.kafka.records.codec import Headers

T = TypeVar("T")
Record = tuple[bytes, bytes | None, Headers]
"""Key, value (None for a tombstone) and headers."""

_OVERRIDES: Final[dict[str, Any]] = {"transaction.timeout.ms": 10_000}
_MESSAGE_S: Final = 5.0


class FencedError(Exception):
    """Another instance has fenced this one, or the producer failed: read the log and decide again."""


class ExclusiveWriter:
    """One transactional id: `fence_others`, then read the log to its end and decide, then `write`."""

    def __init__(self, config: KafkaConfig, topic: str, name: str) -> None:
        """Keep the configuration; nothing connects before `fence_others`."""
        self._config = config
        self._topic = topic
        self._transactional_id = config.prefix + name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"halfway-{name}-writer")
        self._stopping = threading.Event()
        self._producer: TransactionalProducer | None = None
        """Used on the thread only; None if the others are not fenced for certain."""

    async def fence_others(self, *, deadline: float) -> None:
        """Fence all other instances, unless this one was the last to do so as far as it knows.

        After that, every transaction that any instance had begun is committed or aborted.

        Raises:
            FencedError: Kafka did not answer in time, or another instance fenced this one in the meantime.

        """
        await self._run(partial(self._fence, _monotonic(deadline)))

    async def write(self, records: Sequence[Record], *, deadline: float) -> int:
        """Write records in one Kafka transaction, and return the offset of the last.

        Raises:
            FencedError: another instance fenced this one, or the write failed; `fence_others` settles its outcome.
            MessageTooLargeError: a record is too large for the topic.

        """
        return await self._run(partial(self._write, records, _monotonic(deadline)))

    def give_up(self) -> None:
        """Make the next write fence the others again: the last one may not have been read yet."""
        with suppress(RuntimeError):  # it is stopped
            self._thread.submit(self._abandon)

    async def stop(self) -> None:
        """End the producer."""
        self._stopping.set()
        self.give_up()
        await asyncio.to_thread(self._thread.shutdown)

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except ProducerFailedError as error:
            raise FencedError(str(error)) from error
        except RuntimeError as error:  # the executor is shut down
            raise KafkaUnavailableError(f"{self._topic} is no longer written: halfway is stopping") from error

    # --- on the thread

    def _fence(self, until: float) -> None:
        if self._producer is not None:
            return
        producer = TransactionalProducer(
            self._config,
            self._transactional_id,
            message_timeout_s=_MESSAGE_S,
            **_OVERRIDES,
        )
        try:
            producer.initialise(until, self._stopping.is_set)
        except ProducerFailedError:
            producer.abandon()
            raise
        self._producer = producer

    def _write(self, records: Sequence[Record], until: float) -> int:
        producer, self._producer = self._producer, None
        if producer is None:
            raise FencedError("the others are no longer fenced")
        try:
            offset = self._commit(producer, records, until)
        except (ProducerFailedError, HalfwayError):
            producer.abandon()
            raise
        if producer.worn:
            producer.abandon()
        else:
            self._producer = producer
        return offset

    def _commit(self, producer: TransactionalProducer, records: Sequence[Record], until: float) -> int:
        offsets: list[int] = []
        failures: list[KafkaError] = []

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                failures.append(error)
            else:
                offsets.append(message.offset() or 0)

        producer.begin()
        try:
            for key, value, headers in records:
                producer.produce(self._topic, value, key, 0, on_delivery=delivered, headers=headers)
        except KafkaException as exception:
            failures.append(exception.args[0])
        if failures or not producer.flush(until, lambda: bool(failures) or self._stopping.is_set()):
            raise self._error(failures)
        producer.commit(max(0.0, until - time.monotonic()))
        return max(offsets)

    def _error(self, failures: list[KafkaError]) -> Exception:
        if not failures:
            return ProducerFailedError("flush", "not confirmed in time")
        if failures[0].code() == KafkaError.MSG_SIZE_TOO_LARGE:
            return MessageTooLargeError(f"a record is larger than halfway's topic {self._topic} takes")
        return ProducerFailedError.of("produce", KafkaException(failures[0]))

    def _abandon(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.abandon()


def _monotonic(deadline: float) -> float:
    left = deadline - asyncio.get_running_loop().time()
    if left <= 0:
        raise KafkaUnavailableError("no time was left to write to Kafka")
    return time.monotonic() + left
