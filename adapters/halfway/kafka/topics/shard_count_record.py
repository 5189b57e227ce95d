"""The record in owners with the number of shards that the topics were created for (docs/protocol.md#topics)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import structlog
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from halfway.domain.errors import ConfigurationError, KafkaUnavailableError
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.records.codec import (
    KIND_LAYOUT,
    LAYOUT_KEY,
    LAYOUT_PARTITION,
    Layout,
    UndecodableError,
    decode_layout,
    encode_layout,
    record_headers,
)
from halfway.kafka.records.validation import Count, note_skipped

log = structlog.get_logger(__name__)

_POLL_S: Final = 0.1
_FLUSH_S: Final = 0.5
_MIN_S: Final = 0.5
_EOF: Final = KafkaError._PARTITION_EOF  # noqa: SLF001 - the names of librdkafka's own errors start so


class ShardCountRecord:
    """Reads, verifies and writes the record; blocks at most until `deadline`, on `time.monotonic()`."""

    def __init__(self, config: KafkaConfig, skipped: Count, deadline: float, check: Callable[[], None]) -> None:
        """Keep the parts; `check` raises if the call was cancelled."""
        self._config = config
        self._skipped = skipped
        self._deadline = deadline
        self._check = check

    def verify(self, layout: Layout) -> None:
        """Raise ConfigurationError if the topics were created for another number of shards."""
        if layout.shards != self._config.shards:
            raise ConfigurationError(
                f"HALFWAY_SHARDS is {self._config.shards}, but the topics {self._config.prefix}* were created for "
                f"{layout.shards} shards, over which ids are hashed: set HALFWAY_SHARDS={layout.shards}, "
                "or use another HALFWAY_KAFKA_PREFIX"
            )

    def read(self) -> tuple[Layout | None, bool]:
        """Return the record in partition 0 of owners, and whether another record has overwritten it.

        Compaction removes an overwritten record, so it must be written again. The layout is None if there is no record.

        Raises:
            ConfigurationError: there is a record, and it cannot be decoded.
            KafkaUnavailableError: owners could not be read to its end in time.

        """
        consumer = Consumer(
            self._config.consumer(
                **{
                    "enable.partition.eof": True,
                    "isolation.level": "read_uncommitted",
                    # The end of the partition is reported after an empty fetch, which takes this long.
                    "fetch.wait.max.ms": 10,
                }
            )
        )
        layout: Layout | None = None
        refused: UndecodableError | None = None
        try:
            consumer.assign([TopicPartition(self._config.owners_topic, LAYOUT_PARTITION, 0)])
            while time.monotonic() < self._deadline:
                self._check()
                message = consumer.poll(_POLL_S)
                if message is None:
                    continue
                error = message.error()
                if error is not None and error.code() == _EOF:
                    if layout is None and refused is not None:
                        raise self._undecodable_error(refused)
                    return layout, refused is not None
                if error is None and message.key() == LAYOUT_KEY:
                    try:
                        layout, refused = decode_layout(message.value()), None
                    except UndecodableError as undecodable:
                        refused = undecodable
                        note_skipped(message, undecodable, self._skipped)
        finally:
            consumer.close()
        raise KafkaUnavailableError(f"{self._config.owners_topic} could not be read in time")

    def write(self, overwritten: Layout | None = None) -> None:
        """Write the record from the current settings, or write the `overwritten` record again.

        Raises:
            KafkaUnavailableError: Kafka did not confirm it in time.

        """
        failures: list[KafkaError | None] = []
        producer = Producer(self._config.producer(**{"message.timeout.ms": round(self._left() * 1000)}))
        layout = overwritten or Layout(shards=self._config.shards, created_at=time.time_ns() // 1_000_000)
        producer.produce(
            self._config.owners_topic,
            encode_layout(layout),
            LAYOUT_KEY,
            LAYOUT_PARTITION,
            on_delivery=lambda error, _message: failures.append(error),
            headers=record_headers(KIND_LAYOUT, "", "created"),
        )
        until = time.monotonic() + self._left()
        while producer.flush(_FLUSH_S) and time.monotonic() < until:
            self._check()
        if not failures or failures[0] is not None:
            reason = failures[0].str() if failures and failures[0] else "no answer in time"
            raise KafkaUnavailableError(f"the layout could not be written to {self._config.owners_topic}: {reason}")
        log.info("layout_written", topic=self._config.owners_topic, shards=layout.shards)

    def _left(self) -> float:
        return max(_MIN_S, self._deadline - time.monotonic())

    def _undecodable_error(self, error: UndecodableError) -> ConfigurationError:
        return ConfigurationError(
            f"the layout record of {self._config.owners_topic} cannot be read ({error}): this prefix belongs to "
            f"something else, or to a later release. If neither is the case, make sure that no instance runs and "
            f"delete {self._config.owners_topic}"
        )
