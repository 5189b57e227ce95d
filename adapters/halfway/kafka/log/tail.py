"""The tail: reading half[s] of the owned shards from their barriers on (docs/protocol.md#ownership)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog
from confluent_kafka import KafkaException, Message

from halfway.kafka.clients.config import KafkaConfig, explained
from halfway.kafka.clients.reader import Place, Reader
from halfway.kafka.clients.threads import Loop, OwnedThread
from halfway.kafka.clients.transactional_producer import ProducerFailedError, kafka_error
from halfway.kafka.records.codec import BARRIER_KEY, UndecodableError
from halfway.kafka.records.lane_records import (
    NewerReleaseError,
    barrier_in,
    demand_no_newer,
    half_in,
    note_skipped,
    overwritten_id,
)
from halfway.protocol.records import FOREIGN, Foreign, Half

log = structlog.get_logger()

Records = Sequence[tuple[int, str, Half | Foreign | None]]
OnAppended = Callable[[int, Records, int], None]
"""Called on the loop's thread: shard, records, the position reached without a gap."""

_POLL_S: Final = 0.1
_OUTSTANDING: Final = 8
_PAUSE_S: Final = 0.5
_ASIDE_S: Final = 0.02
# Kafka reports the end of a partition behind a control record only with an empty answer. Nearly all records are this
# instance's own and applied already: gathering them saves an answer, and a turn of the loop, for each.
_GATHERED: Final = {"fetch.wait.max.ms": 50, "fetch.min.bytes": 65_536}


@dataclass(frozen=True, kw_only=True, slots=True)
class TailEvents:
    """What a tail reports, on the loop's thread."""

    appended: OnAppended
    foreign_barrier: Callable[[int], None]
    """Another incarnation has acquired the shard."""
    newer: Callable[[int], None]
    """The shard contains a record that only a newer release can read; the tail reads it no further."""
    failed: Callable[[ProducerFailedError], None]


class Tail(OwnedThread):
    """A thread with a consumer. It stops reading while a few batches wait for the loop."""

    def __init__(
        self,
        config: KafkaConfig,
        incarnation: str,
        loop: Loop,
        has_applied: Callable[[int, int, bytes | None], bool],
        skipped: Callable[[str, str], None],
        events: TailEvents,
    ) -> None:
        """Pass events to the loop's thread; `skipped` counts a record by topic and reason, on any thread.

        `has_applied` returns, by shard, offset and key, if a record is already applied; the tail's thread calls it.
        """
        super().__init__(self._run, "halfway-tail")
        self._config = config
        self._incarnation = incarnation
        self._loop = loop
        self._has_applied = has_applied
        self._skipped = skipped
        self._events = events
        self._changes: deque[tuple[int, int | None]] = deque()
        self._stopped = threading.Event()
        self._room = threading.Semaphore(_OUTSTANDING)
        self._aside: list[tuple[int, int, Message]] = []
        """What was not applied when it was read: shard, offset, record."""
        self._batch: dict[int, list[tuple[int, str, Half | Foreign | None]]] = {}

    def add(self, shard: int, offset: int) -> None:
        self._changes.append((shard, offset))

    def remove(self, shard: int) -> None:
        """Stop reading half[shard]; records that were already posted still come."""
        self._changes.append((shard, None))

    def stop(self) -> None:
        """Make the thread end; `join` waits for it."""
        self._stopped.set()

    def _run(self) -> None:
        reader: Reader | None = None
        try:
            reader = Reader(self._config, **_GATHERED)
            while not self._stopped.is_set():
                try:
                    self._change(reader)
                    reader.read(_POLL_S, self._handle)
                except KafkaException as error:
                    cause = kafka_error(error)
                    remedy = None if cause is None else explained(cause.code(), self._config)
                    log.warning("tail_failed", error=str(cause or error), remedy=remedy)
                    self._stopped.wait(_PAUSE_S)
                _demand_no_loss(reader)
                self._read_aside(reader)
                for place in reader.heard:
                    self._post(place[1], reader.positions.get(place))
        except ProducerFailedError as error:
            self._loop.post(self._events.failed, error)
        except Exception as error:
            log.exception("tail_thread_failed")
            self._loop.post(self._events.failed, ProducerFailedError("tail", repr(error)))
        finally:
            if reader is not None:
                reader.close()

    def _change(self, reader: Reader) -> None:
        topic = self._config.half_topic
        while self._changes:
            shard, offset = self._changes.popleft()
            reader.remove([(topic, shard)])
            self._batch.pop(shard, None)
            if offset is not None:
                reader.add({(topic, shard): offset})

    def _handle(self, place: Place, message: Message) -> None:
        offset = message.offset()
        if offset is not None and not self._has_applied(place[1], offset, message.key()):
            self._aside.append((place[1], offset, message))

    def _read_aside(self, reader: Reader) -> None:
        """Decode what is not applied; most are this instance's own, and their acknowledgement is on its way."""
        aside, self._aside = self._aside, []
        if aside:
            self._stopped.wait(_ASIDE_S)
        for shard, offset, message in aside:
            place = (self._config.half_topic, shard)
            if place not in reader.positions or self._has_applied(shard, offset, message.key()):
                continue
            try:
                self._decode(shard, offset, message)
            except NewerReleaseError as error:
                log.error("newer_release_found", shard=shard, error=str(error), remedy=error.remedy)  # noqa: TRY400 - the error says it all
                reader.remove([place])
                self._batch.pop(shard, None)
                self._loop.post(self._events.newer, shard)

    def _decode(self, shard: int, offset: int, message: Message) -> None:
        try:
            if message.key() == BARRIER_KEY:
                if barrier_in(message).incarnation != self._incarnation:
                    self._loop.post(self._events.foreign_barrier, shard)
            else:
                self._batch.setdefault(shard, []).append((offset, *half_in(message, self._config.shards)))
        except UndecodableError as error:
            demand_no_newer(message, error, self._config.skip_records)
            note_skipped(message, error, self._skipped)
            name = overwritten_id(message, self._config.shards, self._config.skip_records)
            if name is not None:
                self._batch.setdefault(shard, []).append((offset, name, FOREIGN))

    def _post(self, shard: int, position: int | None) -> None:
        records = self._batch.pop(shard, [])
        if position is None:
            return
        while not self._room.acquire(timeout=_POLL_S):
            if self._stopped.is_set():
                return
        self._loop.post(self._appended, shard, records, position)

    def _appended(self, shard: int, records: Records, position: int) -> None:
        self._room.release()
        self._events.appended(shard, records, position)


def _demand_no_loss(reader: Reader) -> None:
    """Raise ProducerFailedError if a partition ends before what was read of it: its owner must compare its fold."""
    for topic, shard in reader.went_back:
        raise ProducerFailedError("log", f"{topic}[{shard}] has lost its end")
