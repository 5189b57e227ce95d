"""The departments: each consumes one topic, and what it makes of an order stands in its database once."""

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
ASK_WITHIN_S = 30.0


class Department(threading.Thread):
    """Consumes one topic on a thread of its own; a message that it cannot digest becomes a dead letter."""

    def __init__(self, bootstrap_servers: str, topic: str, begin: Begin, dead_letter_topic: str) -> None:
        """Take what connects to the departments' database; `start()` connects to Kafka."""
        super().__init__(name=f"{topic}-department", daemon=True)
        self.topic = topic
        self.digested = 0
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
            handle=self.digest,
            inbox=inbox,
            retries=RETRIES,
            dead_letter_topic=dead_letter_topic,
        )

    def digest(self, record: Record, connection: Connection) -> None:
        """Do the department's work; it needs its part of the order."""
        order = record.json()
        if not order[self.topic]:
            raise ValueError(f"the order has no {self.topic}")
        connection.execute("INSERT INTO effects VALUES (?, ?)", (self.topic, order["order"]))
        self.digested += 1

    def run(self) -> None:
        """Consume until `stop()`; an error that ends it stands in `error`."""
        try:
            self._consumer.run()
        except Exception as error:  # noqa: BLE001 - the thread has nobody above it
            self.error = error

    def stop(self) -> None:
        """End the thread and leave the consumer group."""
        self._consumer.stop()
        self.join()

    def effects(self) -> list[str]:
        """Return the orders that took effect, as often as they did."""
        with self._begin() as connection:
            rows = connection.execute("SELECT order_id FROM effects WHERE topic = ?", (self.topic,))
            return [str(order) for (order,) in rows]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One message as it stands in a topic."""

    order: str
    dead_letter_of: str
    """The topic that it was set aside from, empty if it is no dead letter."""


def read(bootstrap_servers: str, topic: str) -> list[Seen]:
    """Return what stands in a topic, as a consumer of committed records sees it."""
    settings = {"bootstrap.servers": bootstrap_servers, "group.id": "readers", "enable.auto.commit": False}
    consumer = KafkaConsumer({**settings, "isolation.level": "read_committed", "enable.partition.eof": True})
    found = []
    try:
        waiting = set(consumer.list_topics(topic, timeout=ASK_WITHIN_S).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, partition, 0) for partition in waiting])
        deadline = time.monotonic() + ASK_WITHIN_S
        while waiting:
            if time.monotonic() > deadline:
                raise TimeoutError(f"partitions {sorted(waiting)} of {topic} cannot be read to their ends")
            for message in consumer.consume(500, timeout=0.1):
                error = message.error()
                if error is None:
                    record = Record.of(message)
                    of = record.header("dead-letter-topic") or b""
                    found.append(Seen(order=json.loads(record.value or b"{}")["order"], dead_letter_of=of.decode()))
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the library names it so
                    waiting.discard(message.partition() or 0)
                elif not error.retriable():
                    raise KafkaException(error)
    finally:
        consumer.close()
    return found
