"""What a real broker does not show in a short test: logs that shrink, brokers that refuse, a clock that jumps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]  # it is there

from halfway.simulated import SimulatedKafka
from halfway.simulated.log import Partition

DAY_MS = 86_400_000
PLACE = ("t", 0)


class VirtualClock:
    """A clock that jumps to whatever is waited for."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def now_ms(self) -> int:
        return 1_760_000_000_000 + round(self.now * 1000)

    def wait(self, _condition: threading.Condition, seconds: float) -> None:
        self.now += seconds


class Bench:
    """One topic with one partition on a virtual clock."""

    def __init__(
        self, *, seed: int = 1, brokers: int = 1, latency_s: tuple[float, float] = (0, 0), **settings: str
    ) -> None:
        self.clock = VirtualClock()
        self.kafka = SimulatedKafka(clock=self.clock, seed=seed, brokers=brokers, latency_s=latency_s)
        self.host = self.kafka.host()
        config = {name.replace("_", "."): value for name, value in settings.items()}
        [created] = self.host.admin({}).create_topics([NewTopic("t", 1, brokers, config=config)]).values()
        created.result(0)

    @property
    def partition(self) -> Partition:
        found = self.kafka.partition(PLACE)
        assert found is not None
        return found

    def write(self, *records: tuple[bytes, bytes | None], transactional_id: str | None = None) -> list[Any]:
        """Append records, in a transaction of their own if there is an id; return offsets or codes of errors."""
        results: list[Any] = []
        given = {} if transactional_id is None else {"transactional.id": transactional_id}
        producer = self.host.producer({"linger.ms": 0, "message.timeout.ms": 1_000, **given})
        if transactional_id is not None:
            producer.init_transactions(10)
            producer.begin_transaction()
        for key, value in records:
            producer.produce(
                "t", value, key, 0, lambda error, one: results.append(one.offset() if error is None else error.code())
            )
        if transactional_id is None:
            producer.flush(10)
        else:
            producer.commit_transaction(10)
        return results

    def begun(self) -> Any:
        """Return a producer with an open transaction."""
        producer = self.host.producer({"transactional.id": "x", "linger.ms": 0})
        producer.init_transactions(10)
        producer.begin_transaction()
        return producer

    def read(self, **properties: str) -> list[tuple[int, bytes | None, bytes | None]]:
        consumer = self.kafka.host().consumer({"auto.offset.reset": "earliest", **properties})
        consumer.assign([TopicPartition("t", 0, 0)])
        return [(one.offset() or 0, one.key(), one.value()) for one in consumer.consume(100, 0.1)]

    def clean(self, *, after_s: float = 0) -> None:
        self.clock.now += after_s
        with self.kafka.schedule:
            self.partition.roll()
            self.kafka.clean()


def code_of(call: Callable[[], object]) -> int:
    with pytest.raises(KafkaException) as raised:
        call()
    code: int = raised.value.args[0].code()
    return code


def test_compaction_keeps_the_last_record_of_each_key_and_tombstones_for_a_while() -> None:
    bench = Bench(cleanup_policy="compact", delete_retention_ms="60000")
    bench.write((b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"b", None))
    bench.write((b"c", b"1"))
    bench.clean()
    assert bench.read() == [(2, b"a", b"2"), (3, b"b", None), (4, b"c", b"1")]
    bench.clean(after_s=61)
    assert bench.read() == [(2, b"a", b"2"), (4, b"c", b"1")]
    assert (bench.partition.start, bench.partition.end) == (0, 5)


def test_compaction_leaves_out_what_was_aborted_and_stops_before_what_is_young_open_or_active() -> None:
    bench = Bench(cleanup_policy="compact", min_compaction_lag_ms="60000")
    bench.write((b"a", b"1"))
    bench.clean(after_s=30)
    bench.write((b"a", b"2"))
    bench.clean()
    assert len(bench.read()) == 2, "the first one is too young"
    bench.clean(after_s=120)
    assert bench.read() == [(1, b"a", b"2")]
    producer = bench.begun()
    producer.produce("t", b"open", b"a", 0)
    bench.write((b"a", b"3"))
    bench.clean(after_s=30)
    assert [one.value for one in bench.partition.records] == [b"2", b"open", b"3"]
    producer.abort_transaction(10)
    bench.write((b"a", b"4"))
    bench.clean(after_s=120)
    assert [one.value for one in bench.partition.records if one.control is None] == [b"4"]


def test_old_segments_are_deleted_by_time_and_move_the_log_start() -> None:
    bench = Bench(cleanup_policy="delete", retention_ms="60000", segment_ms="10000")
    for _ in range(3):
        bench.write((b"k", b"v"))
        bench.clock.now += 40
    bench.clean()
    assert (bench.partition.start, bench.partition.end) == (2, 3)
    assert bench.read() == [(2, b"k", b"v")]
    bench.clean(after_s=3600)
    assert (bench.partition.start, bench.partition.end) == (3, 3)


