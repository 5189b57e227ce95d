"""The demo's consumer on a real broker: bounded tries, then a dead letter."""

import json
import time
from collections import Counter
from collections.abc import Callable
from uuid import uuid4

import pytest
from confluent_kafka import Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # public, but not for mypy

from examples.orders.consumers import TopicConsumer, topic_ends
from tests.support.brokers.fixtures import Kafka

GENEROUS_S = 60.0


@pytest.fixture
def topics(kafka: Kafka) -> tuple[str, str]:
    """Give a topic and one for its dead letters."""
    names = (f"work-{uuid4().hex[:8]}", f"dead-{uuid4().hex[:8]}")
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    for made in admin.create_topics([NewTopic(name, num_partitions=2) for name in names]).values():
        made.result(GENEROUS_S)
    return names


def read_all(kafka: Kafka, consumer: TopicConsumer) -> None:
    """Wait until the consumer has come to the real end of its topic."""
    ends = topic_ends(kafka.bootstrap_servers, consumer.topic)
    deadline = time.monotonic() + GENEROUS_S
    while not consumer.has_read(ends):
        assert consumer.error is None
        assert time.monotonic() < deadline, f"not at {ends}"
        time.sleep(0.02)


def consume(kafka: Kafka, topic: str, handle: Callable[[bytes], None], dead: str | None, group: str) -> TopicConsumer:
    consumer = TopicConsumer(
        bootstrap_servers=kafka.bootstrap_servers,
        topic=topic,
        group=group,
        handle=handle,
        dead_letter_topic=dead,
        backoff_s=0.001,
    )
    consumer.start()
    try:
        read_all(kafka, consumer)
    finally:
        consumer.stop()
    return consumer


def produce(kafka: Kafka, topic: str, keys: list[str], *, commit: bool = True) -> None:
    """Write messages in one Kafka transaction, and commit or abort it."""
    settings = {"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": uuid4().hex}
    producer = Producer(settings)
    producer.init_transactions(GENEROUS_S)
    producer.begin_transaction()
    for key in keys:
        producer.produce(topic, key=key, value=json.dumps({"key": key}), headers=[("mark", key.encode())])
    producer.flush(GENEROUS_S)
    if commit:
        producer.commit_transaction(GENEROUS_S)
    else:
        producer.abort_transaction(GENEROUS_S)


def test_a_message_that_cannot_be_digested_is_set_aside_after_its_tries(kafka: Kafka, topics: tuple[str, str]) -> None:
    """Three tries, one dead letter that tells where it came from and why; the others go on, and none comes again."""
    topic, dead = topics
    produce(kafka, topic, ["good-1", "poison", "good-2"])
    produce(kafka, topic, ["aborted"], commit=False)
    tries: Counter[str] = Counter()

    def handle(value: bytes) -> None:
        key = json.loads(value)["key"]
        tries[key] += 1
        if key == "poison":
            raise ValueError("no such parcel")

    group = f"department-{uuid4().hex[:8]}"
    consumer = consume(kafka, topic, handle, dead, group)
    assert tries == {"good-1": 1, "good-2": 1, "poison": 3}
    assert sorted(seen.key for seen in consumer.seen) == ["good-1", "good-2", "poison"]
    assert [seen.key for seen in consumer.set_aside] == ["poison"]

    letters: list[bytes] = []
    reader = consume(kafka, dead, letters.append, None, f"reader-{uuid4().hex[:8]}")
    assert [(seen.key, seen.dead_letter_of) for seen in reader.seen] == [("poison", topic)]
    assert [json.loads(letter) for letter in letters] == [{"key": "poison"}]

    produce(kafka, topic, ["good-3"])
    consume(kafka, topic, handle, dead, group)
    assert tries == {"good-1": 1, "good-2": 1, "good-3": 1, "poison": 3}


def test_a_dead_letter_has_the_message_whole_and_says_why(kafka: Kafka, topics: tuple[str, str]) -> None:
    """Value and headers stand as they were, with the reason behind them."""
    topic, dead = topics
    produce(kafka, topic, ["poison"])

    def handle(_: bytes) -> None:
        raise ValueError("no such parcel")

    letters: list[Message] = []

    class Reader(TopicConsumer):
        def _work(self, message: Message) -> None:
            letters.append(message)

    consume(kafka, topic, handle, dead, f"department-{uuid4().hex[:8]}")
    reader = Reader(bootstrap_servers=kafka.bootstrap_servers, topic=dead, group=uuid4().hex, handle=lambda _: None)
    reader.start()
    try:
        read_all(kafka, reader)
    finally:
        reader.stop()
    (letter,) = letters
    headers = dict(letter.headers() or [])
    assert (letter.key(), letter.value(), headers["mark"]) == (b"poison", b'{"key": "poison"}', b"poison")
    assert headers["dead-letter-topic"] == topic.encode()
    assert headers["dead-letter-attempts"] == b"3"
    assert headers["dead-letter-reason"] == b"ValueError: no such parcel"


def test_a_consumer_that_has_nowhere_to_put_a_message_stops_and_says_so(kafka: Kafka, topics: tuple[str, str]) -> None:
    """Without a dead-letter topic nothing is skipped: the error stands, and the offset stays where it was."""
    topic, _ = topics
    produce(kafka, topic, ["poison"])

    def handle(_: bytes) -> None:
        raise ValueError("no such parcel")

    group = f"department-{uuid4().hex[:8]}"
    stuck = TopicConsumer(
        bootstrap_servers=kafka.bootstrap_servers, topic=topic, group=group, handle=handle, backoff_s=0.001
    )
    stuck.start()
    stuck.join(GENEROUS_S)
    assert isinstance(stuck.error, ValueError)
    assert [seen.key for seen in consume(kafka, topic, lambda _: None, None, group).seen] == ["poison"]
