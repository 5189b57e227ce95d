"""The simulated Kafka does what a real broker and librdkafka do: each case runs on both.

What differs is a defect of the simulated one.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from uuid import uuid4

import pytest
from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    OFFSET_STORED,
    ConsumerGroupState,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # they are there
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from halfway.kafka.clients.seam import Clients
from halfway.protocol.ids import partition_for_key
from halfway.simulated.log import DEFAULTS
from tests.support.contract.backend import simulated

PATIENCE_S: Final = 60.0
HOUR_MS: Final = 3_600_000
EOF: Final = KafkaError._PARTITION_EOF


def code_of(call: Callable[[], object]) -> KafkaError:
    """Return the error that a call raises."""
    with pytest.raises(KafkaException) as raised:
        call()
    error: KafkaError = raised.value.args[0]
    return error


@dataclass
class Bench:
    """Clients of one cluster, and names of one's own."""

    clients: Clients
    properties: dict[str, Any]
    opened: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.admin: Any = self.clients.admin(dict(self.properties))

    def topic(self, partitions: int = 1, **settings: object) -> str:
        name = f"sim-{uuid4().hex[:10]}"
        config = {setting.replace("_", "."): str(value) for setting, value in settings.items()}
        self.done(self.admin.create_topics([NewTopic(name, partitions, 1, config=config)]))
        self.until(lambda: name in self.admin.list_topics(timeout=PATIENCE_S).topics)
        return name

    @staticmethod
    def done(futures: dict[Any, Any]) -> Any:
        """Return the only result of a request."""
        [future] = futures.values()
        return future.result(PATIENCE_S)

    @staticmethod
    def until(condition: Callable[[], object], what: str = "") -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.02)

    def producer(self, transactional_id: str | None = None, **over: object) -> Any:
        given: dict[str, object] = {
            "enable.idempotence": True,
            "topic.metadata.propagation.max.ms": 500,
            "linger.ms": 0,
        }
        if transactional_id is not None:
            given["transactional.id"] = transactional_id
        given |= {name.replace("_", "."): value for name, value in over.items()}
        producer: Any = self.clients.producer({**self.properties, **given})
        if transactional_id is not None:
            producer.init_transactions(PATIENCE_S)
        self.opened.append(producer)
        return producer

    def consumer(self, **over: object) -> Any:
        given = {
            "group.id": f"sim-{uuid4().hex}",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 20,
            **{name if name.startswith("on_") else name.replace("_", "."): value for name, value in over.items()},
        }
        consumer: Any = self.clients.consumer({**self.properties, **given})
        self.opened.append(consumer)
        return consumer

    def close(self) -> None:
        for client in self.opened:
            with suppress(KafkaException, RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # one that was fenced cannot abort
                client.close()

    def read(self, topic: str, start: int = OFFSET_BEGINNING, **over: object) -> list[tuple[int, bytes | None]]:
        """Return offsets and values of partition 0 up to its reported end, and the end with None."""
        consumer = self.consumer(**over)
        consumer.incremental_assign([TopicPartition(topic, 0, start)])
        return self.up_to_the_end(consumer)

    def up_to_the_end(self, consumer: Any) -> list[tuple[int, bytes | None]]:
        found: list[tuple[int, bytes | None]] = []
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            message = consumer.poll(0.1)
            if message is None:
                continue
            if message.error() is not None:
                assert message.error().code() == EOF, message.error()
                return [*found, (message.offset(), None)]
            found.append((message.offset(), message.value()))
        raise AssertionError(f"no end after {found}")

    def take(self, consumer: Any, count: int) -> list[Any]:
        """Return the next records and events."""
        found: list[Any] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < count:
            assert time.monotonic() < deadline, found
            found += consumer.consume(count - len(found), 0.1)
        return found

    def end(self, topic: str, *, spec: Any = None, committed: bool = False) -> int:
        isolation = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        asked = {TopicPartition(topic, 0): spec or OffsetSpec.latest()}  # type: ignore[no-untyped-call]
        offset: int = self.done(self.admin.list_offsets(asked, isolation_level=isolation, request_timeout=30)).offset
        return offset

    def settled(self, topic: str) -> None:
        """Wait until the markers of what has ended are written."""
        self.until(lambda: self.end(topic) == self.end(topic, committed=True), "the last markers")


@dataclass
class Reports:
    """Delivery reports: offsets, or codes of errors."""

    offsets: list[int] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)

    def __call__(self, error: KafkaError | None, message: Any) -> None:
        if error is None:
            self.offsets.append(message.offset())
        else:
            self.codes.append(error.code())


