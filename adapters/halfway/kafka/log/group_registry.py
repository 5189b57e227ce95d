"""The port `GroupStore`: the registered groups, read back from `<prefix>groups`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Final

import structlog
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from halfway.domain.errors import KafkaUnavailableError, RetryableError
from halfway.domain.records import Group
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.loop import Loop
from halfway.kafka.log.appender import RecordWriter
from halfway.kafka.log.end_offsets import PartitionEnds
from halfway.kafka.records.codec import KIND_GROUP, UndecodableError, encode_group, record_headers
from halfway.kafka.records.validation import group_in, note_skipped
from halfway.service.ports import Observer

log = structlog.get_logger(__name__)

_BATCH: Final = 500
_POLL_S: Final = 0.2
_EOF: Final = KafkaError._PARTITION_EOF  # noqa: SLF001 - the names of librdkafka's own errors start so

Change = tuple[str, Group | None]


class KafkaGroups:
    """Reads the groups topic from its beginning and then follows it, on a thread of its own."""

    def __init__(self, config: KafkaConfig, observer: Observer) -> None:
        """Keep the configuration; nothing connects before `start`."""
        self._config = config
        self._topic = config.groups_topic
        self._observer = observer
        self._writer = RecordWriter(config, name="groups")
        self._ends = PartitionEnds(config, config.groups_topic)
        self._thread = threading.Thread(target=self._run, name="halfway-groups-tail", daemon=True)
        self._stopping = threading.Event()
        self._loop: Loop | None = None
        self._groups: dict[str, Group] = {}
        self._position = 0
        self._reading: dict[asyncio.Future[None], int] = {}

    async def start(self, *, deadline: float) -> None:
        """Read all existing groups; the topic must exist.

        Raises:
            KafkaUnavailableError: the groups could not be read in time; call `stop`.

        """
        self._loop = Loop(asyncio.get_running_loop())
        self._writer.start()
        self._thread.start()
        await self._read_up_to(await self._ends.end(0, deadline=deadline), deadline)

    async def stop(self) -> None:
        """End the threads."""
        self._stopping.set()
        await self._writer.stop()
        await self._ends.stop()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def get(self, name: str) -> Group | None:
        """Return a group by its name."""
        return self._groups.get(name)

    def all(self) -> Sequence[Group]:
        """Return every group, by name."""
        return [self._groups[name] for name in sorted(self._groups)]

    async def put(self, group: Group, *, deadline: float) -> None:
        """Write a group and return once it is read back; KafkaUnavailableError past the deadline."""
        await self._write(group.name, encode_group(group), "registered", deadline)

    async def delete(self, name: str, *, deadline: float) -> None:
        """Remove a group and return once the removal is read back; KafkaUnavailableError past the deadline."""
        await self._write(name, None, "deleted", deadline)

    async def refresh(self, *, deadline: float) -> None:
        """Return once every earlier write is read; KafkaUnavailableError past the deadline."""
        await self._read_up_to(await self._ends.end(0, deadline=deadline), deadline)

    async def _write(self, name: str, value: bytes | None, state: str, deadline: float) -> None:
        headers = record_headers(KIND_GROUP, name, state)
        try:
            offset = await self._writer.append(
                self._topic, 0, key=name.encode(), value=value, headers=headers, deadline=deadline
            )
        except RetryableError as error:
            raise KafkaUnavailableError(f"group {name!r} could not be written: {error.detail}") from error
        await self._read_up_to(offset + 1, deadline)

    async def _read_up_to(self, position: int, deadline: float) -> None:
        if self._position >= position:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reading[future] = position
        try:
            async with asyncio.timeout_at(deadline):
                await future
        except TimeoutError:
            raise KafkaUnavailableError(f"{self._topic} could not be read in time") from None
        finally:
            del self._reading[future]

    def _apply(self, changes: Sequence[Change], position: int) -> None:
        for name, group in changes:
            if group is None:
                self._groups.pop(name, None)
            else:
                self._groups[name] = group
        self._position = max(self._position, position)
        for future, wanted in self._reading.items():
            if wanted <= self._position and not future.done():
                future.set_result(None)

    # --- the tailing thread

    def _run(self) -> None:
        # This topic has single records and no Kafka transactions: nothing is ever aborted or held back.
        consumer = Consumer(self._config.consumer(**{"enable.partition.eof": True}))
        try:
            consumer.assign([TopicPartition(self._topic, 0, 0)])
            while not self._stopping.is_set():
                try:
                    self._read(consumer)
                except Exception:
                    # Go on after any error: groups that are never read again would be worse.
                    log.exception("groups_not_read", topic=self._topic)
                    self._stopping.wait(1)
        finally:
            consumer.close()

    def _read(self, consumer: Consumer) -> None:
        first = consumer.poll(_POLL_S)
        if first is not None:
            self._take((first, *consumer.consume(_BATCH, 0)))

    def _take(self, messages: Sequence[Message]) -> None:
        changes: list[Change] = []
        position = 0
        for message in messages:
            error, offset = message.error(), message.offset()
            if error is not None and error.code() != _EOF:
                log.warning("groups_not_read", topic=self._topic, error=error.str())
            elif offset is not None and error is not None:
                position = max(position, offset)
            elif offset is not None:
                position = max(position, offset + 1)
                self._decode(message, changes)
        if self._loop is not None and position:
            self._loop.post(self._apply, changes, position)

    def _decode(self, message: Message, changes: list[Change]) -> None:
        try:
            changes.append(group_in(message))
        except UndecodableError as error:
            note_skipped(message, error, self._observer.skipped_record)
