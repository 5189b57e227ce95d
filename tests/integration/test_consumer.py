"""The client's consumer on a real broker, with an SQLite database."""

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import pytest
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # public, but not for mypy

from halfway.client.barrier import MissingTableError, UncommittedConnectionError
from halfway.client.consumer import (
    Consumer,
    Inbox,
    Record,
    RejectedMessageError,
    RetentionTooShortError,
    Retries,
    UnknownTopicError,
)
from tests.support.brokers.fixtures import Kafka
from tests.support.brokers.header_names import append_with_header_name

GENEROUS_S = 180.0
QUICK = Retries(attempts=3, first_pause_s=0.01, max_pause_s=0.05)


class Shop:
    """One topic with two partitions and one for dead letters, a database, and consumers in threads."""

    def __init__(self, kafka: Kafka, folder: Path, stack: ExitStack) -> None:
        self.bootstrap_servers = kafka.bootstrap_servers
        self.settings = {"bootstrap.servers": kafka.bootstrap_servers, "fetch.wait.max.ms": 20}
        self.group = f"points-{uuid4().hex[:8]}"
        self.topic, self.dead = f"work-{uuid4().hex[:8]}", f"dead-{uuid4().hex[:8]}"
        self._admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        self.make_topic(self.topic, 2)
        self.make_topic(self.dead, 1)
        self.database = folder / "points.sqlite"
        self._stack = stack
        self._consumers: list[Running] = []
        self.inbox = Inbox("sqlite", self.begin)
        self.inbox.create()
        with self.begin() as connection:
            connection.execute("CREATE TABLE effects (what text)")

    @contextmanager
    def begin(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.database, timeout=30)) as connection, connection:
            yield connection

    def make_topic(self, name: str, partitions: int, **config: str) -> None:
        wanted = NewTopic(
            name, num_partitions=partitions, config={key.replace("_", "."): it for key, it in config.items()}
        )
        for made in self._admin.create_topics([wanted]).values():
            made.result(GENEROUS_S)
        # The controller has it; the broker learns of it a moment later, and a consumer requests it once.
        eventually(lambda: name in self._admin.list_topics(timeout=GENEROUS_S).topics, lambda: f"no topic {name}")

    def produce(
        self,
        *values: str,
        partition: int = 0,
        topic: str | None = None,
        message: str | None = None,
        prepared_at: bytes = b"1760000000000",
    ) -> None:
        """Write records; `message` is a position in a transaction, such as `3-01/1`."""
        producer = Producer({"bootstrap.servers": self.bootstrap_servers})
        headers: list[tuple[str, str | bytes | None]] = [("mark", b"\xff")]
        if message is not None:
            transaction, _, number = message.partition("/")
            headers += [("halfway-transaction-id", transaction), ("halfway-message", f"{number}/9")]
            headers += [("halfway-prepared-at", prepared_at), ("halfway-prefix", b"_halfway.")]
        for value in values:
            producer.produce(topic or self.topic, key="k", value=value, partition=partition, headers=headers)
        assert producer.flush(GENEROUS_S) == 0

    def consume(self, handle: Callable[[Record, Any], Any] | None = None, **changes: Any) -> "Running":
        given: dict[str, Any] = {
            "group": self.group,
            "topics": [self.topic],
            "inbox": self.inbox,
            "retries": QUICK,
            "dead_letter_topic": self.dead,
            **changes,
        }
        consumer = self._stack.enter_context(Running(Consumer(self.settings, handle=handle or note, **given)))
        self._consumers.append(consumer)
        return consumer

    def effects(self) -> list[str]:
        with self.begin() as connection:
            return [row[0] for row in connection.execute("SELECT what FROM effects ORDER BY rowid")]

    def wait_for(self, *effects: str) -> None:
        def show() -> object:
            return self.effects(), [consumer.error for consumer in self._consumers]

        eventually(lambda: sorted(self.effects()) == sorted(effects), show)

    def dead_letters(self, count: int) -> list[Record]:
        reader = KafkaConsumer({**self.settings, "group.id": uuid4().hex})
        reader.assign([TopicPartition(self.dead, 0, 0)])
        try:
            return [Record.of(letter) for letter in reader.consume(count, GENEROUS_S)]
        finally:
            reader.close()

    def committed(self) -> list[int]:
        reader = KafkaConsumer({**self.settings, "group.id": self.group})
        try:
            places = reader.committed([TopicPartition(self.topic, number) for number in (0, 1)], timeout=GENEROUS_S)
            return [place.offset for place in places]
        finally:
            reader.close()