@pytest.fixture(scope="module", params=["simulated", "kafka"])
def cluster(request: pytest.FixtureRequest) -> tuple[Clients, str]:
    if request.param == "kafka":
        return Clients(), request.getfixturevalue("kafka").bootstrap_servers
    seed = random.randrange(2**32)
    return simulated(seed), f"simulated-{seed}.invalid:9092"  # a failure prints the seed


@pytest.fixture
def bench(cluster: tuple[Clients, str]) -> Iterator[Bench]:
    clients, servers = cluster
    made = Bench(clients, {"bootstrap.servers": servers, "log_level": 0})
    yield made
    made.close()


# --- records


def test_a_record_arrives_as_it_was_sent(bench: Bench) -> None:
    topic, now = bench.topic(), time.time_ns() // 1_000_000
    producer, delivered = bench.producer(), []
    headers = [("a", b"1"), ("a", b"2"), ("null", None), ("empty", b"")]
    producer.produce(topic, b"v", b"k", 0, lambda *found: delivered.append(found), None, now, headers)
    producer.produce(topic, None, b"", 0)
    producer.produce(topic, "text", "key", 0, headers={"name": "value"})
    assert len(producer) >= 1
    assert producer.flush(PATIENCE_S) == 0
    [(error, message)] = delivered
    assert error is None
    assert (message.topic(), message.partition(), message.offset()) == (topic, 0, 0)
    assert (message.key(), message.value(), message.headers()) == (b"k", b"v", None)
    assert message.timestamp() == (1, now)
    consumer = bench.consumer()
    consumer.incremental_assign([TopicPartition(topic, 0, 0)])
    found = bench.take(consumer, 4)
    assert [(one.key(), one.value(), one.headers()) for one in found[:3]] == [
        (b"k", b"v", headers),
        (b"", None, None),
        (b"key", b"text", [("name", b"value")]),
    ]
    assert found[0].timestamp() == (1, now)
    assert (found[3].error().code(), found[3].offset(), found[3].topic()) == (EOF, 3, topic)


def test_the_brokers_time_replaces_the_producers_if_the_topic_says_so(bench: Bench) -> None:
    topic = bench.topic(message_timestamp_type="LogAppendTime")
    producer = bench.producer()
    producer.produce(topic, b"v", b"k", 0, timestamp=1_000)
    producer.flush(PATIENCE_S)
    consumer = bench.consumer()
    consumer.incremental_assign([TopicPartition(topic, 0, 0)])
    found = bench.take(consumer, 1)
    kind, at = found[0].timestamp()
    assert kind == 2
    assert abs(at - time.time() * 1000) < HOUR_MS


@pytest.mark.parametrize(
    "settings, record, code",
    [
        ({"max_message_bytes": 5_000}, {"value": b"x" * 6_000}, KafkaError.MSG_SIZE_TOO_LARGE),
        ({}, {"timestamp": 2 * HOUR_MS}, KafkaError.INVALID_TIMESTAMP),
        ({"message_timestamp_before_max_ms": HOUR_MS}, {"timestamp": -2 * HOUR_MS}, KafkaError.INVALID_TIMESTAMP),
        ({"cleanup_policy": "compact"}, {"key": None}, KafkaError.INVALID_RECORD),
    ],
    ids=["size", "ahead", "behind", "key"],
)
def test_a_topic_refuses_a_record(bench: Bench, settings: Any, record: dict[str, Any], code: int) -> None:
    """An idempotent producer goes on; a transaction must be aborted, and another producer can commit the next one."""
    topic = bench.topic(**settings)
    given: dict[str, Any] = {"value": b"v", "key": b"k", "partition": 0, **record}
    if "timestamp" in given:
        given["timestamp"] += time.time_ns() // 1_000_000
    producer, reports = bench.producer(), Reports()
    producer.produce(topic, on_delivery=reports, **given)
    producer.flush(PATIENCE_S)
    producer.produce(topic, b"good", b"k", 0, on_delivery=reports)
    producer.flush(PATIENCE_S)
    assert (reports.codes, reports.offsets) == ([code], [0])

    transactional = bench.producer(uuid4().hex)
    transactional.begin_transaction()
    transactional.produce(topic, on_delivery=reports, **given)
    error = code_of(lambda: transactional.commit_transaction(PATIENCE_S))
    assert (error.code(), error.txn_requires_abort(), error.fatal()) == (code, True, False)
    assert code_of(lambda: transactional.produce(topic, b"v", b"k", 0)).code() == KafkaError._STATE
    transactional.abort_transaction(PATIENCE_S)
    following = bench.producer(uuid4().hex)
    following.begin_transaction()
    following.produce(topic, b"good", b"k", 0, on_delivery=reports)
    following.commit_transaction(PATIENCE_S)
    assert reports.codes == [code, code]
    assert len(reports.offsets) == 2


