"""Prepares in half, and records read back by offset, on a real broker."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from confluent_kafka import Producer

from halfway.embedded import EmbeddedConfig, EmbeddedKafka
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.librdkafka_events import ROUND_TRIPS, RoundTrips
from halfway.kafka.log.half_log import KafkaHalfLog
from halfway.kafka.topics.provisioning import InternalTopics
from halfway.protocol.errors import KafkaUnavailableError, MessageTooLargeError, OutcomeUnknownError
from halfway.protocol.records import Half, Message
from tests.support.brokers.fixtures import Kafka
from tests.support.brokers.jvm import STARTED_WITHIN_S, STEADY, short_lived
from tests.support.ownership.cluster_harness import PATIENCE_S, config_of, delete_all, produce
from tests.support.replies import appended
from tests.support.surroundings import RecordingObserver
from tests.support.waiting import eventually, until_true


def half(name: str, size: int = 100) -> Half:
    return Half(
        id=name,
        group="orders",
        messages=(Message(topic="coupon", key=b"k", value=b"v" * size, headers=(("h", None),)),),
        prepared_at=1_755_000_000_000,
        since=1_755_000_000_000,
        fingerprint=bytes(16),
    )


def patience() -> float:
    """Return a deadline that only a hanging call reaches."""
    return asyncio.get_running_loop().time() + PATIENCE_S


async def make_topics(config: KafkaConfig) -> None:
    topics = InternalTopics(config)
    await topics.ensure(timeout_s=PATIENCE_S)
    topics.close()


@asynccontextmanager
async def running(config: KafkaConfig, skipped: RecordingObserver) -> AsyncIterator[KafkaHalfLog]:
    log = KafkaHalfLog(config, skipped)
    await log.start()
    try:
        yield log
    finally:
        await log.stop()


@pytest.fixture
async def config(kafka: Kafka) -> AsyncIterator[KafkaConfig]:
    """Return a new prefix with its topics."""
    config = config_of(kafka.bootstrap_servers)
    await make_topics(config)
    yield config
    delete_all(config)


@pytest.fixture
def skipped() -> RecordingObserver:
    return RecordingObserver()


@pytest.fixture
async def log(config: KafkaConfig, skipped: RecordingObserver) -> AsyncIterator[KafkaHalfLog]:
    """Return a running half log."""
    async with running(config, skipped) as log:
        yield log


async def test_many_reads_over_shards_in_any_order_each_get_their_record(log: KafkaHalfLog) -> None:
    """Reads are batched; adjacent, distant and repeated offsets are allowed."""
    written = [half(f"t{number}") for number in range(1_500)]
    places = [(number % 3, record) for number, record in enumerate(written)]
    offsets = await asyncio.gather(*(appended(log, shard, record, deadline=patience()) for shard, record in places))
    seed = random.randrange(1 << 32)
    print("seed", seed)  # noqa: T201 - shown if the test fails
    wanted = [*random.Random(seed).choices(range(len(written)), k=400), 0, 0, 1_499]
    read = await asyncio.gather(
        *(log.read_half(places[n][0], offsets[n], written[n].id, deadline=patience()) for n in wanted)
    )
    assert read == [written[n] for n in wanted]


async def test_an_offset_that_holds_a_control_record_is_an_error(config: KafkaConfig, log: KafkaHalfLog) -> None:
    """The reader passes gaps: it does not wait for records that never arrive."""
    producer = Producer(config.producer(**{"transactional.id": config.prefix + "t"}))
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    producer.produce(config.half_topic, None, b"x", 0)
    producer.commit_transaction(PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        while await log.half_end(0, deadline=patience()) < 2:  # the marker is written after the commit's answer
            pass
    last = await appended(log, 0, half("after"), deadline=patience())
    assert last == 2
    with pytest.raises(KafkaUnavailableError, match="is no longer in"):
        await log.read_half(0, 1, "x", deadline=patience())


async def test_an_undecodable_record_is_counted_and_said(
    config: KafkaConfig, log: KafkaHalfLog, skipped: RecordingObserver, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log line contains topic, partition and offset."""
    offset = produce(config, config.half_topic, 2, b"a", b"garbage")
    with pytest.raises(KafkaUnavailableError, match="cannot be decoded"):
        await log.read_half(2, offset, "a", deadline=patience())
    assert [call.fields for call in skipped.calls] == [{"topic": config.half_topic, "reason": "undecodable"}]
    assert "record_skipped" in capsys.readouterr().out


