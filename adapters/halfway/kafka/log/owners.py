"""The port `Owners`: the owner of each shard by the records in `<prefix>owners`. It is only a hint."""

from __future__ import annotations

import asyncio
import threading
from typing import Final

import structlog
from confluent_kafka import OFFSET_BEGINNING, KafkaException, Message

from halfway.domain.records import Owner
from halfway.domain.urls import base_url_refusal
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.loop import Loop
from halfway.kafka.log.partition_reader import PartitionReader, Place
from halfway.kafka.records.codec import UndecodableError
from halfway.kafka.records.validation import Count, is_layout, note_skipped, owner_in
from halfway.service.ports import OwnerHint

log = structlog.get_logger(__name__)

_POLL_S: Final = 0.2
_PAUSE_S: Final = 1.0
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
            reader = PartitionReader(self._config)
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
