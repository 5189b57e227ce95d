"""A small compacted topic with one partition, such as `<prefix>groups`, as a table that every instance follows.

`<prefix>owners` is one: the owner of each shard, which is only a hint.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar

import structlog
from confluent_kafka import OFFSET_BEGINNING, IsolationLevel, KafkaException, Message

from halfway.coordinator.logging import Instant
from halfway.coordinator.ports import Observer, OwnerHint
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.reader import PartitionEnds, Place, Reader
from halfway.kafka.clients.threads import Loop
from halfway.kafka.records.codec import UndecodableError
from halfway.kafka.records.lane_records import Count, is_layout, note_skipped, owner_in
from halfway.protocol.errors import KafkaUnavailableError
from halfway.protocol.records import Owner, base_url_refusal

log = structlog.get_logger(__name__)

_POLL_S: Final = 0.2
_PAUSE_S: Final = 1.0
_JOIN_S: Final = 5.0
_LEAST_GAP_S: Final = 2.0
"""Reading anew takes a part of a second: a shorter gap could never be closed on a slow machine."""
_CONFIRMATIONS: Final = 4
"""How often the table is confirmed in the time after which it would be read anew."""
_CONFIRM_S: Final = 5.0
"""The time that a confirmation may take."""
_STILL_S: Final = 10.0
"""How long a consumer may read nothing although Kafka has more; then a new consumer begins."""

T = TypeVar("T")


class _Anew(Generic[T]):
    """The records of the whole topic as they are read once more, in their order."""

    def __init__(self) -> None:
        self.begun = Instant.now()
        self.changes: list[tuple[str, T | None]] = []


class Follower(ABC):
    """Reads partitions from their beginning and then follows them, on a thread of its own.

    After an unexpected error it begins again: never reading them any more would be worse.
    """

    not_read_event: ClassVar[str]
    """The log event if the partitions cannot be read."""

    def __init__(self, config: KafkaConfig, topic: str, partitions: int, name: str, /, **overrides: Any) -> None:
        """Keep the configuration; nothing connects before `_start`. `overrides` are properties of the consumer."""
        self._config = config
        self._topic = topic
        self._starts = {(topic, partition): OFFSET_BEGINNING for partition in range(partitions)}
        self._overrides = overrides
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopping = threading.Event()
        self._loop: Loop

    def _start(self) -> None:
        self._loop = Loop(asyncio.get_running_loop())
        self._thread.start()

    async def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _JOIN_S)

    # --- on the reading thread

    @abstractmethod
    def _handle(self, place: Place, message: Message) -> None:
        """Handle a record."""

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with Reader(self._config, **self._overrides) as reader:
                    reader.add(self._starts)
                    self._follow(reader)
            except Exception:
                log.exception(self.not_read_event, topic=self._topic)
                self._stopping.wait(_PAUSE_S)

    def _follow(self, reader: Reader) -> None:
        while not self._stopping.is_set():
            self._read(reader)

    def _read(self, reader: Reader) -> None:
        try:
            reader.read(_POLL_S, self._handle)
        except KafkaException as exception:
            log.warning(self.not_read_event, topic=self._topic, error=exception.args[0].str())
            self._stopping.wait(_PAUSE_S)


class CompactedTable(Follower, Generic[T]):
    """A follower of a topic with one partition that has read what was written before its `refresh`.

    A subclass decodes the records and applies them. `kind` is the name of the topic without its prefix.

    Kafka removes a tombstone when `min.compaction.lag.ms` and `delete.retention.ms` are over, each at least the outcome
    horizon. A reader that was away for longer (paused, suspended or cut off) finds no trace of what was deleted
    meanwhile. So the table is *confirmed* at short intervals: it was read up to an end that Kafka gave after a certain
    moment. If the last such moment is an outcome horizon ago, or if the topic has lost its end (it was made again, for
    example), the topic is read anew from its beginning, and what it does not contain any more is removed. Until then
    `refresh` does not return. It is also read anew if its consumer stands still although Kafka has given a later end.
    """

    confirmed_every_s: ClassVar[float] = 5.0
    """The longest pause between two confirmations."""

    def __init__(self, config: KafkaConfig, kind: str, observer: Observer, /, **overrides: Any) -> None:
        """Keep the configuration; nothing connects before `start`. `overrides` are more properties of the consumer."""
        super().__init__(config, config.topic(kind), 1, f"halfway-{kind}-tail", **overrides)
        self._observer = observer
        # The LSO: an open Kafka transaction of an instance that died must not hold up the readers.
        self._ends = PartitionEnds(config, self._topic, isolation=IsolationLevel.READ_COMMITTED)
        self._position = 0
        self._end = (0, time.monotonic())
        """The last end that Kafka gave, and when it was new."""
        self._waiters: dict[asyncio.Future[None], int] = {}
        self._values: dict[str, T] = {}
        """What the topic contains, by name."""
        self._gap_s = max(config.outcome_horizon_s, _LEAST_GAP_S)
        self._confirmed = Instant.now()
        """What was written before this moment is read."""
        self._swap_waiters: set[asyncio.Future[None]] = set()
        self._confirming: asyncio.Task[None] | None = None
        self._read_anew = threading.Event()
        """Asks the thread to read the topic from its beginning."""
        self._anew: _Anew[T] | None = None
        """On the thread: what it reads from the beginning again. The first time each record is applied at once."""
        self._changes: list[tuple[str, T | None]] = []
        """On the thread: the records that are read and not yet passed on."""
        self._swap_due = False
        """The thread has been asked to, and has not done it yet."""

    @abstractmethod
    def _decode(self, message: Message) -> tuple[str, T | None]:
        """Return the key and the value of a record, None for a tombstone, or raise UndecodableError.

        Called on the reading thread.
        """

    def _changed(self, name: str, value: T | None) -> None:
        """Take a value, None if it was removed; called on the event loop."""

    @property
    def age_s(self) -> float:
        """For how long at most a record may not have been read."""
        return self._confirmed.age_s

    async def start(self, *, deadline: float) -> None:
        """Start to follow the topic, and return once it is read to its end; the topic must exist.

        Raises KafkaUnavailableError: the topic could not be read in time; call `stop`.
        """
        self._confirmed = Instant.now()
        self._start()
        await self.refresh(deadline=deadline)
        self._confirming = asyncio.create_task(self._confirm())

    async def stop(self) -> None:
        """End the thread and the consumers."""
        if self._confirming is not None:
            self._confirming.cancel()
            await asyncio.wait([self._confirming])
        await self._ends.stop()
        await super().stop()

    async def refresh(self, *, deadline: float) -> None:
        """Return once every earlier write is read, or raise KafkaUnavailableError at the deadline."""
        asked, known = Instant.now(), self._position
        end = await self._ends.end(0, deadline=deadline)
        if end < known:
            await asyncio.sleep(_PAUSE_S)  # a leader that was just elected may lag for a moment
            end = await self._ends.end(0, deadline=deadline)
        if end != self._end[0]:
            self._end = (end, time.monotonic())
        await self._read_up_to(end, deadline)
        has_lost_its_end = end < known
        while has_lost_its_end or self._confirmed.age_s >= self._gap_s:
            has_lost_its_end = False
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
        every_s = min(self.confirmed_every_s, self._gap_s / _CONFIRMATIONS)
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(every_s)
            if self._confirmed.age_s >= every_s:
                try:
                    await self.refresh(deadline=loop.time() + _CONFIRM_S)
                except KafkaUnavailableError:
                    pass  # `age_s` shows it, and it is logged when the table is read anew
                except Exception:  # whatever it is, the next confirmation may succeed
                    log.exception("table_not_confirmed", topic=self._topic)

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
        gone = [(name, None) for name in self._values if values.get(name) is None]
        self._confirmed, self._position, self._swap_due = anew.begun, 0, False
        self._apply([*gone, *anew.changes], position)
        log.info("table_swapped", topic=self._topic, entries=len(self._values))
        for future in self._swap_waiters:
            if not future.done():
                future.set_result(None)

    def _apply(self, changes: Sequence[tuple[str, T | None]], position: int) -> None:
        for name, value in changes:
            if value is None:
                self._values.pop(name, None)
            else:
                self._values[name] = value
            self._changed(name, value)
        self._position = max(self._position, position)
        for future, target in self._waiters.items():
            if target <= self._position and not future.done():
                future.set_result(None)

    # --- on the reading thread

    def _follow(self, reader: Reader) -> None:
        """Read the topic from its beginning until it is to be read anew."""
        self._read_anew.clear()
        (place,) = self._starts
        passed_on, begun = 0, time.monotonic()
        try:
            while not self._stopping.is_set() and not self._read_anew.is_set():
                self._read(reader)
                if reader.went_back:
                    return
                position = reader.positions[place]
                end, since = self._end
                if position < end and reader.stands_still(_STILL_S, max(begun, since)):
                    log.warning("table_stands_still", topic=self._topic, position=position, end=end)
                    return
                if self._anew is None and position > passed_on:
                    self._loop.post(self._apply, self._taken(), position)
                    passed_on = position
                elif self._anew is not None and place in reader.at_end:
                    self._anew.changes = self._taken()
                    self._loop.post(self._swap, self._anew, position)
                    self._anew, passed_on = None, position
        finally:
            # However the next reading begins, it begins at the first record.
            self._anew, self._changes = _Anew(), []

    def _taken(self) -> list[tuple[str, T | None]]:
        changes, self._changes = self._changes, []
        return changes

    def _handle(self, _: Place, message: Message) -> None:
        try:
            self._changes.append(self._decode(message))
        except UndecodableError as undecodable:
            note_skipped(message, undecodable, self._observer.skipped_record)
        except Exception:
            # One record that cannot be handled must not hide those behind it.
            log.exception(self.not_read_event, topic=self._topic, offset=message.offset())


class KafkaOwners(Follower):
    """Reads every owner record and then follows the topic; an owner is unknown until its record is read."""

    not_read_event = "owners_not_read"

    def __init__(self, config: KafkaConfig, skipped: Count) -> None:
        """Keep the configuration and the counter of skipped records; nothing is read before `start`."""
        super().__init__(config, config.owners_topic, config.shards, "halfway-owners-tail")
        self._skipped = skipped
        self._own_url = config.instance_url
        self._hints: dict[int, OwnerHint] = {}

    async def start(self) -> None:
        self._start()

    def find(self, shard: int) -> OwnerHint | None:
        return self._hints.get(shard)

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