def test_a_batch_is_refused_as_a_whole(bench: Bench) -> None:
    topic = bench.topic(max_message_bytes=5_000)
    producer, reports = bench.producer(linger_ms=2_000), Reports()
    for _ in range(20):
        producer.produce(topic, b"x" * 1_000, b"k", 0, on_delivery=reports)
    producer.flush(PATIENCE_S)
    assert reports.codes == [KafkaError.MSG_SIZE_TOO_LARGE] * 20
    assert bench.end(topic) == 0


def test_a_record_larger_than_the_clients_limit_is_refused_at_once(bench: Bench) -> None:
    producer = bench.producer(message_max_bytes=2_000)
    error = code_of(lambda: producer.produce("any", b"x" * 3_000))
    assert (error.code(), error.fatal()) == (KafkaError.MSG_SIZE_TOO_LARGE, False)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_record_for_a_partition_that_is_not_there(bench: Bench, *, is_known: bool) -> None:
    """A client that has seen the topic refuses it; another one fails it later."""
    topic, producer, reports = bench.topic(), bench.producer(), Reports()
    if is_known:
        producer.list_topics(topic, timeout=PATIENCE_S)
        assert code_of(lambda: producer.produce(topic, b"v", b"k", 7)).code() == KafkaError._UNKNOWN_PARTITION
    else:
        producer.produce(topic, b"v", b"k", 7, on_delivery=reports)
        producer.flush(PATIENCE_S)
        assert reports.codes == [KafkaError._UNKNOWN_PARTITION]


def test_a_record_for_a_topic_that_is_not_there_fails_after_a_while(bench: Bench) -> None:
    producer, reports = bench.producer(), Reports()
    producer.produce(f"missing-{uuid4().hex}", b"v", b"k", on_delivery=reports)
    producer.flush(PATIENCE_S)
    assert reports.codes == [KafkaError.UNKNOWN_TOPIC_OR_PART]
    transactional = bench.producer(uuid4().hex)
    transactional.begin_transaction()
    transactional.produce(f"missing-{uuid4().hex}", b"v", b"k", on_delivery=reports)
    error = code_of(lambda: transactional.commit_transaction(PATIENCE_S))
    assert (error.code(), error.txn_requires_abort()) == (KafkaError._INCONSISTENT, True)


def test_keys_go_where_a_java_client_puts_them(bench: Bench) -> None:
    topic, producer = bench.topic(5), bench.producer(partitioner="murmur2_random")
    keys, partitions = [b"21", b"foobar", b"", b"\x00\xff"], {}
    for key in keys:
        producer.produce(topic, b"v", key, on_delivery=lambda _, one: partitions.update({one.key(): one.partition()}))
    producer.flush(PATIENCE_S)
    assert partitions == {key: partition_for_key(key, 5) for key in keys}


def test_what_is_purged_is_reported(bench: Bench) -> None:
    topic, producer, reports = bench.topic(), bench.producer(linger_ms=60_000), Reports()
    producer.list_topics(topic, timeout=PATIENCE_S)
    producer.produce(topic, b"v", b"k", 0, on_delivery=reports)
    producer.purge()
    producer.poll(1)
    assert (reports.codes, len(producer)) == ([KafkaError._PURGE_QUEUE], 0)


