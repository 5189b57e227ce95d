"""The port `KeyStore`: the keys, read back from `<prefix>keys`."""

from __future__ import annotations

from confluent_kafka import Message

from halfway.domain.keys import Key, KeyTable
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.log.compacted_table import CompactedTable
from halfway.kafka.records.codec import KIND_KEY, encode_key, record_headers
from halfway.kafka.records.validation import key_in
from halfway.service.ports import Observer


class KafkaKeys(CompactedTable[Key]):
    """The keys by public id; each record is a keyed hash, never a key."""

    not_read_event = "keys_not_read"

    def __init__(self, config: KafkaConfig, observer: Observer) -> None:
        """Keep the configuration; nothing connects before `start`."""
        super().__init__(config, "keys", observer)
        self._table = KeyTable()

    @property
    def table(self) -> KeyTable:
        """What is known of the log."""
        return self._table

    async def put(self, key: Key, *, deadline: float) -> None:
        """Write a key and return once it is read back; KafkaUnavailableError past the deadline."""
        headers = record_headers(KIND_KEY, key.principal.group or "", "created")
        await self._write(key.id, encode_key(key), headers, deadline=deadline)

    async def delete(self, key_id: str, *, deadline: float) -> None:
        """Remove a key and return once the removal is read back; KafkaUnavailableError past the deadline."""
        await self._write(key_id, None, record_headers(KIND_KEY, "", "revoked"), deadline=deadline)

    def _decode(self, message: Message) -> tuple[str, Key | None]:
        return key_in(message)

    def _changed(self, name: str, value: Key | None) -> None:
        self._table.apply(name, value)
