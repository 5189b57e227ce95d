"""The port `AuditTrail`: writes events to `<prefix>audit` in the background, and reads them back."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

import msgspec
import structlog
from confluent_kafka import KafkaException, Message

from halfway.coordinator.ports import Observer
from halfway.kafka.clients.config import MIB, KafkaConfig
from halfway.kafka.clients.reader import Place, Reader
from halfway.kafka.log.half_log import RecordWriter
from halfway.kafka.records.codec import KIND_AUDIT, UndecodableError, decode_audit, encode_audit, record_headers
from halfway.kafka.records.lane_records import note_skipped
from halfway.protocol.errors import HalfwayError, KafkaUnavailableError
from halfway.protocol.principal import PrincipalKind
from halfway.protocol.records import AuditEvent

log = structlog.get_logger(__name__)

MAX_WAITING: Final = 1_000
"""Events that may wait for Kafka; later ones are only in the log. Half of the places are reserved for operators."""
_RETRY_S: Final = 1.0
_STOP_S: Final = 2.0
_READ_S: Final = 20.0
_POLL_S: Final = 1.0


class KafkaAuditTrail:
    """Writes events one by one, in order, and retries each until Kafka has acknowledged it.

    No caller waits for it. An event may be written twice, with the same id.
    """

    def __init__(self, config: KafkaConfig, observer: Observer) -> None:
        """Keep the configuration; nothing connects before `start`."""
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
                await asyncio.sleep(_RETRY_S)
            else:
                self._observer.audited("written")
                return


def read_events(config: KafkaConfig, *, since_ms: int) -> Iterator[AuditEvent]:
    """Yield the events from a time up to now, each once.

    Raises:
        KafkaUnavailableError: the topic is missing, or could not be read.

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