# --- transactions


def test_calls_in_the_wrong_state_are_refused(bench: Bench) -> None:
    topic = bench.topic()
    producer: Any = bench.clients.producer({**bench.properties, "transactional.id": uuid4().hex})
    bench.opened.append(producer)
    before = [producer.begin_transaction, producer.commit_transaction, producer.abort_transaction]
    for call in (*before, lambda: producer.produce(topic, b"v")):
        assert code_of(call).code() == KafkaError._STATE
    producer.init_transactions(PATIENCE_S)
    for call in (producer.commit_transaction, producer.abort_transaction, lambda: producer.produce(topic, b"v")):
        assert code_of(call).code() == KafkaError._STATE
    producer.begin_transaction()
    assert code_of(producer.begin_transaction).code() == KafkaError._STATE
    producer.commit_transaction(PATIENCE_S)
    producer.begin_transaction()
    producer.abort_transaction(PATIENCE_S)
    assert bench.end(topic) == 0


def test_readers_of_committed_records_see_what_was_committed_up_to_the_first_open_transaction(bench: Bench) -> None:
    topic = bench.topic()
    first, second, plain = bench.producer(uuid4().hex), bench.producer(uuid4().hex), bench.producer()
    for value, commits in ((b"committed", True), (b"aborted", False)):
        first.begin_transaction()
        first.produce(topic, value, b"k", 0)
        first.flush(PATIENCE_S)
        (first.commit_transaction if commits else first.abort_transaction)(PATIENCE_S)
    bench.settled(topic)
    second.begin_transaction()
    second.produce(topic, b"open", b"k", 0)
    second.flush(PATIENCE_S)
    plain.produce(topic, b"plain", b"k", 0)
    plain.flush(PATIENCE_S)
    first.begin_transaction()
    first.produce(topic, b"behind", b"k", 0)
    first.commit_transaction(PATIENCE_S)
    bench.until(lambda: bench.end(topic) == 8, "the marker of the last commit")
    every = [(0, b"committed"), (2, b"aborted"), (4, b"open"), (5, b"plain"), (6, b"behind"), (8, None)]
    assert bench.read(topic) == [every[0], (4, None)]
    assert bench.read(topic, isolation_level="read_uncommitted") == every
    assert (bench.end(topic), bench.end(topic, committed=True)) == (8, 4)
    watching = bench.consumer()
    assert watching.get_watermark_offsets(TopicPartition(topic, 0), timeout=PATIENCE_S) == (0, 4)
    watching.incremental_assign([TopicPartition(topic, 0, 3)])
    assert bench.up_to_the_end(watching) == [(4, None)]
    second.abort_transaction(PATIENCE_S)
    assert bench.up_to_the_end(watching)[:2] == [(5, b"plain"), (6, b"behind")]
    bench.settled(topic)
    assert bench.read(topic) == [every[0], *every[3:5], (9, None)]


def test_a_transaction_over_two_partitions_gives_each_a_marker(bench: Bench) -> None:
    topic, producer = bench.topic(2), bench.producer(uuid4().hex)
    producer.begin_transaction()
    for partition in (0, 1):
        producer.produce(topic, b"v", b"k", partition)
    producer.commit_transaction(PATIENCE_S)
    consumer = bench.consumer()
    for partition in (0, 1):
        at = TopicPartition(topic, partition)
        bench.until(partial(spans, consumer, at, (0, 2)), "its marker")


def spans(consumer: Any, at: TopicPartition, span: tuple[int, int]) -> bool:
    return bool(consumer.get_watermark_offsets(at, timeout=PATIENCE_S) == span)