class Running(threading.Thread):
    """A consumer in a thread; `stop` raises the error that ended it."""

    def __init__(self, consumer: Consumer) -> None:
        super().__init__(daemon=True)
        self.error: BaseException | None = None
        self._consumer = consumer

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.stop()
        self.join(GENEROUS_S)
        assert not self.is_alive()

    def run(self) -> None:
        try:
            self._consumer.run()
        except BaseException as error:  # noqa: BLE001 - shown by `stop`
            self.error = error

    def begin_to_stop(self) -> None:
        self._consumer.stop()

    def stop(self) -> None:
        self.__exit__()
        if self.error is not None:
            raise self.error


@pytest.fixture
def shop(kafka: Kafka, tmp_path: Path) -> Iterator[Shop]:
    with ExitStack() as stack:
        yield Shop(kafka, tmp_path, stack)


def note(record: Record, connection: sqlite3.Connection) -> None:
    connection.execute("INSERT INTO effects VALUES (?)", ((record.value or b"").decode(),))


def eventually(there: Callable[[], bool], show: Callable[[], object]) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while not there():
        assert time.monotonic() < deadline, show()
        time.sleep(0.02)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_handler_whose_transaction_was_rolled_back_has_failed(shop: Shop, *, goes_on: bool) -> None:
    """As after a deadlock that it has caught. Otherwise the message would never take effect, or only half of it."""

    def handle(record: Record, connection: sqlite3.Connection) -> None:
        note(record, connection)
        if record.value == b"poison":
            connection.rollback()
            if goes_on:
                note(record, connection)

    shop.produce("poison", "fine")
    shop.consume(handle)
    shop.wait_for("fine")
    (letter,) = shop.dead_letters(1)
    assert letter.value == b"poison"
    assert (letter.header("dead-letter-reason") or b"").startswith(b"MissingRowError: the database rolled")


def test_a_handler_that_commits_by_itself_takes_effect_once(shop: Shop) -> None:
    def handle(record: Record, connection: sqlite3.Connection) -> None:
        note(record, connection)
        connection.commit()

    shop.produce("one", message="3-01/1")
    shop.produce("one", message="3-01/1")
    shop.consume(handle)
    eventually(lambda: shop.committed()[0] == 2, shop.committed)
    assert shop.effects() == ["one"]


def test_a_message_that_fails_delays_its_own_partition_only_and_is_set_aside(shop: Shop) -> None:
    """Its partition continues behind it, in order; its dead letter is the whole message with the reason."""
    tries: Counter[bytes | None] = Counter()

    def handle(record: Record, connection: sqlite3.Connection) -> None:
        tries[record.value] += 1
        note(record, connection)
        if record.value == b"poison":
            raise ValueError("no such parcel")

    shop.produce("poison", "a2")
    shop.produce("b1", "b2", partition=1)
    consumer = shop.consume(handle, retries=Retries(attempts=3, first_pause_s=2, max_pause_s=2))
    shop.wait_for("b1", "b2", "a2")
    consumer.stop()
    assert shop.effects() == ["b1", "b2", "a2"]
    assert tries[b"poison"] == 3
    (letter,) = shop.dead_letters(1)
    assert (letter.key, letter.value, letter.header("mark")) == (b"k", b"poison", b"\xff")
    assert {name: value for name, value in letter.headers if name.startswith("dead-letter-")} == {
        "dead-letter-topic": shop.topic.encode(),
        "dead-letter-partition": b"0",
        "dead-letter-offset": b"0",
        "dead-letter-group": shop.group.encode(),
        "dead-letter-attempts": b"3",
        "dead-letter-reason": b"ValueError: no such parcel",
    }
    assert shop.committed() == [2, 2]