async def test_a_read_waits_until_what_stands_before_it_is_settled(config: KafkaConfig, log: KafkaHalfLog) -> None:
    """Nothing is read after an open Kafka transaction; reads of other shards continue."""
    producer = Producer(config.producer(**{"transactional.id": config.prefix + "t"}))
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    producer.produce(config.half_topic, None, b"x", 0)
    producer.flush(PATIENCE_S)
    behind = await appended(log, 0, half("behind"), deadline=patience())
    beside = await appended(log, 1, half("beside"), deadline=patience())
    read = asyncio.create_task(log.read_half(0, behind, "behind", deadline=patience()))
    assert await log.read_half(1, beside, "beside", deadline=patience()) == half("beside")
    assert not read.done()
    await asyncio.to_thread(producer.abort_transaction, PATIENCE_S)
    assert await read == half("behind")


async def test_the_largest_prepare_fits_and_one_above_is_refused(log: KafkaHalfLog, config: KafkaConfig) -> None:
    """A record within the limit is stored; one that could not be parked later is refused before anything is stored."""
    large = half("large", config.max_prepare_bytes)
    offset = await appended(log, 0, large, deadline=patience())
    assert await log.read_half(0, offset, "large", deadline=patience()) == large
    with pytest.raises(MessageTooLargeError):
        await appended(log, 0, half("larger", config.half_record_bytes), deadline=patience())
    assert await log.half_end(0, deadline=patience()) == offset + 1


async def test_many_large_prepares_at_once_are_all_stored(log: KafkaHalfLog) -> None:
    """Batches stay below what the topic takes."""
    offsets = await asyncio.gather(
        *(appended(log, 0, half(f"t{number}", 200_000), deadline=patience()) for number in range(30))
    )
    assert sorted(offsets) == list(range(30))


async def test_the_end_is_that_of_uncommitted_reads_and_never_older_than_the_question(
    config: KafkaConfig, log: KafkaHalfLog
) -> None:
    """An append that was acknowledged before the call is before the end, including records of an open transaction."""
    assert await log.half_end(0, deadline=patience()) == 0

    async def append_and_ask(number: int) -> None:
        offset = await appended(log, 0, half(f"t{number}"), deadline=patience())
        assert await log.half_end(0, deadline=patience()) > offset

    await asyncio.gather(*(append_and_ask(number) for number in range(200)))
    producer = Producer(config.producer(**{"transactional.id": config.prefix + "t"}))
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    producer.produce(config.half_topic, None, b"x", 0)
    producer.flush(PATIENCE_S)
    assert await log.half_end(0, deadline=patience()) == 201
    producer.abort_transaction(PATIENCE_S)


async def append_at_last(log: KafkaHalfLog, record: Half) -> int:
    """Append until it succeeds: a broker that has just started may need longer than the short prepare time-out."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(OutcomeUnknownError):
                return await appended(log, 0, record, deadline=patience())


async def test_while_the_broker_hangs_everything_ends_by_its_deadline_and_recovers_after() -> None:
    """An append is ambiguous, a read and an end-offset call are unavailable; all work again with the broker."""
    steady = EmbeddedConfig(jvm_options=short_lived(), properties=STEADY, startup_timeout_s=STARTED_WITHIN_S)
    with EmbeddedKafka(steady) as broker:
        config = config_of(broker.bootstrap_servers, prepare_timeout_s=1)
        await make_topics(config)
        async with running(config, RecordingObserver()) as log:
            offset = await append_at_last(log, half("a"))
            await log.read_half(0, offset, "a", deadline=patience())
            broker.pause()
            soon = asyncio.get_running_loop().time() + 3
            results = await asyncio.gather(
                appended(log, 0, half("b"), deadline=patience()),
                log.read_half(0, offset, "a", deadline=soon),
                log.half_end(0, deadline=soon),
                return_exceptions=True,
            )
            assert [type(result) for result in results] == [
                OutcomeUnknownError,
                KafkaUnavailableError,
                KafkaUnavailableError,
            ]
            broker.resume()
            last = await append_at_last(log, half("c"))
            assert await log.read_half(0, last, "c", deadline=patience()) == half("c")
            assert await log.half_end(0, deadline=patience()) == last + 1


async def test_the_round_trips_to_each_broker_that_answers_are_known(
    config: KafkaConfig, skipped: RecordingObserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RoundTrips, "EVERY_MS", 100)
    monkeypatch.setattr(ROUND_TRIPS, "average_s", {})
    async with running(config, skipped) as log:

        async def round_trips() -> dict[str, float]:
            await appended(log, 0, half("a"), deadline=patience())
            return ROUND_TRIPS.average_s

        [(broker, average_s)] = (await eventually(round_trips, bool)).items()
        assert broker == "1"
        assert 0 < average_s < PATIENCE_S
        await until_true(lambda: not ROUND_TRIPS.p99_s, "no figures of a broker that nobody asks")