def test_the_next_user_of_an_id_aborts_what_is_open_and_fences_the_former_one(bench: Bench) -> None:
    """A commit, and whatever follows, raises one fatal error; `poll` raises it once, and `produce` another one."""
    topic, name = bench.topic(), uuid4().hex
    former = bench.producer(name)
    former.begin_transaction()
    former.produce(topic, b"lost", b"k", 0)
    former.flush(PATIENCE_S)
    assert bench.end(topic, committed=True) == 0
    latter = bench.producer(name)
    bench.until(lambda: bench.end(topic, committed=True) == 2, "it is aborted")
    error = code_of(lambda: former.commit_transaction(PATIENCE_S))
    assert (error.code(), error.fatal(), error.retriable()) == (KafkaError._FENCED, True, False)
    assert code_of(lambda: former.poll(1)).code() == KafkaError._FENCED
    assert former.poll(0.1) == 0
    refused = code_of(lambda: former.produce(topic, b"v", b"k", 0))
    assert (refused.code(), refused.fatal()) == (KafkaError._FATAL, False)
    for call in (former.begin_transaction, former.commit_transaction, former.abort_transaction):
        assert code_of(call).code() == KafkaError._FENCED
    latter.begin_transaction()
    latter.produce(topic, b"good", b"k", 0)
    latter.commit_transaction(PATIENCE_S)
    bench.settled(topic)
    assert bench.read(topic) == [(2, b"good"), (4, None)]


def test_a_fenced_producer_writes_nothing_more(bench: Bench) -> None:
    topic, name = bench.topic(), uuid4().hex
    former = bench.producer(name)
    bench.producer(name)
    former.begin_transaction()
    former.produce(topic, b"late", b"k", 0)
    errors = [code_of(lambda: former.commit_transaction(PATIENCE_S)) for _ in range(2)]
    assert [(error.code(), error.fatal()) for error in errors] == [(KafkaError._FENCED, True)] * 2
    assert bench.end(topic) == 0


def test_a_partition_refuses_the_epoch_before_the_last_marker(bench: Bench) -> None:
    """The former user has written to the partition before, in the same transaction."""
    topic, name = bench.topic(), uuid4().hex
    former = bench.producer(name)
    former.begin_transaction()
    former.produce(topic, b"first", b"k", 0)
    former.flush(PATIENCE_S)
    bench.producer(name)
    bench.settled(topic)
    former.produce(topic, b"second", b"k", 0)
    errors = [code_of(lambda: former.commit_transaction(PATIENCE_S)) for _ in range(2)]
    assert [(error.code(), error.fatal()) for error in errors] == [(KafkaError._FENCED, True)] * 2
    assert bench.read(topic, isolation_level="read_uncommitted") == [(0, b"first"), (2, None)]


def test_a_transaction_that_takes_too_long_is_aborted_and_its_producer_fenced(bench: Bench) -> None:
    topic, producer = bench.topic(), bench.producer(uuid4().hex, transaction_timeout_ms=5_000, message_timeout_ms=4_900)
    producer.begin_transaction()
    producer.produce(topic, b"v", b"k", 0)
    producer.flush(PATIENCE_S)
    bench.until(lambda: bench.end(topic, committed=True) == 2, "the marker")
    error = code_of(lambda: producer.commit_transaction(PATIENCE_S))
    assert (error.code(), error.fatal()) == (KafkaError._FENCED, True)
    assert bench.read(topic) == [(2, None)]


def test_a_time_out_longer_than_the_brokers_is_refused_for_good(bench: Bench) -> None:
    properties = {"transactional.id": uuid4().hex, "transaction.timeout.ms": 900_001}
    producer: Any = bench.clients.producer({**bench.properties, **properties})
    error = code_of(lambda: producer.init_transactions(PATIENCE_S))
    assert (error.code(), error.fatal()) == (KafkaError.INVALID_TRANSACTION_TIMEOUT, True)


# --- consumers


def test_ends_are_reported_once_each(bench: Bench) -> None:
    topic, producer, consumer = bench.topic(), bench.producer(uuid4().hex), bench.consumer()
    consumer.incremental_assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    assert bench.up_to_the_end(consumer) == [(0, None)]
    assert consumer.poll(0.5) is None
    producer.begin_transaction()
    producer.produce(topic, b"v", b"k", 0)
    producer.commit_transaction(PATIENCE_S)
    found = [*bench.up_to_the_end(consumer)]
    while found[-1] != (2, None):
        found += bench.up_to_the_end(consumer)
    assert [one for one in found if one[1] is not None] == [(0, b"v")]
    assert consumer.poll(0.5) is None