def test_a_record_whose_header_name_is_no_text_delays_nothing(shop: Shop) -> None:
    """Any client with write access can append one; it is handled without headers."""
    seen: list[Record] = []

    def handle(record: Record, connection: sqlite3.Connection) -> None:
        seen.append(record)
        note(record, connection)

    append_with_header_name(shop.bootstrap_servers, shop.topic, 0, [(b"k", b"strange")])
    shop.produce("next")
    consumer = shop.consume(handle)
    shop.wait_for("strange", "next")
    consumer.stop()
    assert [(record.value, record.header("mark")) for record in seen] == [(b"strange", None), (b"next", b"\xff")]


def test_a_message_that_comes_again_takes_effect_once(shop: Shop) -> None:
    """From a sender that repeats, or because offsets were reset."""
    shop.produce("one", message="3-01/1")
    shop.produce("one", message="3-01/1", partition=1)
    shop.produce("two", message="3-01/2")
    shop.produce("three", "three")
    consumer = shop.consume()
    eventually(lambda: len(shop.effects()) == 4, shop.effects)
    consumer.stop()
    assert sorted(shop.effects()) == ["one", "three", "three", "two"]
    reset = KafkaConsumer({**shop.settings, "group.id": shop.group})
    reset.commit(offsets=[TopicPartition(shop.topic, number, 0) for number in (0, 1)], asynchronous=False)
    reset.close()
    shop.produce("last")
    before = shop.effects()
    consumer = shop.consume()
    shop.wait_for(*before, "last")
    consumer.stop()


def test_another_group_has_effects_of_its_own(shop: Shop) -> None:
    shop.produce("one", message="3-01/1")
    shop.consume()
    shop.consume(group=f"cart-{uuid4().hex[:8]}")
    shop.wait_for("one", "one")


