"""The departments: each consumes one topic, and processes each order once in its database."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from sqlite3 import Connection

from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from halfway.client.consumer import Consumer, Inbox, Record, Retries

Begin = Callable[[], AbstractContextManager[Connection]]

RETRIES = Retries(attempts=3, first_pause_s=0.05, max_pause_s=0.2)
TIMEOUT_S = 30.0


class Department(threading.Thread):
    """Consumes one topic on its own thread. A message that it cannot process becomes a dead letter."""

    def __init__(self, bootstrap_servers: str, topic: str, begin: Begin, dead_letter_topic: str) -> None:
        """Take a connection factory of the departments' database. `start()` connects to Kafka."""
        super().__init__(name=f"{topic}-department", daemon=True)
        self.topic = topic
        self.processed = 0
        self.error: Exception | None = None
        self._begin = begin
        inbox = Inbox("sqlite", begin, retention_s=None)
        inbox.create()
        with begin() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS effects (topic, order_id)")
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap_servers},
            group=self.name,
            topics=[topic],
            handle=self.process,
            inbox=inbox,
            retries=RETRIES,
            dead_letter_topic=dead_letter_topic,
        )

    def process(self, record: Record, connection: Connection) -> None:
        """Do the department's work, for which it needs its part of the order."""
        order = record.json()
        if not order[self.topic]:
            raise ValueError(f"the order has no {self.topic}")
        connection.execute("INSERT INTO effects VALUES (?, ?)", (self.topic, order["order"]))
        self.processed += 1

    def run(self) -> None:
        """Consume until `stop()`. If an error ends the thread, it is stored in `error`."""
        try:
            self._consumer.run()
        except Exception as error:  # noqa: BLE001 - the main thread reads it
            self.error = error

    def stop(self) -> None:
        """End the thread and leave the consumer group."""
        self._consumer.stop()
        self.join()

    def effects(self) -> list[str]:
        """Return the orders that took effect, each as often as it did."""
        with self._begin() as connection:
            rows = connection.execute("SELECT order_id FROM effects WHERE topic = ?", (self.topic,))
            return [str(order) for (order,) in rows]


@dataclass(frozen=True, kw_only=True)
class TopicMessage:
    """One message of a topic."""

    order: str
    dead_letter_of: str
    """The original topic of a dead letter, empty for any other message."""


def read(bootstrap_servers: str, topic: str) -> list[TopicMessage]:
    """Return the messages that a `read_committed` consumer sees in a topic."""
    settings = {"bootstrap.servers": bootstrap_servers, "group.id": "readers", "enable.auto.commit": False}
    consumer = KafkaConsumer({**settings, "isolation.level": "read_committed", "enable.partition.eof": True})
    messages = []
    try:
        unfinished = set(consumer.list_topics(topic, timeout=TIMEOUT_S).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, partition, 0) for partition in unfinished])
        deadline = time.monotonic() + TIMEOUT_S
        while unfinished:
            if time.monotonic() > deadline:
                raise TimeoutError(f"partitions {sorted(unfinished)} of {topic} cannot be read to their ends")
            for message in consumer.consume(500, timeout=0.1):
                error = message.error()
                if error is None:
                    record = Record.of(message)
                    order = json.loads(record.value or b"{}")["order"]
                    original_topic = record.header("dead-letter-topic") or b""
                    messages.append(TopicMessage(order=order, dead_letter_of=original_topic.decode()))
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the library's name
                    unfinished.discard(message.partition() or 0)
                elif not error.retriable():
                    raise KafkaException(error)
    finally:
        consumer.close()
    return messages
