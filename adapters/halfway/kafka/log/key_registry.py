"""The port `KeyStore`: the keys, read back from `<prefix>keys`."""

from __future__ import annotations

from confluent_kafka import Message

from halfway.domain.errors import KafkaUnavailableError, RetryableError
from halfway.domain.keys import Key, KeyTable
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.log.appender import RecordWriter
from halfway.kafka.log.compacted_table import CompactedTable
from halfway.kafka.records.codec import KIND_KEY, Headers, encode_key, record_headers
from halfway.kafka.records.validation import key_in
from halfway.service.ports import Observer


class KafkaKeys(CompactedTable[Key]):
    """The keys by public id. A record contains a keyed hash, never the key itself."""

    not_read_event = "keys_not_read"

    def __init__(self, config: KafkaConfig, observer: Observer) -> None:
        """Keep the configuration; nothing connects before `start`."""
        super().__init__(config, "keys", observer)
        self._table = KeyTable()
        self._writer = RecordWriter(config, name="keys")

    @property
    def table(self) -> KeyTable:
        """The keys that were read so far."""
        return self._table

    async def start(self, *, deadline: float) -> None:
        """Start the writer, then the table."""
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