def test_where_reading_starts(bench: Bench) -> None:
    topic, producer = bench.topic(), bench.producer()
    for number in range(4):
        producer.produce(topic, b"%d" % number, b"k", 0)
    producer.flush(PATIENCE_S)
    bench.done(bench.admin.delete_records([TopicPartition(topic, 0, 1)]))
    every = [(1, b"1"), (2, b"2"), (3, b"3"), (4, None)]
    assert bench.read(topic) == every
    assert bench.read(topic, 2) == every[1:]
    assert bench.read(topic, OFFSET_END) == every[3:]
    assert bench.read(topic, OFFSET_STORED) == every
    for beyond in (0, 99):
        assert bench.read(topic, beyond) == every
        assert bench.read(topic, beyond, auto_offset_reset="latest") == every[3:]
        consumer = bench.consumer(auto_offset_reset="error")
        consumer.incremental_assign([TopicPartition(topic, 0, beyond)])
        message = consumer.poll(PATIENCE_S)
        assert (message.error().code(), message.topic()) == (KafkaError._AUTO_OFFSET_RESET, topic)
    assert bench.end(topic, spec=OffsetSpec.earliest()) == 1  # type: ignore[no-untyped-call]


def test_partitions_are_added_and_removed_one_by_one(bench: Bench) -> None:
    topic, producer, consumer = bench.topic(2), bench.producer(), bench.consumer()
    for partition in (0, 1):
        producer.produce(topic, b"%d" % partition, b"k", partition)
    producer.flush(PATIENCE_S)
    consumer.incremental_assign([TopicPartition(topic, 0, 0)])
    assert bench.up_to_the_end(consumer) == [(0, b"0"), (1, None)]
    consumer.incremental_assign([TopicPartition(topic, 1, 0)])
    assert bench.up_to_the_end(consumer) == [(0, b"1"), (1, None)]
    consumer.incremental_unassign([TopicPartition(topic, 0)])
    producer.produce(topic, b"more", b"k", 0)
    producer.produce(topic, b"more", b"k", 1)
    producer.flush(PATIENCE_S)
    assert bench.up_to_the_end(consumer) == [(1, b"more"), (2, None)]
    consumer.pause([TopicPartition(topic, 1)])
    producer.produce(topic, b"unseen", b"k", 1)
    producer.flush(PATIENCE_S)
    assert consumer.poll(0.5) is None


def test_offsets_by_time(bench: Bench) -> None:
    topic, producer, consumer = bench.topic(3), bench.producer(), bench.consumer()
    now = time.time_ns() // 1_000_000
    for partition in (0, 1):
        for number in range(3):
            producer.produce(topic, b"v", b"k", partition, timestamp=now + 1_000 * number)
    producer.flush(PATIENCE_S)
    asked = [TopicPartition(topic, 0, now + 500), TopicPartition(topic, 1, now + 5_000), TopicPartition(topic, 2, 0)]
    found = consumer.offsets_for_times(asked, timeout=PATIENCE_S)
    assert [(one.partition, one.offset, one.error) for one in found] == [
        (0, 1, None),
        (1, OFFSET_END, None),
        (2, OFFSET_END, None),
    ]
    [end] = consumer.offsets_for_times([TopicPartition(topic, 0, OFFSET_END)], timeout=PATIENCE_S)
    assert end.offset == 3


def test_questions_about_what_is_not_there(bench: Bench) -> None:
    topic, consumer, missing = bench.topic(), bench.consumer(), f"missing-{uuid4().hex}"
    for place in (TopicPartition(missing, 0, 0), TopicPartition(topic, 9, 0)):
        calls: Sequence[Callable[[], object]] = [
            partial(consumer.get_watermark_offsets, place, timeout=PATIENCE_S),
            partial(consumer.offsets_for_times, [place], timeout=PATIENCE_S),
        ]
        assert [code_of(call).code() for call in calls] == [KafkaError._UNKNOWN_PARTITION] * 2
        asked = {place: OffsetSpec.latest()}  # type: ignore[no-untyped-call]
        answers = bench.admin.list_offsets(asked, request_timeout=30)
        assert code_of(partial(bench.done, answers)).code() == KafkaError._NOENT
    for name, code in ((missing, KafkaError.UNKNOWN_TOPIC_OR_PART), ("not legal", KafkaError.TOPIC_EXCEPTION)):
        found = consumer.list_topics(name, timeout=PATIENCE_S).topics[name]
        assert (found.error.code(), found.partitions) == (code, {})
        answers = bench.admin.describe_topics(TopicCollection([name]))
        assert code_of(partial(bench.done, answers)).code() == code
    resource = ConfigResource(ResourceType.TOPIC, missing)
    assert code_of(lambda: bench.done(bench.admin.describe_configs([resource]))).code() == (
        KafkaError.UNKNOWN_TOPIC_OR_PART
    )
    assert code_of(lambda: bench.done(bench.admin.delete_topics([missing]))).code() == KafkaError.UNKNOWN_TOPIC_OR_PART


