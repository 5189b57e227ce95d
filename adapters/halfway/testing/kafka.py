"""The coordinator over a Kafka broker, its own or one that runs already."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final
from uuid import uuid4

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined] # public, but not for mypy
from pydantic import SecretStr

from halfway.client.consumer import Record
from halfway.runtime.backend import running
from halfway.service.coordinator import Coordinator
from halfway.testing.server import Server, ServerError

_ANSWER_S: Final = 30.0
_LOOK_EVERY_S: Final = 0.05


class KafkaServer(Server):
    """The coordinator over a real broker, one that is given or an embedded one.

    The embedded one needs the extra `embedded`, and takes some seconds to start.
    """

    def __init__(self, bootstrap_servers: str | None = None) -> None:
        """Start nothing yet. On a broker that is given, internal topics with names of their own stay behind."""
        super().__init__()
        self.bootstrap_servers = bootstrap_servers or ""

    def create_topic(self, name: str, *, partitions: int = 3) -> None:
        """Create a real topic; raises ServerError if it exists."""
        admin = AdminClient(self._client)
        (made,) = admin.create_topics([NewTopic(name, num_partitions=partitions)], operation_timeout=_ANSWER_S).values()
        try:
            made.result(_ANSWER_S)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
            raise ServerError(f"the topic {name} exists: give another name, or use new_topic") from None
        deadline = time.monotonic() + _ANSWER_S
        while name not in admin.list_topics(timeout=_ANSWER_S).topics and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)

    def records(self, topic: str) -> Sequence[Record]:
        """Return what a `read_committed` consumer sees of a topic now, by partition and offset."""
        reader = Consumer(
            {**self._client, "group.id": uuid4().hex, "enable.auto.commit": False, "enable.partition.eof": True}
        )
        try:
            return sorted(_read(reader, topic, self._ends(topic)), key=lambda one: (one.partition, one.offset))
        finally:
            reader.close()

    @property
    def _client(self) -> dict[str, Any]:
        return {"bootstrap.servers": self.bootstrap_servers}

    def _ends(self, topic: str) -> Mapping[int, int]:
        """Return where the partitions end. What has committed a moment ago lies before it, and may not be shown yet."""
        asking = Consumer({**self._client, "group.id": uuid4().hex, "isolation.level": "read_uncommitted"})
        try:
            partitions = asking.list_topics(timeout=_ANSWER_S).topics.get(topic)
            if partitions is None:
                raise ServerError(f"the topic {topic} does not exist: create it with create_topic")
            return {
                number: asking.get_watermark_offsets(TopicPartition(topic, number), timeout=_ANSWER_S)[1]
                for number in partitions.partitions
            }
        finally:
            asking.close()

    async def _coordinator(self, stack: AsyncExitStack) -> Coordinator:
        if not self.bootstrap_servers:
            from halfway.embedded import SHORT_LIVED, EmbeddedConfig, EmbeddedKafka

            broker = EmbeddedKafka(EmbeddedConfig(jvm_options=SHORT_LIVED))
            await asyncio.to_thread(broker.__enter__)
            stack.push_async_callback(asyncio.to_thread, broker.__exit__, None, None, None)
            self.bootstrap_servers = broker.bootstrap_servers
        kafka = {"bootstrap.servers": SecretStr(self.bootstrap_servers)}
        settings = self._settings.model_copy(update={"kafka": kafka})
        config = settings.kafka_config(f"http://{self._settings.kafka_prefix.strip('._')}.invalid")
        backend = await stack.enter_async_context(running(settings, config, self._metrics))
        while backend.not_ready():
            backend.demand_permission()
            await asyncio.sleep(_LOOK_EVERY_S)
        return backend.coordinator


def _read(reader: Consumer, topic: str, ends: Mapping[int, int]) -> list[Record]:
    found: list[Record] = []
    waiting = {number for number, end in ends.items() if end > 0}
    reader.assign([TopicPartition(topic, number, 0) for number in waiting])
    deadline = time.monotonic() + _ANSWER_S
    while waiting:
        if time.monotonic() > deadline:
            raise ServerError(f"partitions {sorted(waiting)} of {topic} could not be read in {_ANSWER_S:g} s")
        for message in reader.consume(500, timeout=0.1):
            error = message.error()
            if error is None:
                found.append(Record.of(message))
            elif error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - the library names it so
                raise KafkaException(error)
            elif (message.offset() or 0) >= ends[number := message.partition() or 0]:
                waiting.discard(number)
    return found
