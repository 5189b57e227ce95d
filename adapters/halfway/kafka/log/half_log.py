"""The port `HalfLog`: appends first prepares, reads payloads back, returns the end offset of half[s].

See docs/protocol.md#prepare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from confluent_kafka import Producer

from halfway.domain.errors import MessageTooLargeError
from halfway.domain.records import Half, Parked
from halfway.domain.transaction import State
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.log.appender import MakeProducer, Record, RecordWriter
from halfway.kafka.log.end_offsets import PartitionEnds
from halfway.kafka.log.offset_reader import RecordReader
from halfway.kafka.records.codec import decode_half, decode_parked, encode_half, half_headers
from halfway.service.ports import Appended, Observer

T = TypeVar("T")

_PREPARED: Final = State.PREPARED.value


class KafkaHalfLog:
    """First prepares in `<prefix>half`, and the records of half and parked by their offsets."""

    def __init__(self, config: KafkaConfig, observer: Observer, *, make_producer: MakeProducer = Producer) -> None:
        """Keep the configuration; nothing connects before `start`."""
        self._config = config
        self._topic = config.half_topic
        self._most_bytes = config.half_record_bytes
        self._parked_topic = config.parked_topic
        self.on_lost_sequence: Callable[[str], None] = lambda _: None
        """Called if half has lost records that this instance has written."""
        self._writer = RecordWriter(
            config,
            name="half",
            linger_ms=config.half_linger_ms,
            make_producer=make_producer,
            on_lost_sequence=self._lost_sequence,
        )
        self._reader = RecordReader(config, observer)
        self._ends = PartitionEnds(config, config.half_topic)

    async def start(self) -> None:
        """Start the threads; the topics must exist."""
        self._writer.start()
        self._reader.start()

    async def stop(self) -> None:
        """Wait up to the prepare time-out for the records in flight, then end the threads."""
        await self._writer.stop()
        await self._reader.stop()
        await self._ends.stop()

    def _lost_sequence(self, reason: str) -> None:
        self.on_lost_sequence(reason)

    @property
    def trouble(self) -> str | None:
        """Why this instance can store no prepare, None if it can; not whether Kafka answers."""
        return self._writer.trouble

    def append(self, shard: int, halves: Sequence[tuple[Half, T]], appended: Appended[T], *, deadline: float) -> None:
        """Append half records with acks=all, and pass their offsets or errors to `appended`; the port lists them."""
        records: list[Record[T]] = []
        refused: list[tuple[T, int | Exception]] = []
        for half, token in halves:
            try:
                key, value = self._encoded(half)
            except Exception as error:  # noqa: BLE001 - whatever it is, its caller gets it
                refused.append((token, error))
            else:
                records.append((key, value, half_headers(half, _PREPARED), token))
        if refused:
            appended(refused)
        self._writer.append(self._topic, shard, records, appended, deadline=deadline)

    def _encoded(self, half: Half) -> tuple[bytes, bytes]:
        if len(half.messages) > self._config.max_messages:
            raise MessageTooLargeError(
                f"the transaction has {len(half.messages)} messages, {self._config.max_messages} at most "
                "(HALFWAY_MAX_MESSAGES): its op marker could be larger than its topic takes; send fewer messages"
            )
        key, value = half.id.encode(), encode_half(half)
        if len(key) + len(value) > self._most_bytes:
            raise MessageTooLargeError(
                f"the transaction takes {len(value)} bytes as a record, {self._most_bytes} at most: "
                "send fewer or smaller messages"
            )
        return key, value

    async def read_half(self, shard: int, offset: int, transaction_id: str, *, deadline: float) -> Half:
        """Read the half record at an offset and verify its key; the port lists the errors."""
        return await self._reader.read(
            (self._topic, shard), offset, transaction_id.encode(), decode_half, deadline=deadline
        )

    async def read_parked(self, shard: int, offset: int, transaction_id: str, *, deadline: float) -> Parked:
        """Read the parked record at an offset and verify its key; the port lists the errors."""
        return await self._reader.read(
            (self._parked_topic, shard), offset, transaction_id.encode(), decode_parked, deadline=deadline
        )

    async def half_end(self, shard: int, *, deadline: float) -> int:
        """Return the end offset of half[s] under `read_uncommitted`; KafkaUnavailableError past the deadline."""
        return await self._ends.end(shard, deadline=deadline)
