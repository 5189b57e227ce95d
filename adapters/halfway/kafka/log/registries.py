"""What operators do, in three topics: the registries of groups and of keys, and the audit trail.

They are the ports `GroupStore`, `KeyStore` and `AuditTrail`. A change of a group depends on everything before it in the
log, and any instance may write it. All write with one transactional id: an instance that initialises it fences the
others, and Kafka rejects the records that they had decided on and not yet committed. See
docs/protocol.md#changes-of-groups.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import SystemRandom
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

import msgspec
import structlog
from confluent_kafka import KafkaError, KafkaException, Message

from halfway.coordinator.ports import Observer
from halfway.kafka.clients.config import MIB, KafkaConfig
from halfway.kafka.clients.reader import Place, Reader
from halfway.kafka.clients.transactional_producer import ProducerFailedError, TransactionalProducer
from halfway.kafka.log.compacted_table import CompactedTable
from halfway.kafka.log.half_log import RecordWriter
from halfway.kafka.records.codec import (
    KIND_AUDIT,
    KIND_KEY,
    Headers,
    UndecodableError,
    decode_audit,
    encode_audit,
    encode_group,
    encode_key,
    group_headers,
    record_headers,
)
from halfway.kafka.records.lane_records import group_in, key_in, note_skipped
from halfway.protocol.errors import HalfwayError, KafkaUnavailableError, MessageTooLargeError, RetryableError
from halfway.protocol.keys import Key, KeyTable
from halfway.protocol.principal import PrincipalKind
from halfway.protocol.records import AuditEvent, Group

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
        self._config = config
        self._topic = topic
        self._transactional_id = config.prefix + name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"halfway-{name}-writer")
        self._stopping = threading.Event()
        self._producer: TransactionalProducer | None = None
        """Used on the thread only; None if the others are not fenced for certain."""

    async def fence_others(self, *, deadline: float) -> None:
        """Fence all other instances, unless this one was the last to do so as far as it knows.

        After that, every transaction that any instance had begun is committed or aborted. Raises FencedError: Kafka did
        not answer in time, or another instance fenced this one in the meantime.
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
            self._config, self._transactional_id, message_timeout_s=_MESSAGE_S, **_OVERRIDES
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


_RETRY_S: Final = (0.01, 0.05)
_ATTEMPT_S: Final = 5.0
_FETCH_MS: Final = 50
"""The end of a Kafka transaction is not a record: the consumer learns of it at the end of an empty fetch."""
_RANDOM: Final = SystemRandom()


