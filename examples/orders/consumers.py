"""What a consumer of one topic does: reads what is committed, tries a message a few times, then sets it aside.

halfway writes each committed message once. A consumer that is stopped between its work and the commit of its offset
still reads that message again, as with any Kafka topic: work that must not be done twice needs a key of its own.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

Handler = Callable[[bytes], None]
Headers = list[tuple[str, str | bytes | None]]

DELIVER_WITHIN_S = 30.0
ASK_WITHIN_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One message as it was read."""

    key: str
    partition: int
    offset: int
    transaction_id: str
    dead_letter_of: str
    """The topic it was set aside from, empty where it is no dead letter."""


class TopicConsumer(threading.Thread):
    """Consumes one topic on a thread of its own; `stop()` ends it.

    A message whose handler raises is tried `attempts` times, then it goes to `dead_letter_topic` with its key, value
    and headers, and with where it came from and why in headers `dead-letter-…`. Only then is its offset committed.
    """

    def __init__(
        self,
        *,
        bootstrap_servers: str,
        topic: str,
        group: str,
        handle: Handler,
        dead_letter_topic: str | None = None,
        attempts: int = 3,
        backoff_s: float = 0.05,
    ) -> None:
        """Keep the settings; `start()` connects. Without a dead-letter topic a handler must not raise."""
        super().__init__(name=f"consumer-{topic}", daemon=True)
        self.topic = topic
        self.seen: list[Seen] = []
        self.set_aside: list[Seen] = []
        self.error: Exception | None = None
        self._handle = handle
        self._dead_letter_topic = dead_letter_topic
        self._attempts = attempts
        self._backoff_s = backoff_s
        self._ends: dict[int, int] = {}
        self._stopping = threading.Event()
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap_servers,
                "group.id": group,
                # Messages of Kafka transactions that were aborted, or are still open, stay out of sight.
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
            }
        )
        self._producer = Producer({"bootstrap.servers": bootstrap_servers, "enable.idempotence": True, "acks": "all"})

    def run(self) -> None:
        """Consume until `stop()`; an error that ends it stands in `error`."""
        try:
            self._consumer.subscribe([self.topic])
            while not self._stopping.is_set():
                self._take(self._consumer.consume(100, timeout=0.2))
        except Exception as error:  # noqa: BLE001 - the thread has nobody above it
            self.error = error
        finally:
            self._consumer.close()
            self._producer.close()

    def stop(self) -> None:
        """End the thread and leave the consumer group."""
        self._stopping.set()
        self.join()

    def has_read(self, ends: Mapping[int, int]) -> bool:
        """Whether every partition was read as far as these end offsets."""
        return all(self._ends.get(partition, 0) >= end for partition, end in ends.items() if end > 0)

    def _take(self, messages: list[Message]) -> None:
        worked = False
        for message in messages:
            error = message.error()
            if error is None:
                self._work(message)
                worked = True
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the library names it so
                # Not the position of the last message: the records that end transactions lie behind it.
                self._ends[message.partition() or 0] = message.offset() or 0
            elif not error.retriable() and error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise KafkaException(error)
        if worked:
            self._consumer.commit(asynchronous=False)

    def _work(self, message: Message) -> None:
        seen = _seen(message)
        self.seen.append(seen)
        for attempt in range(1, self._attempts + 1):
            try:
                self._handle(_bytes(message.value()))
            except Exception as error:
                if attempt == self._attempts:
                    if self._dead_letter_topic is None:
                        raise
                    self._put_aside(message, self._dead_letter_topic, error)
                    self.set_aside.append(seen)
                else:
                    time.sleep(self._backoff_s * 2 ** (attempt - 1))
            else:
                return

    def _put_aside(self, message: Message, dead_letter_topic: str, reason: Exception) -> None:
        headers: Headers = [
            *(message.headers() or []),
            ("dead-letter-topic", self.topic),
            ("dead-letter-partition", str(message.partition())),
            ("dead-letter-offset", str(message.offset())),
            ("dead-letter-attempts", str(self._attempts)),
            ("dead-letter-reason", f"{type(reason).__name__}: {reason}"[:1000]),
        ]
        failures: list[KafkaError] = []
        self._producer.produce(
            dead_letter_topic,
            key=message.key(),
            value=message.value(),
            headers=headers,
            on_delivery=lambda error, _: failures.append(error) if error is not None else None,
        )
        # Without the dead letter on disk the message must not count as done.
        if self._producer.flush(DELIVER_WITHIN_S) or failures:
            raise KafkaException(failures[0] if failures else KafkaError(KafkaError._TIMED_OUT))  # noqa: SLF001


def topic_ends(bootstrap_servers: str, topic: str) -> Mapping[int, int]:
    """Return the end offset of each partition, unfinished Kafka transactions included."""
    # Under read_committed the broker would give the end of what is committed, which can still grow.
    asking = {"bootstrap.servers": bootstrap_servers, "group.id": "ends", "isolation.level": "read_uncommitted"}
    consumer = Consumer(asking)
    try:
        partitions = consumer.list_topics(topic, timeout=ASK_WITHIN_S).topics[topic].partitions
        return {
            number: consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=ASK_WITHIN_S)[1]
            for number in partitions
        }
    finally:
        consumer.close()


def header(message: Message, name: str) -> str:
    """Return the last value of a header as text, empty where there is none."""
    value = dict(message.headers() or []).get(name)
    return _bytes(value).decode()


def _seen(message: Message) -> Seen:
    return Seen(
        key=_bytes(message.key()).decode(),
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        transaction_id=header(message, "halfway-transaction-id"),
        dead_letter_of=header(message, "dead-letter-topic"),
    )


def _bytes(data: str | bytes | None) -> bytes:
    return data.encode() if isinstance(data, str) else data or b""