# --- groups


def test_committed_offsets_have_metadata_and_go_with_their_topic(bench: Bench) -> None:
    answers: list[tuple[KafkaError | None, list[TopicPartition]]] = []
    topic, group = bench.topic(2), f"sim-{uuid4().hex}"
    consumer = bench.consumer(group_id=group, on_commit=lambda *answer: answers.append(answer))
    partitions = [TopicPartition(topic, number) for number in (0, 1)]

    def committed() -> list[tuple[int, str | None]]:
        return [(one.offset, one.metadata or None) for one in consumer.committed(partitions, timeout=PATIENCE_S)]

    assert committed() == [(OFFSET_INVALID, None)] * 2
    consumer.commit(offsets=[TopicPartition(topic, 0, 3, "about it")], asynchronous=True)
    bench.until(lambda: consumer.poll(0.05) or answers)
    [(error, offsets)] = answers
    assert error is None
    assert [(one.partition, one.offset, one.error) for one in offsets] == [(0, 3, None)]
    assert committed() == [(3, "about it"), (OFFSET_INVALID, None)]
    bench.done(bench.admin.delete_topics([topic]))
    bench.until(lambda: committed() == [(OFFSET_INVALID, None)] * 2, "they are gone")


def test_members_share_partitions_and_move_only_what_they_must(bench: Bench) -> None:
    topic, group = bench.topic(4), f"sim-{uuid4().hex}"
    events: list[tuple[str, str, set[int]]] = []

    def member(name: str) -> Any:
        consumer = bench.consumer(
            group_id=group,
            partition_assignment_strategy="cooperative-sticky",
            session_timeout_ms=20_000,
            heartbeat_interval_ms=100,
        )

        def assigned(_: Any, partitions: list[TopicPartition]) -> None:
            events.append((name, "assigned", {one.partition for one in partitions}))
            consumer.incremental_assign([TopicPartition(one.topic, one.partition, OFFSET_END) for one in partitions])

        def revoked(_: Any, partitions: list[TopicPartition]) -> None:
            events.append((name, "revoked", {one.partition for one in partitions}))
            consumer.incremental_unassign(partitions)

        consumer.subscribe([topic], on_assign=assigned, on_revoke=revoked)
        return consumer

    def owned(name: str) -> set[int]:
        found: set[int] = set()
        for who, what, partitions in events:
            if who == name:
                found = found | partitions if what == "assigned" else found - partitions
        return found

    def polled(*consumers: Any) -> bool:
        for consumer in consumers:
            consumer.poll(0.05)
        return True

    first = member("first")
    bench.until(lambda: polled(first) and owned("first") == {0, 1, 2, 3}, f"alone: {events}")
    second = member("second")
    bench.until(lambda: polled(first, second) and len(owned("second")) == 2, f"two of four: {events}")
    assert owned("first") | owned("second") == {0, 1, 2, 3}
    assert [event for event in events if event[1] == "revoked"] == [("first", "revoked", owned("second"))]
    described = bench.done(bench.admin.describe_consumer_groups([group]))
    assert (described.state, len(described.members)) == (ConsumerGroupState.STABLE, 2)
    stranger = bench.consumer(group_id=group)
    refused = code_of(lambda: stranger.commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=False))
    assert refused.code() == KafkaError.UNKNOWN_MEMBER_ID
    kept = owned("first")
    first.unsubscribe()
    bench.until(lambda: polled(first, second) and owned("second") == {0, 1, 2, 3}, f"the other one left: {events}")
    assert ("first", "revoked", kept) in events
    second.close()
    assert owned("second") == set()


