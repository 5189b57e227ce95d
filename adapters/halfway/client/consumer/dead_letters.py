"""Setting a message aside: it goes to a topic of its own, with where it came from and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from halfway.client.consumer.record import Record
from halfway.client.consumer.settings import connection_settings

Delivered = Callable[[str | None], None]
"""Called with None if the dead letter stands in its topic, else with what went wrong."""

_DELIVER_WITHIN_S: Final = 30
_MOST_BYTES: Final = 1_000_000_000
_REASON_CHARACTERS: Final = 1000


class DeadLetters:
    """Writes dead letters to one topic.

    A dead letter has the key, value and headers of its message, and headers `dead-letter-…`. If it is produced to the
    message's own topic again, as it stands, it is processed then.
    """

    def __init__(self, settings: Mapping[str, Any], topic: str, group: str) -> None:
        """Take librdkafka's settings, the topic, and the consumer group that sets messages aside."""
        self._topic = topic
        self._group = group
        self._producer = Producer(
            {
                **connection_settings(settings),
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": 0,
                "message.timeout.ms": _DELIVER_WITHIN_S * 1000,
                "message.max.bytes": _MOST_BYTES,  # the topic decides
                "partitioner": "murmur2_random",
            }
        )

    def send(self, record: Record, reason: BaseException, attempts: int, delivered: Delivered) -> None:
        """Send a dead letter; `delivered` is called by a later `poll` or `flush`."""

        def told(error: KafkaError | None, _: Message) -> None:
            delivered(None if error is None else error.str())

        headers: list[tuple[str, str | bytes | None]] = [
            *record.headers,
            ("dead-letter-topic", record.topic),
            ("dead-letter-partition", str(record.partition)),
            ("dead-letter-offset", str(record.offset)),
            ("dead-letter-group", self._group),
            ("dead-letter-attempts", str(attempts)),
            ("dead-letter-reason", f"{type(reason).__name__}: {reason}"[:_REASON_CHARACTERS]),
        ]
        try:
            self._producer.produce(self._topic, key=record.key, value=record.value, headers=headers, on_delivery=told)
        except (KafkaException, BufferError) as error:
            delivered(str(error))

    def poll(self) -> None:
        """Call what is due."""
        self._producer.poll(0)

    def close(self) -> None:
        """Wait until what was sent has been delivered or has failed."""
        self._producer.flush(_DELIVER_WITHIN_S)
        self._producer.close()
