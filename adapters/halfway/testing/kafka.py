"""A coordinator on a Kafka broker: an embedded one, or one that is already running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined] # public, but not for mypy
from pydantic import SecretStr

from halfway.app.serve.backend import running_backend
from halfway.client.consumer import Record
from halfway.coordinator.coordinator import Coordinator
from halfway.kafka.clients.config import MIB, KafkaConfig
from halfway.kafka.clients.reader import Reader, ends
from halfway.testing.server import Server, ServerError

_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.05


class KafkaServer(Server):
    """A coordinator on a real broker: the given one, or an embedded one.

    The embedded broker needs the extra `embedded`, and takes some seconds to start.
    """

    def __init__(self, bootstrap_servers: str | None = None) -> None:
        """Take the broker. Nothing is started yet. On a given broker, internal topics with unique names remain."""
        super().__init__()
        self.bootstrap_servers = bootstrap_servers or ""

    def create_topic(self, name: str, *, partitions: int = 3) -> None:
        """Create a real topic; raises ServerError if it exists."""
        admin = AdminClient(self._client)
        new_topic = NewTopic(name, num_partitions=partitions)
        (future,) = admin.create_topics([new_topic], operation_timeout=_TIMEOUT_S).values()
        try:
            future.result(_TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
            raise ServerError(f"the topic {name} exists: give another name, or use new_topic") from None
        deadline = time.monotonic() + _TIMEOUT_S
        while name not in admin.list_topics(timeout=_TIMEOUT_S).topics and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def records(self, topic: str) -> Sequence[Record]:
        """Return the records that a `read_committed` consumer sees in a topic now, by partition and offset."""
        config = KafkaConfig(properties={"bootstrap.servers": self.bootstrap_servers}, max_prepare_bytes=MIB)
        records: list[Record] = []
        deadline = time.monotonic() + _TIMEOUT_S

        def check() -> None:
            if time.monotonic() > deadline:
                raise ServerError(f"{topic} could not be read to its end in {_TIMEOUT_S:g} s")

        try:
            with Reader(config) as reader:
                places = reader.places(topic, _TIMEOUT_S)
                # These include records that were just committed and are not visible yet.
                targets = ends(AdminClient(config.admin()), places, check)
                reader.add(dict.fromkeys(places, 0))
                while not reader.read_until(
                    targets, time.monotonic() + _POLL_S, lambda _, message: records.append(Record.of(message))
                ):
                    check()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
            raise ServerError(f"the topic {topic} does not exist: create it with create_topic") from None
        return sorted(records, key=lambda record: (record.partition, record.offset))

    @property
    def _client(self) -> dict[str, Any]:
        return {"bootstrap.servers": self.bootstrap_servers}

    async def _coordinator(self, stack: AsyncExitStack) -> Coordinator:
        if not self.bootstrap_servers:
            from halfway.embedded import SHORT_LIVED, EmbeddedConfig, EmbeddedKafka

            broker = EmbeddedKafka(EmbeddedConfig(jvm_options=SHORT_LIVED))
            await asyncio.to_thread(broker.__enter__)
            self._broker.push_async_callback(asyncio.to_thread, broker.__exit__, None, None, None)
            self.bootstrap_servers = broker.bootstrap_servers
        kafka = {"bootstrap.servers": SecretStr(self.bootstrap_servers)}
        settings = self._settings.model_copy(update={"kafka": kafka})
        config = settings.kafka_config(f"http://{self._settings.kafka_prefix.strip('._')}.invalid")
        backend = await stack.enter_async_context(running_backend(settings, config, self._metrics))
        while backend.readiness.reason() is not None:
            backend.demand_permission()
            await asyncio.sleep(_POLL_S)
        return backend.coordinator