def test_a_partition_below_its_least_replicas_takes_neither_records_nor_markers() -> None:
    bench = Bench(brokers=3, min_insync_replicas="2")
    producer = bench.begun()
    producer.produce("t", b"v", b"k", 0)
    bench.partition.isr = (1,)
    assert bench.write((b"k", b"late")) == [KafkaError._MSG_TIMED_OUT]
    producer.commit_transaction(10)
    assert bench.partition.stable == 0, "the marker cannot be written"
    other = bench.host.producer({"transactional.id": "x"})
    assert code_of(lambda: other.init_transactions(1)) == KafkaError.CONCURRENT_TRANSACTIONS
    bench.partition.isr = (1, 2)
    other.init_transactions(1)
    assert bench.partition.stable == bench.partition.end == 2
    bench.partition.leader = None
    assert bench.read() == []
    assert bench.write((b"k", b"late")) == [KafkaError._MSG_TIMED_OUT]


def test_a_log_that_loses_its_end_forgets_markers_and_sequences() -> None:
    """Its readers begin again, and a producer that knows better fails for good."""
    bench = Bench()
    plain = bench.host.producer({"linger.ms": 0})
    for _ in range(2):
        plain.produce("t", b"plain", b"k", 0)
    bench.write((b"k", b"transaction"), transactional_id="x")
    consumer = bench.host.consumer({"auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition("t", 0, 0)])
    assert len(consumer.consume(10, 0.1)) == 3
    with bench.kafka.schedule:
        bench.partition.truncate(3)
    assert (bench.partition.end, bench.partition.stable) == (3, 2)
    with bench.kafka.schedule:
        bench.partition.truncate(1)
    assert [one.offset() for one in consumer.consume(10, 0.1)] == [0]
    plain.produce("t", b"more", b"k", 0)
    assert code_of(lambda: plain.poll(0)) == KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert code_of(lambda: plain.produce("t", b"more", b"k", 0)) == KafkaError._FATAL


def test_a_repeated_batch_is_acknowledged_and_not_appended_again() -> None:
    bench = Bench()
    producer = bench.host.producer({"linger.ms": 0})
    producer.produce("t", b"v", b"k", 0)
    producer._sequences.clear()  # as after a lost answer
    offsets: list[int | None] = []
    producer.produce("t", b"v", b"k", 0, on_delivery=lambda _, one: offsets.append(one.offset()))
    producer.flush(1)
    assert (offsets, bench.partition.end) == ([0], 1)


def produced(bench: Bench, producer: Any, value: bytes) -> list[int | None]:
    """Produce a record and give it up to two seconds; return its offset, or the code of its error."""
    results: list[int | None] = []
    producer.produce("t", value, b"k", 0, lambda error, one: results.append(error.code() if error else one.offset()))
    producer.flush(2)
    return results


def test_a_host_that_is_cut_off_sends_nothing_until_it_heals() -> None:
    bench = Bench()
    producer = bench.host.producer({"linger.ms": 0, "message.timeout.ms": 10_000})
    bench.host.cut()
    assert produced(bench, producer, b"late") == []
    assert (len(producer), bench.partition.end) == (1, 0)
    admin, consumer = bench.host.admin({}), bench.host.consumer({})
    assert code_of(lambda: admin.list_topics(timeout=1)) == KafkaError._TIMED_OUT
    assert code_of(lambda: consumer.committed([TopicPartition("t", 0)], timeout=1)) == KafkaError._TIMED_OUT
    [described] = admin.describe_consumer_groups(["g"], request_timeout=3).values()
    assert not described.done()
    producer.poll(4)
    assert code_of(lambda: described.result(0)) == KafkaError._TIMED_OUT
    bench.host.heal()
    assert producer.flush(1) == 0
    assert [value for *_, value in bench.read()] == [b"late"]


@pytest.mark.parametrize("heals", [True, False])
def test_a_record_whose_answer_is_lost_is_appended_once(*, heals: bool) -> None:
    """If it times out nobody knows, and the records behind it are still appended."""
    bench = Bench()
    producer = bench.host.producer({"linger.ms": 0, "message.timeout.ms": 3_000})
    bench.host.cut(answers_only=True)
    results: list[int | None] = []
    producer.produce("t", b"1", b"k", 0, lambda error, one: results.append(error.code() if error else one.offset()))
    assert producer.flush(1) == 1
    producer.produce("t", b"2", b"k", 0)
    if heals:
        bench.host.heal()
    producer.flush(5)
    assert results == [0 if heals else KafkaError._MSG_TIMED_OUT]
    bench.host.heal()
    producer.flush(5)
    assert [value for *_, value in bench.read()] == [b"1", b"2"]


def test_a_commit_whose_answer_is_lost_stands() -> None:
    bench = Bench()
    producer = bench.begun()
    assert produced(bench, producer, b"v") == [0]
    bench.host.cut(answers_only=True)
    assert code_of(lambda: producer.commit_transaction(1)) == KafkaError._TIMED_OUT
    other = bench.kafka.host().producer({"transactional.id": "x"})
    other.init_transactions(1)
    assert [(one.value, one.aborted, one.control) for one in bench.partition.records] == [
        (b"v", False, None),
        (None, False, "commit"),
    ]
    bench.host.heal()
    assert code_of(lambda: producer.commit_transaction(1)) == KafkaError._FENCED


def test_requests_and_answers_take_the_time_of_the_network() -> None:
    """A host that is cut off meanwhile never hears of what it has appended and committed."""
    bench = Bench(latency_s=(1.0, 1.0))
    producer = bench.begun()
    results: list[int | None] = []
    producer.produce("t", b"v", b"k", 0, lambda error, one: results.append(error.code() if error else one.offset()))
    producer.poll(0.5)
    assert bench.partition.end == 0
    producer.poll(1)
    assert (bench.partition.end, results) == (1, [])
    producer.poll(1)
    assert results == [0]
    assert code_of(lambda: producer.commit_transaction(1.5)) == KafkaError._TIMED_OUT
    bench.host.cut()
    bench.clock.now += 5
    assert [value for *_, value in bench.read()] == [b"v"]


def test_a_member_that_is_cut_off_loses_its_partitions_after_its_session() -> None:
    bench = Bench()
    events: list[str] = []
    hosts = {name: bench.kafka.host() for name in ("a", "b")}
    consumers = {name: host.consumer({"group.id": "g", "session.timeout.ms": 6_000}) for name, host in hosts.items()}

    def note(event: str) -> Callable[[Any, list[TopicPartition]], None]:
        return lambda _, partitions: events.append(event) if partitions else None

    for name, consumer in consumers.items():
        consumer.subscribe(
            ["t"], on_assign=note(f"{name} has it"), on_revoke=note(f"{name} gave it"), on_lost=note(f"{name} lost it")
        )
        consumer.poll(0)
    hosts["a"].cut()
    consumers["b"].poll(5)
    assert events == ["a has it"]
    consumers["b"].poll(2)
    consumers["a"].poll(0)
    assert events == ["a has it", "b has it", "a lost it"]
    assert [one for one in bench.kafka.groups["g"].members if one.owned]


@pytest.mark.parametrize(
    "denied, call, code",
    [
        (("Write", "topic", "t"), lambda one: one.write((b"k", b"v"))[0], KafkaError.TOPIC_AUTHORIZATION_FAILED),
        (
            ("Write", "transactional-id", "x"),
            lambda one: code_of(lambda: one.write((b"k", b"v"), transactional_id="x")),
            KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ),
        (
            ("Describe", "topic", "t"),
            lambda one: code_of(lambda: one.host.consumer({}).get_watermark_offsets(TopicPartition("t", 0))),
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
        ),
        (
            ("Read", "group", "g"),
            lambda one: code_of(lambda: one.host.consumer({"group.id": "g"}).committed([TopicPartition("t", 0)])),
            KafkaError.GROUP_AUTHORIZATION_FAILED,
        ),
    ],
)
def test_what_is_denied_is_refused(denied: tuple[str, str, str], call: Callable[[Bench], int], code: int) -> None:
    bench = Bench()
    bench.kafka.denied.add(denied)
    assert call(bench) == code


def test_a_partition_that_may_not_be_read_gives_one_error_and_goes_on_when_it_may() -> None:
    bench = Bench()
    bench.write((b"k", b"v"))
    bench.kafka.denied.add(("Read", "topic", "t"))
    consumer = bench.host.consumer({})
    consumer.assign([TopicPartition("t", 0, 0)])
    errors = [one.error() for one in consumer.consume(10, 1)]
    assert [error.code() for error in errors if error is not None] == [KafkaError.TOPIC_AUTHORIZATION_FAILED]
    bench.kafka.denied.clear()
    assert [one.value() for one in consumer.consume(10, 1)] == [b"v"]


def test_a_member_whose_session_has_ended_learns_it_and_joins_again() -> None:
    bench = Bench()
    events: list[str] = []
    consumer = bench.host.consumer({"group.id": "g"})

    def note(what: str) -> Callable[[Any, list[TopicPartition]], None]:
        return lambda _, partitions: events.append(f"{what} {[one.partition for one in partitions]}")

    consumer.subscribe(["t"], on_assign=note("assigned"), on_revoke=note("revoked"), on_lost=note("lost"))
    consumer.poll(0)
    group = bench.kafka.groups["g"]
    with bench.kafka.schedule:
        group.expel(group.members[0])
    assert group.members == []
    consumer.poll(0.1)
    assert events == ["assigned [0]", "lost [0]", "assigned [0]"]
    assert len(group.members) == 1


def test_the_same_seed_and_the_same_steps_give_the_same_run() -> None:
    """Ids, places of records without a key, and the times of markers come from the seed."""

    def run(seed: int) -> list[object]:
        bench = Bench(seed=seed)
        bench.host.admin({}).create_topics([NewTopic("many", 8, 1)])
        producer = bench.begun()
        places: list[int | None] = []
        for _ in range(20):
            producer.produce("many", b"v", on_delivery=lambda _, one: places.append(one.partition()))
        producer.commit_transaction(10)
        producer.poll(5)
        times = [one.appended_at for part in bench.kafka.topics["many"].partitions for one in part.records]
        return [str(bench.kafka.topics["t"].id), places, times]

    assert run(1) == run(1)
    assert run(1) != run(2)
