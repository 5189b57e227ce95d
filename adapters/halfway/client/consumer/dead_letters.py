"""Dead letters: messages that could not be processed go to their own topic, with their origin and the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, Message, Producer

from halfway.client.consumer.foreign_errors import described
from halfway.client.consumer.record import Record
from halfway.client.consumer.settings import connection_settings

Delivered = Callable[[str | None], None]
"""Called with None if the dead letter was delivered, and otherwise with the error."""

_DELIVERY_TIMEOUT_S: Final = 30
_MAX_BYTES: Final = 1_000_000_000
_MAX_REASON_CHARACTERS: Final = 1000


class DeadLetters:
    """Writes dead letters to one topic.

    A dead letter has the key, value and headers of its message, and the headers `dead-letter-…`. If it is produced
    unchanged to the original topic, it is processed again. If it fails again, its new headers replace the old ones.
    """

    def __init__(self, settings: Mapping[str, Any], topic: str, group: str) -> None:
        """Take librdkafka's settings, the topic, and the consumer group that writes the dead letters."""
        self._topic = topic
        self._group = group
        self._producer = Producer(
            {
                **connection_settings(settings),
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": 0,
                "message.timeout.ms": _DELIVERY_TIMEOUT_S * 1000,
                "message.max.bytes": _MAX_BYTES,  # the topic's limit applies
                "partitioner": "murmur2_random",
            }
        )

    def send(self, record: Record, reason: str, attempts: int, delivered: Delivered) -> None:
        """Send a dead letter. A later `poll` or `close` calls `delivered`; if it cannot be sent at all, this does."""

        def on_delivery(error: KafkaError | None, _: Message) -> None:
            delivered(None if error is None else error.str())

        own = {
            "dead-letter-topic": record.topic,
            "dead-letter-partition": str(record.partition),
            "dead-letter-offset": str(record.offset),
            "dead-letter-group": self._group,
            "dead-letter-attempts": str(attempts),
            "dead-letter-reason": reason[:_MAX_REASON_CHARACTERS],
        }
        headers: list[tuple[str, str | bytes | None]] = [
            *(header for header in record.headers if header[0] not in own),
            *own.items(),
        ]
        try:
            self._producer.produce(
                self._topic, key=record.key, value=record.value, headers=headers, on_delivery=on_delivery
            )
        except Exception as error:  # noqa: BLE001 - of whatever others wrote into the record: it is tried again
            delivered(described(error))

    def poll(self) -> None:
        """Call the delivery callbacks that are due."""
        self._producer.poll(0)

    def close(self) -> None:
        """Wait until all sent dead letters are delivered or have failed."""
        self._producer.flush(_DELIVERY_TIMEOUT_S)
        self._producer.close()