@dataclass(frozen=True, eq=False)
class _Change:
    """A change that waits to be made."""

    name: str
    decide: Callable[[Group | None], Group | None]
    done: asyncio.Future[None]

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class KafkaGroups(CompactedTable[Group]):
    """The groups by name."""

    not_read_event = "groups_not_read"

    def __init__(self, config: KafkaConfig, observer: Observer) -> None:
        super().__init__(config, "groups", observer, **{"fetch.wait.max.ms": _FETCH_MS})
        self._exclusive = ExclusiveWriter(config, self._topic, "groups")
        self._waiting: list[_Change] = []
        self._changing: asyncio.Task[None] | None = None
        self._reason = "others are being changed"
        self._group_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """The changes of a group run one after the other, so that a busy group does not delay the others."""

    def get(self, name: str) -> Group | None:
        return self._values.get(name)

    def all(self) -> Sequence[Group]:
        return [self._values[name] for name in sorted(self._values)]

    async def stop(self) -> None:
        """End the threads; waiting changes are not made."""
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.wait([self._changing])
        await self._exclusive.stop()
        await super().stop()

    async def change(self, name: str, decide: Callable[[Group | None], Group | None], *, deadline: float) -> None:
        """See the port. Changes of one group wait for each other; changes of several groups are written together."""
        await self.refresh(deadline=deadline)
        if decide(self.get(name)) == self.get(name):  # a caller that may not change it holds up no other
            return
        change = _Change(name, decide, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout_at(deadline), self._group_locks.setdefault(name, asyncio.Lock()):
                self._waiting.append(change)
                if self._changing is None:
                    self._changing = asyncio.create_task(self._change_all())
                await change.done
        except TimeoutError:
            raise KafkaUnavailableError(f"group {name!r} could not be changed in time: {self._reason}") from None

    async def _change_all(self) -> None:
        """Make the waiting changes. If another instance wrote in between, decide them again."""
        try:
            while self._waiting:
                try:
                    await self._change_some()
                except (FencedError, KafkaUnavailableError) as error:
                    self._reason = str(error)
                    await asyncio.sleep(_RANDOM.uniform(*_RETRY_S))
                    self._waiting = [change for change in self._waiting if not change.done.done()]
        finally:
            self._changing = None
            waiting, self._waiting = self._waiting, []
            for change in waiting:
                change.fail(KafkaUnavailableError("groups can no longer be changed: halfway is stopping"))

    async def _change_some(self) -> None:
        """Decide and write the waiting changes in one Kafka transaction (docs/protocol.md#changes-of-groups)."""
        deadline = asyncio.get_running_loop().time() + _ATTEMPT_S
        await self._exclusive.fence_others(deadline=deadline)  # Step 1
        await self.refresh(deadline=deadline)  # Step 2
        changes, self._waiting = self._waiting, []
        decided = [(change, record) for change in changes if (record := self._decide(change)) is not None]
        if not decided:
            return
        try:
            offset = await self._exclusive.write([record for _, record in decided], deadline=deadline)  # Step 3
            await self._read_up_to(offset + 1, deadline)
        except MessageTooLargeError as error:
            for change, _ in decided:
                change.fail(error)
            return
        except BaseException:
            self._exclusive.give_up()  # nothing is decided before it is read
            self._waiting = [*(change for change, _ in decided), *self._waiting]
            raise
        for change, _ in decided:
            if not change.done.done():
                change.done.set_result(None)

    def _decide(self, change: _Change) -> Record | None:
        """Return the record that makes a change; None if nothing changes, or no caller waits for it any more."""
        if change.done.done():
            return None
        before = self.get(change.name)
        try:
            after = change.decide(before)
        except Exception as error:  # noqa: BLE001 - the caller gets it, whatever it is
            change.fail(error)
            return None
        if after == before:
            change.done.set_result(None)
            return None
        value = None if after is None else encode_group(after)
        return change.name.encode(), value, group_headers(change.name, after)

    def _decode(self, message: Message) -> tuple[str, Group | None]:
        return group_in(message)


class KafkaKeys(CompactedTable[Key]):
    """The keys by public id. A record contains a keyed hash, never the key itself."""

    not_read_event = "keys_not_read"
    confirmed_every_s = 1.0  # until then a revoked key may be accepted

    def __init__(self, config: KafkaConfig, observer: Observer) -> None:
        super().__init__(config, "keys", observer)
        self._table = KeyTable()
        self._writer = RecordWriter(config, name="keys")

    @property
    def table(self) -> KeyTable:
        """The keys that were read so far."""
        return self._table

    async def start(self, *, deadline: float) -> None:
        self._writer.start()
        await super().start(deadline=deadline)

    async def stop(self) -> None:
        """Finish the writes in flight, then end the threads."""
        await self._writer.stop()
        await super().stop()

    async def put(self, key: Key, *, deadline: float) -> None:
        """Write a key and return once it is read back, or raise KafkaUnavailableError at the deadline."""
        headers = record_headers(KIND_KEY, key.principal.group or "", "created")
        await self._write(key.id, encode_key(key), headers, deadline=deadline)

    async def delete(self, key_id: str, *, deadline: float) -> None:
        """Delete a key and return once the deletion is read back, or raise KafkaUnavailableError at the deadline."""
        await self._write(key_id, None, record_headers(KIND_KEY, "", "revoked"), deadline=deadline)

    async def _write(self, name: str, value: bytes | None, headers: Headers, *, deadline: float) -> None:
        try:
            offset = await self._writer.append_one(
                self._topic, 0, key=name.encode(), value=value, headers=headers, deadline=deadline
            )
        except RetryableError as error:
            raise KafkaUnavailableError(f"{name!r} could not be written to {self._topic}: {error.detail}") from error
        await self._read_up_to(offset + 1, deadline)

    def _decode(self, message: Message) -> tuple[str, Key | None]:
        return key_in(message)

    def _changed(self, name: str, value: Key | None) -> None:
        self._table.apply(name, value)


log = structlog.get_logger(__name__)

MAX_WAITING: Final = 1_000
"""Events that may wait for Kafka; later ones are only in the log. Half of the places are reserved for operators."""
_REWRITE_S: Final = 1.0
_STOP_S: Final = 2.0
_READ_S: Final = 20.0
_POLL_S: Final = 1.0


class KafkaAuditTrail:
    """Writes events one by one, in order, and retries each until Kafka has acknowledged it.

    No caller waits for it. An event may be written twice, with the same id.
    """

    def __init__(self, config: KafkaConfig, observer: Observer) -> None:
        small = dataclasses.replace(config, writer_in_flight=MAX_WAITING, writer_in_flight_bytes=4 * MIB)
        self._topic = config.topic("audit")
        self._timeout_s = config.prepare_timeout_s
        self._observer = observer
        self._writer = RecordWriter(small, name="audit")
        self._waiting: deque[AuditEvent] = deque()
        self._arrival = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        self._writer.start()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Wait a moment for the waiting events to be written, then count the rest as lost."""
        if self._task is not None:
            self._stopping = True
            self._arrival.set()
            await asyncio.wait([self._task], timeout=_STOP_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._writer.stop()
        for event in self._waiting:
            log.warning("audit_event_lost", **msgspec.structs.asdict(event))
            self._observer.audited("lost")

    def record(self, event: AuditEvent) -> bool:
        """Take an event, and return True; if too many wait already, count it as lost and return False."""
        limit = MAX_WAITING // 2 if event.actor_kind == PrincipalKind.GROUP else MAX_WAITING
        if len(self._waiting) >= limit:
            self._observer.audited("lost")
            log.warning("audit_event_lost", id=event.id, waiting=len(self._waiting))
            return False
        self._waiting.append(event)
        self._arrival.set()
        return True

    async def _run(self) -> None:
        while True:
            while self._waiting:
                event = self._waiting[0]
                try:
                    await self._write(event)
                except Exception:
                    # One event that cannot be written must not keep the others from being written.
                    log.exception("audit_event_lost", **msgspec.structs.asdict(event))
                    self._observer.audited("lost")
                self._waiting.popleft()
            if self._stopping:
                return
            self._arrival.clear()
            await self._arrival.wait()

    async def _write(self, event: AuditEvent) -> None:
        headers = record_headers(KIND_AUDIT, event.group or "", event.action)
        while True:
            deadline = asyncio.get_running_loop().time() + self._timeout_s
            try:
                await self._writer.append_one(
                    self._topic,
                    0,
                    key=event.subject.encode(),
                    value=encode_audit(event),
                    headers=headers,
                    deadline=deadline,
                )
            except HalfwayError as error:
                log.warning("audit_event_not_written", id=event.id, error=error.code, waiting=len(self._waiting))
                await asyncio.sleep(_REWRITE_S)
            else:
                self._observer.audited("written")
                return


def read_events(config: KafkaConfig, *, since_ms: int) -> Iterator[AuditEvent]:
    """Yield the events from a time up to now, each once.

    Raises KafkaUnavailableError: the topic is missing, or could not be read.
    """
    place = (config.topic("audit"), 0)
    seen: set[str] = set()
    events: list[AuditEvent] = []

    def handle(_: Place, message: Message) -> None:
        try:
            event = decode_audit(message.value())
        except UndecodableError as error:
            note_skipped(message, error, lambda _topic, _reason: None)
            return
        if event.id not in seen and event.at >= since_ms:
            seen.add(event.id)
            events.append(event)

    try:
        with Reader(config) as reader:
            reader.add(reader.offsets_for_times({place: since_ms}, _READ_S))
            begun = time.monotonic()
            while place not in reader.at_end:
                if reader.stands_still(_READ_S, begun):
                    raise KafkaUnavailableError(f"{place[0]} could not be read: no answer in time")
                reader.read(_POLL_S, handle)
                yield from events
                events.clear()
    except KafkaException as exception:
        raise KafkaUnavailableError(f"{place[0]} could not be read: {exception.args[0].str()}") from exception