def test_a_group_that_nobody_has_used_is_dead(bench: Bench) -> None:
    described = bench.done(bench.admin.describe_consumer_groups([f"sim-{uuid4().hex}"]))
    assert (described.state, described.members) == (ConsumerGroupState.DEAD, [])


def test_a_session_time_out_that_brokers_do_not_allow_is_refused(bench: Bench) -> None:
    consumer = bench.consumer(session_timeout_ms=3_000_000, max_poll_interval_ms=3_000_000)
    consumer.subscribe([bench.topic()])
    found: list[int] = []

    def looked() -> bool:
        message = consumer.poll(0.1)
        if message is not None and message.error() is not None:
            found.append(message.error().code())
        return KafkaError.INVALID_SESSION_TIMEOUT in found

    bench.until(looked, "it is refused")


# --- topics


@pytest.mark.parametrize(
    "name, partitions, replicas, settings, code",
    [
        ("a b", 1, 1, {}, KafkaError.TOPIC_EXCEPTION),
        (None, 0, 1, {}, KafkaError.INVALID_PARTITIONS),
        (None, 1, 9, {}, KafkaError.INVALID_REPLICATION_FACTOR),
        (None, 1, 1, {"no.such.setting": "1"}, KafkaError.INVALID_CONFIG),
    ],
)
@pytest.mark.parametrize("only", [False, True])
def test_topics_that_cannot_be_created(
    bench: Bench, name: str | None, partitions: int, replicas: int, settings: dict[str, str], code: int, *, only: bool
) -> None:
    new = NewTopic(name or f"sim-{uuid4().hex}", partitions, replicas, config=settings)
    assert code_of(lambda: bench.done(bench.admin.create_topics([new], validate_only=only))).code() == code


def test_a_topic_is_described_grows_and_is_made_again_as_another_one(bench: Bench) -> None:
    topic = bench.topic(2, retention_ms=12_345)

    def described() -> Any:
        return bench.done(bench.admin.describe_topics(TopicCollection([topic]), include_authorized_operations=True))

    before = described()
    assert [(one.id, one.leader.id == one.replicas[0].id, len(one.isr)) for one in before.partitions] == [
        (0, True, 1),
        (1, True, 1),
    ]
    assert {"READ", "WRITE", "DESCRIBE"} <= {one.name for one in before.authorized_operations}
    again = NewTopic(topic, 2, 1)
    assert code_of(lambda: bench.done(bench.admin.create_topics([again]))).code() == KafkaError.TOPIC_ALREADY_EXISTS
    fewer = NewPartitions(topic, 1)
    assert code_of(lambda: bench.done(bench.admin.create_partitions([fewer]))).code() == KafkaError.INVALID_PARTITIONS
    bench.done(bench.admin.create_partitions([NewPartitions(topic, 3)]))
    bench.until(lambda: len(described().partitions) == 3)
    bench.done(bench.admin.delete_topics([topic]))
    bench.until(lambda: topic not in bench.admin.list_topics(timeout=PATIENCE_S).topics)
    bench.done(bench.admin.create_topics([again]))
    bench.until(lambda: topic in bench.admin.list_topics(timeout=PATIENCE_S).topics)
    assert str(described().topic_id) != str(before.topic_id)


def test_settings_have_kafkas_defaults_and_can_be_changed(bench: Bench) -> None:
    topic = bench.topic()
    resource = ConfigResource(ResourceType.TOPIC, topic)

    def settings() -> dict[str, str]:
        return {name: entry.value for name, entry in bench.done(bench.admin.describe_configs([resource])).items()}

    assert {name: value for name, value in settings().items() if name in DEFAULTS} == dict(DEFAULTS)
    entry = ConfigEntry("max.message.bytes", "5000", incremental_operation=AlterConfigOpType.SET)
    changed = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    bench.done(bench.admin.incremental_alter_configs([changed]))
    bench.until(lambda: settings()["max.message.bytes"] == "5000")
    producer, reports = bench.producer(), Reports()
    producer.produce(topic, b"x" * 6_000, b"k", 0, on_delivery=reports)
    producer.flush(PATIENCE_S)
    assert reports.codes == [KafkaError.MSG_SIZE_TOO_LARGE]