def test_a_dead_letter_that_cannot_be_written_is_written_later(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any failure counts as not delivered; the order of the partition is kept."""
    failures = iter([ValueError("headers"), TypeError("\ud800"), BufferError()])
    produce = Producer.produce

    class Failing(Producer):
        def produce(self, *given: Any, **more: Any) -> None:
            for failure in failures:
                raise failure
            produce(self, *given, **more)

    monkeypatch.setattr("halfway.client.consumer.record.Producer", Failing)

    def handle(record: Record, connection: sqlite3.Connection) -> None:
        if record.value == b"poison":
            raise RejectedMessageError("no order")
        note(record, connection)

    shop.produce("poison", "last")
    shop.consume(handle)
    shop.wait_for("last")
    assert [letter.value for letter in shop.dead_letters(1)] == [b"poison"]
    assert next(failures, None) is None


def test_a_dead_letter_that_fails_again_and_again_does_not_grow(shop: Shop) -> None:
    def handle(record: Record, _: sqlite3.Connection) -> None:
        raise RejectedMessageError(f"not {record.offset}")

    shop.produce("parcel", message="3-01/1")
    shop.consume(handle)
    producer = Producer({"bootstrap.servers": shop.bootstrap_servers})
    for turn in range(1, 4):
        letter = shop.dead_letters(turn)[-1]
        names = [name for name, _ in letter.headers]
        assert len(names) == len(set(names)) == 5 + 6
        producer.produce(shop.topic, key=letter.key, value=letter.value, headers=list(letter.headers), partition=0)
        assert producer.flush(GENEROUS_S) == 0
    letter = shop.dead_letters(4)[-1]
    assert letter.header("dead-letter-reason") == b"RejectedMessageError: not 3"
    assert letter.header("dead-letter-offset") == b"3"


def test_the_lag_of_a_transactional_topic_reaches_zero(shop: Shop) -> None:
    """Transaction markers are behind the last message; a message that is not finished is never passed over."""
    stuck = threading.Event()
    stuck.set()

    def handle(record: Record, connection: sqlite3.Connection) -> None:
        if record.value == b"stuck" and stuck.is_set():
            raise ValueError("not yet")
        note(record, connection)

    producer = Producer({"bootstrap.servers": shop.bootstrap_servers, "transactional.id": uuid4().hex})
    producer.init_transactions(GENEROUS_S)
    for values in (["one"], ["two", "stuck"]):
        producer.begin_transaction()
        for value in values:
            producer.produce(shop.topic, value, partition=0 if value != "stuck" else 1)
        producer.commit_transaction(GENEROUS_S)
    shop.consume(handle, dead_letter_topic=None)
    eventually(lambda: shop.committed()[0] == 4, shop.committed)
    assert shop.committed()[1] <= 0
    stuck.clear()
    eventually(lambda: shop.committed() == [4, 2], shop.committed)
    assert sorted(shop.effects()) == ["one", "stuck", "two"]


def test_a_dead_letter_that_is_sent_back_takes_effect(shop: Shop) -> None:
    mended = threading.Event()

    def handle(record: Record, connection: sqlite3.Connection) -> None:
        if not mended.is_set():
            raise RejectedMessageError("not yet")
        note(record, connection)

    shop.produce("parcel", message="3-01/1")
    shop.consume(handle)
    (letter,) = shop.dead_letters(1)
    mended.set()
    producer = Producer({"bootstrap.servers": shop.bootstrap_servers})
    producer.produce(shop.topic, key=letter.key, value=letter.value, headers=list(letter.headers))
    assert producer.flush(GENEROUS_S) == 0
    shop.wait_for("parcel")


def test_a_database_that_is_away_sets_no_message_aside(shop: Shop) -> None:
    """For any length: attempts are counted only when the handler is reached."""
    refused: list[float] = []

    @contextmanager
    def begin() -> Iterator[sqlite3.Connection]:
        if len(refused) < 3 * QUICK.attempts:
            refused.append(time.monotonic())
            raise sqlite3.OperationalError("the database is away")
        with shop.begin() as connection:
            yield connection

    shop.produce("one", "two")
    consumer = shop.consume(inbox=Inbox("sqlite", begin))
    shop.wait_for("one", "two")
    consumer.stop()
    assert len(refused) == 3 * QUICK.attempts


def test_a_commit_that_stands_although_it_raised_is_no_dead_letter(shop: Shop) -> None:
    """The answer of the last attempt was lost. The same after a failed commit sets the message aside."""

    @contextmanager
    def begin() -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(shop.database, timeout=30)) as connection:
            yield connection
            rows = connection.execute("SELECT message FROM halfway_inbox WHERE message LIKE '#3-0%'").fetchall()
            last = rows[-1][0] if rows else ""
            if last.startswith("#3-02/1/"):
                raise sqlite3.OperationalError("the commit was refused")
            connection.commit()
            if last.startswith("#3-01/1/"):
                raise sqlite3.OperationalError("the answer to the commit was lost")

    shop.produce("stands", message="3-01/1")
    consumer = shop.consume(inbox=Inbox("sqlite", begin), retries=Retries(attempts=1))
    eventually(lambda: shop.committed()[0] == 1, shop.committed)
    shop.produce("does not", message="3-02/1")
    (letter,) = shop.dead_letters(1)
    consumer.stop()
    assert shop.effects() == ["stands"]
    assert (letter.value, letter.header("dead-letter-attempts")) == (b"does not", b"1")


def test_an_inbox_that_cannot_work_is_refused_at_the_start(shop: Shop) -> None:
    """Otherwise every message would wait, or be skipped without an attempt; so would the service, without any."""

    @contextmanager
    def begin() -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(shop.database, timeout=30)) as connection:
            yield connection

    for inbox, error in (
        (Inbox("sqlite", begin), UncommittedConnectionError),
        (Inbox("sqlite", shop.begin, table="nowhere"), MissingTableError),
    ):
        consumer = shop.consume(inbox=inbox)
        consumer.join(GENEROUS_S)
        with pytest.raises(error):
            consumer.stop()
    shop.produce("one")
    shop.consume()
    shop.wait_for("one")


def test_a_message_that_cannot_be_set_aside_is_kept_and_others_go_on(shop: Shop) -> None:
    """The dead-letter topic refuses such a large record; an operator raises its limit."""
    narrow = f"narrow-{uuid4().hex[:8]}"
    shop.make_topic(narrow, 1, max_message_bytes="200")

    def handle(record: Record, connection: sqlite3.Connection) -> None:
        if len(record.value or b"") > 100:
            raise RejectedMessageError("too long")
        note(record, connection)

    shop.produce("x" * 300, "behind it")
    shop.produce("b1", partition=1)
    consumer = shop.consume(handle, dead_letter_topic=narrow)
    shop.wait_for("b1")
    consumer.stop()
    assert shop.committed()[0] < 1
    again = shop.consume(handle)
    shop.wait_for("b1", "behind it")
    again.stop()


def test_without_a_dead_letter_topic_a_message_is_tried_for_ever(shop: Shop) -> None:
    tries: list[bytes | None] = []

    def handle(record: Record, connection: sqlite3.Connection) -> None:
        tries.append(record.value)
        if len(tries) <= 4 * QUICK.attempts:
            raise ValueError("not yet")
        note(record, connection)

    shop.produce("one")
    shop.consume(handle, dead_letter_topic=None)
    shop.wait_for("one")


def test_partitions_change_hands_without_an_effect_lost_or_repeated(shop: Shop) -> None:
    """Also while one of them waits for its next attempt."""
    wanted = [f"m{number}" for number in range(60)]
    failures: Counter[bytes | None] = Counter()

    def handle(record: Record, connection: sqlite3.Connection) -> None:
        note(record, connection)
        if int((record.value or b"m0")[1:]) % 7 == 0 and failures[record.value] < 1:
            failures[record.value] += 1
            raise ValueError("not at once")
        time.sleep(0.01)

    first = shop.consume(handle, retries=Retries(attempts=50, first_pause_s=0.2, max_pause_s=0.2))
    for number, value in enumerate(wanted):
        shop.produce(value, partition=number % 2)
    eventually(lambda: len(shop.effects()) > 10, shop.effects)
    second = shop.consume(handle)
    eventually(lambda: len(shop.effects()) > 30, shop.effects)
    first.stop()
    shop.wait_for(*wanted)
    second.stop()
    in_order = shop.effects()
    for partition in (0, 1):
        assert [what for what in in_order if int(what[1:]) % 2 == partition] == wanted[partition::2]


def test_a_consumer_that_is_being_stopped_hands_over_at_once(shop: Shop) -> None:
    """The next one may join the group before the first has left it."""
    shop.produce("one")
    first = shop.consume()
    shop.wait_for("one")
    first.begin_to_stop()
    second = shop.consume()
    shop.produce("two")
    shop.wait_for("one", "two")
    first.stop()
    second.stop()


def test_what_follows_the_commit_is_called_after_it(shop: Shop) -> None:
    """If it fails, the effect is kept and the next message is handled."""
    seen: list[Sequence[str]] = []

    def handle(record: Record, connection: sqlite3.Connection) -> Callable[[], object]:
        note(record, connection)

        def afterwards() -> None:
            seen.append(shop.effects())
            raise ValueError("halfway is away")

        return afterwards

    shop.produce("one", "two")
    shop.consume(handle)
    shop.wait_for("one", "two")
    eventually(lambda: seen == [["one"], ["one", "two"]], lambda: seen)


def test_rows_that_would_go_before_the_topics_records_are_refused(shop: Shop) -> None:
    with pytest.raises(RetentionTooShortError, match=f"the topic {shop.topic} keeps records for up to 1209600 s"):
        shop.consume(inbox=Inbox("sqlite", shop.begin, retention_s=3600)).stop()


def test_a_topic_that_is_not_there_is_named(shop: Shop) -> None:
    with pytest.raises(UnknownTopicError, match="no-such-topic"):
        shop.consume(dead_letter_topic="no-such-topic").stop()
