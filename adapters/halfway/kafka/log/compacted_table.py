"""A small compacted topic with one partition, such as `<prefix>groups`, as a table that every instance follows.

`<prefix>owners` is one: the owner of each shard, which is only a hint.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final, Generic, TypeVar

import structlog
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from halfway.coordinator.logging import Instant
from halfway.coordinator.ports import Observer, OwnerHint
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.threads import Loop
from halfway.kafka.log.reader import PartitionEnds, Place, Reader
from halfway.kafka.records.codec import UndecodableError
from halfway.kafka.records.lane_records import Count, is_layout, note_skipped, owner_in
from halfway.protocol.errors import KafkaUnavailableError
from halfway.protocol.records import Owner
from halfway.protocol.urls import base_url_refusal

log = structlog.get_logger(__name__)

_BATCH: Final = 500
_POLL_S: Final = 0.2
_PAUSE_S: Final = 1.0
_LEAST_GAP_S: Final = 2.0
"""Reading anew takes a part of a second: a shorter gap could never be closed on a slow machine."""
_CONFIRMATIONS: Final = 4
"""How often the table is confirmed in the time after which it would be read anew."""
_CONFIRM_S: Final = 5.0
"""The longest pause between two confirmations, and the time that one may take."""
_EOF: Final = KafkaError._PARTITION_EOF  # noqa: SLF001 - the names of librdkafka's own errors start so

T = TypeVar("T")


class _Anew(Generic[T]):
    """The records of the whole topic as they are read once more, in their order."""

    def __init__(self) -> None:
        self.begun = Instant.now()
        self.changes: list[tuple[str, T | None]] = []


class CompactedTable(ABC, Generic[T]):
    """Reads a topic from its beginning and then follows it, on a thread of its own.

    A subclass decodes the records and applies them. `kind` is the name of the topic without its prefix.

    Kafka removes a tombstone when `min.compaction.lag.ms` and `delete.retention.ms` are over, each at least the outcome
    horizon. A reader that was away for longer (paused, suspended or cut off) finds no trace of what was deleted
    meanwhile. So the table is *confirmed* at short intervals: it was read up to an end that Kafka gave after a certain
    moment. If the last such moment is an outcome horizon ago, the topic is read anew from its beginning, and what it
    does not contain any more is removed. Until then `refresh` does not return.
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
        self._loop: Loop
        self._position = 0
        self._waiters: dict[asyncio.Future[None], int] = {}
        self._names: set[str] = set()
        """The names with a value."""
        self._gap_s = max(config.outcome_horizon_s, _LEAST_GAP_S)
        self._confirmed = Instant.now()
        """What was written before this moment is read."""
        self._swap_waiters: set[asyncio.Future[None]] = set()
        self._confirming: asyncio.Task[None] | None = None
        self._read_anew = threading.Event()
        """Asks the thread to read the topic from its beginning."""
        self._swap_due = False
        """The thread has been asked to, and has not done it yet."""

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
        self._confirmed = Instant.now()
        self._thread.start()
        await self.refresh(deadline=deadline)
        self._confirming = asyncio.create_task(self._confirm())

    async def stop(self) -> None:
        """End the thread and the consumers."""
        self._stopping.set()
        if self._confirming is not None:
            self._confirming.cancel()
            await asyncio.wait([self._confirming])
        await self._ends.stop()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    async def refresh(self, *, deadline: float) -> None:
        """Return once every earlier write is read, or raise KafkaUnavailableError at the deadline."""
        asked = Instant.now()
        end = await self._ends.end(0, deadline=deadline)
        await self._read_up_to(end, deadline)
        while self._confirmed.age_s >= self._gap_s:
            if not self._swap_due:
                self._swap_due = True
                log.warning("table_read_anew", topic=self._topic, away_s=round(self._confirmed.age_s, 1))
                self._read_anew.set()
            # The position may lie before this end afterwards: the end may be newer than what is read anew.
            await self._wait_for_swap(deadline)
            await self._read_up_to(end, deadline)
        if asked.monotonic > self._confirmed.monotonic:
            self._confirmed = asked

    async def _confirm(self) -> None:
        """Confirm the table at an interval, unless calls do."""
        every_s = min(_CONFIRM_S, self._gap_s / _CONFIRMATIONS)
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(every_s)
            if self._confirmed.age_s >= every_s:
                with suppress(KafkaUnavailableError):  # it is logged when the table is read anew
                    await self.refresh(deadline=loop.time() + _CONFIRM_S)

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

    async def _wait_for_swap(self, deadline: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._swap_waiters.add(future)
        try:
            async with asyncio.timeout_at(deadline):
                await future
        except TimeoutError:
            raise KafkaUnavailableError(f"{self._topic} could not be read anew in time") from None
        finally:
            self._swap_waiters.discard(future)

    def _swap(self, anew: _Anew[T], position: int) -> None:
        """Take over what the topic contained from its beginning to `position`."""
        values = dict(anew.changes)
        for name in [name for name in self._names if values.get(name) is None]:
            self._names.discard(name)
            self._changed(name, None)
        self._confirmed, self._position, self._swap_due = anew.begun, 0, False
        self._apply(anew.changes, position)
        log.info("table_swapped", topic=self._topic, entries=len(self._names))
        for future in self._swap_waiters:
            if not future.done():
                future.set_result(None)

    def _apply(self, changes: Sequence[tuple[str, T | None]], position: int) -> None:
        for name, value in changes:
            (self._names.discard if value is None else self._names.add)(name)
            self._changed(name, value)
        self._position = max(self._position, position)
        for future, target in self._waiters.items():
            if target <= self._position and not future.done():
                future.set_result(None)

    # --- on the reading thread

    def _run(self) -> None:
        anew: _Anew[T] | None = None
        while not self._stopping.is_set():
            try:
                self._follow(anew)
            except Exception:
                # Continue after any error: never reading the table again would be worse.
                log.exception(self.not_read_event, topic=self._topic)
                self._stopping.wait(_PAUSE_S)
            anew = _Anew()

    def _follow(self, anew: _Anew[T] | None) -> None:
        """Read the topic from its beginning until it is to be read anew."""
        self._read_anew.clear()
        consumer = Consumer(self._config.consumer(**{"enable.partition.eof": True, **self._overrides}))
        try:
            consumer.assign([TopicPartition(self._topic, 0, 0)])
            while not self._stopping.is_set() and not self._read_anew.is_set():
                first = consumer.poll(_POLL_S)
                if first is not None:
                    anew = self._take((first, *consumer.consume(_BATCH, 0)), anew)
        finally:
            consumer.close()

    def _take(self, messages: Sequence[Message], anew: _Anew[T] | None) -> _Anew[T] | None:
        """Apply records, or add them to `anew` until the end of the topic; return `anew` if the end is yet to come."""
        changes: list[tuple[str, T | None]] = []
        position = 0
        for message in messages:
            error, offset = message.error(), message.offset()
            if error is not None and error.code() != _EOF:
                log.warning(self.not_read_event, topic=self._topic, error=error.str())
            elif offset is not None and error is not None:
                position = max(position, offset)
                if anew is not None:
                    anew.changes += changes
                    self._loop.post(self._swap, anew, position)
                    anew, changes = None, []
            elif offset is not None:
                position = max(position, offset + 1)
                changes += self._decoded(message)
        if anew is not None:
            anew.changes += changes
        elif position:
            self._loop.post(self._apply, changes, position)
        return anew

    def _decoded(self, message: Message) -> list[tuple[str, T | None]]:
        try:
            return [self._decode(message)]
        except UndecodableError as undecodable:
            note_skipped(message, undecodable, self._observer.skipped_record)
        except Exception:
            # One record that cannot be handled must not hide those behind it.
            log.exception(self.not_read_event, topic=self._topic, offset=message.offset())
        return []


_JOIN_S: Final = 5.0


class KafkaOwners:
    """Reads every owner record and then follows the topic, on a thread of its own."""

    def __init__(self, config: KafkaConfig, skipped: Count) -> None:
        """Keep the configuration and the counter of skipped records; nothing is read before `start`."""
        self._config = config
        self._skipped = skipped
        self._own_url = config.instance_url
        self._hints: dict[int, OwnerHint] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="halfway-owners-tail", daemon=True)
        self._loop: Loop

    async def start(self) -> None:
        """Start reading; an owner is unknown until its record is read."""
        self._loop = Loop(asyncio.get_running_loop())
        self._thread.start()

    async def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _JOIN_S)

    def find(self, shard: int) -> OwnerHint | None:
        """Return the owner of a shard; None if none is known or if it is this instance."""
        return self._hints.get(shard)

    def _run(self) -> None:
        topic = self._config.owners_topic
        while not self._stopping.is_set():
            reader = Reader(self._config)
            try:
                reader.add({(topic, shard): OFFSET_BEGINNING for shard in range(self._config.shards)})
                while not self._stopping.is_set():
                    reader.read(_POLL_S, self._handle)
            except KafkaException as error:
                log.warning("owners_not_read", topic=topic, error=error.args[0].str())
                self._stopping.wait(_PAUSE_S)
            except Exception:
                # Continue after any error: never reading owners again would be worse.
                log.exception("owners_not_read", topic=topic)
                self._stopping.wait(_PAUSE_S)
            finally:
                reader.close()

    def _handle(self, place: Place, message: Message) -> None:
        if is_layout(message):
            return
        try:
            owner = owner_in(message)
        except UndecodableError as error:
            note_skipped(message, error, self._skipped)
        else:
            self._loop.post(self._apply, place[1], self._hint(place[1], owner))

    def _hint(self, shard: int, owner: Owner | None) -> OwnerHint | None:
        if owner is None or owner.url == self._own_url:
            return None
        refusal = base_url_refusal(owner.url)
        if refusal is not None:
            log.warning("owner_not_asked", shard=shard, incarnation=owner.incarnation, reason=refusal)
            return None
        return OwnerHint(incarnation=owner.incarnation, url=owner.url)

    def _apply(self, shard: int, hint: OwnerHint | None) -> None:
        if hint is None:
            self._hints.pop(shard, None)
        else:
            self._hints[shard] = hint
