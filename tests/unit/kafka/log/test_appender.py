"""The writer of single records, with a producer that fails in ways that a test's broker does not."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from halfway.domain.errors import MessageTooLargeError, OutcomeUnknownError, OverloadedError
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.log.appender import Record, RecordWriter
from halfway.service.answers import answer_all
from tests.support.loop_time import LoopTime
from tests.support.waiting import until_true

LONG_S = 60.0
Report = Callable[[KafkaError | None, Any], None]


class Delivered:
    """A delivered message, with the members that the writer uses."""

    def __init__(self, offset: int, key: bytes) -> None:
        self._offset = offset
        self._key = key

    def key(self) -> bytes:
        return self._key

    def offset(self) -> int:
        return self._offset

    def topic(self) -> str:
        return "t"


class ScriptedProducer:
    """Holds produced records until the test decides their outcome."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.held: list[tuple[bytes, Report]] = []
        self.events: deque[Callable[[], object]] = deque()
        self.refuse: Exception | None = None
        self.purged = False
        self.keeps_its_records = False
        self._wake = threading.Event()

    def __len__(self) -> int:
        return len(self.held)

    def produce(self, _topic: str, _value: bytes, key: bytes, _partition: int, report: Report, *_rest: object) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.held.append((key, report))

    def poll(self, timeout: float) -> int:
        self._wake.wait(timeout)
        self._wake.clear()
        done = 0
        while self.events:
            self.events.popleft()()
            done += 1
        return done

    def purge(self, **_how: bool) -> None:
        self.purged = True
        if self.keeps_its_records:
            return
        error = KafkaError(KafkaError._PURGE_INFLIGHT)
        for key, report in self.held:
            self.events.append(partial(report, error, Delivered(-1, key)))
        self.held.clear()

    def deliver(self, *offsets: int) -> None:
        """Deliver the oldest messages, all in one poll."""
        for offset in offsets:
            key, report = self.held.pop(0)
            self.events.append(partial(report, None, Delivered(offset, key)))
        self._wake.set()

    def fail(self, code: int) -> None:
        key, report = self.held.pop(0)
        self.events.append(partial(report, KafkaError(code), Delivered(-1, key)))
        self._wake.set()

    def die(self) -> None:
        """Report a fatal error, as librdkafka does."""
        error = KafkaError(KafkaError._FATAL, "scripted", fatal=True)
        self.refuse = KafkaException(error)
        self.events.append(partial(self.config["error_cb"], error))
        self._wake.set()


class Bench:
    """A writer over scripted producers."""

    def __init__(self, **fields: Any) -> None:
        self.producers: list[ScriptedProducer] = []
        settings: dict[str, Any] = {"properties": {"bootstrap.servers": "unused:1"}, "max_prepare_bytes": 1_000}
        config = KafkaConfig(**(settings | fields))
        self.writer = RecordWriter(config, name="test", make_producer=self._make)

    def _make(self, config: dict[str, Any]) -> Any:
        self.producers.append(ScriptedProducer(config))
        return self.producers[-1]

    def append(self, *, size: int = 10, within_s: float = LONG_S) -> asyncio.Future[int]:
        return self.append_all(1, size=size, within_s=within_s)[0]

    def append_all(self, count: int, *, size: int = 10, within_s: float = LONG_S) -> list[asyncio.Future[int]]:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(count)]
        records: list[Record[asyncio.Future[int]]] = [
            (b"%d" % place, b"x" * (size - 1), [], future) for place, future in enumerate(futures)
        ]
        self.writer.append("t", 0, records, answer_all, deadline=loop.time() + within_s)
        return futures


@pytest.fixture
async def make_bench() -> AsyncIterator[Callable[..., Bench]]:
    """Create benches whose writers are stopped at the end."""
    benches: list[Bench] = []

    def make(**fields: Any) -> Bench:
        benches.append(Bench(**fields))
        benches[-1].writer.start()
        return benches[-1]

    yield make
    for bench in benches:
        await bench.writer.stop()


async def test_each_caller_gets_its_own_offset(make_bench: Callable[..., Bench]) -> None:
    """The reports of one poll reach their own callers."""
    bench = make_bench()
    tasks = [bench.append() for _ in range(5)]
    await until_true(lambda: len(bench.producers[0].held) == 5)
    bench.producers[0].deliver(7, 8, 9, 10, 11)
    assert await asyncio.gather(*tasks) == [7, 8, 9, 10, 11]
    assert bench.writer.in_flight == (0, 0)


async def test_each_record_of_a_list_gets_its_own_answer(make_bench: Callable[..., Bench]) -> None:
    """In any order of the reports, and although one of the records failed."""
    bench = make_bench()
    first, second, third = bench.append_all(3)
    producer = bench.producers[0]
    producer.held.reverse()
    producer.deliver(9)
    producer.fail(KafkaError._MSG_TIMED_OUT)
    producer.deliver(7)
    assert (await first, await third) == (7, 9)
    with pytest.raises(OutcomeUnknownError):
        await second
    assert bench.writer.in_flight == (0, 0)


async def test_of_a_list_past_its_deadline_what_was_delivered_is_answered(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    first, second, third = bench.append_all(3)
    bench.producers[0].deliver(7)
    assert await first == 7
    LoopTime().advance(LONG_S)
    for late in (second, third):
        with pytest.raises(OutcomeUnknownError):
            await late
    assert bench.writer.in_flight == (2, 20)
    bench.producers[0].deliver(8, 9)
    await until_true(lambda: bench.writer.in_flight == (0, 0))


async def test_a_failed_delivery_is_ambiguous(make_bench: Callable[..., Bench]) -> None:
    """A time-out in flight may have stored the record or not."""
    bench = make_bench()
    task = bench.append()
    await until_true(lambda: len(bench.producers[0].held) == 1)
    bench.producers[0].fail(KafkaError._MSG_TIMED_OUT)
    with pytest.raises(OutcomeUnknownError):
        await task


async def test_a_record_that_the_broker_finds_too_large_was_not_stored(make_bench: Callable[..., Bench]) -> None:
    """The broker refuses it before it stores anything."""
    bench = make_bench()
    task = bench.append()
    await until_true(lambda: len(bench.producers[0].held) == 1)
    bench.producers[0].fail(KafkaError.MSG_SIZE_TOO_LARGE)
    with pytest.raises(MessageTooLargeError):
        await task


async def test_a_fatal_error_replaces_the_producer_and_what_was_in_flight_is_ambiguous(
    make_bench: Callable[..., Bench],
) -> None:
    """The next append goes to a new producer; appends in flight get an ambiguous error."""
    bench = make_bench()
    lost = [bench.append() for _ in range(3)]
    await until_true(lambda: len(bench.producers[0].held) == 3)
    bench.producers[0].die()
    for error in await asyncio.gather(*lost, return_exceptions=True):
        assert isinstance(error, OutcomeUnknownError)
    assert bench.producers[0].purged
    next_one = bench.append()
    await until_true(lambda: len(bench.producers) == 2 and len(bench.producers[1].held) == 1)
    bench.producers[1].deliver(3)
    assert await next_one == 3
    assert bench.writer.in_flight == (0, 0)


async def test_a_new_producer_is_served_while_the_failed_one_retires(make_bench: Callable[..., Bench]) -> None:
    """Its reports do not wait for the records of the failed one; its own fatal error replaces it too."""
    bench = make_bench(prepare_timeout_s=5)
    lost = bench.append()
    await until_true(lambda: len(bench.producers[0].held) == 1)
    bench.producers[0].keeps_its_records = True
    bench.producers[0].die()
    await until_true(lambda: len(bench.producers) == 2 and bench.producers[0].purged)
    next_one = bench.append(within_s=9)  # the failed one retires for 10 s
    await until_true(lambda: len(bench.producers[1].held) == 1)
    bench.producers[1].deliver(3)
    assert await next_one == 3
    bench.producers[1].die()
    await until_true(lambda: not bench.producers[1].events)
    bench.producers[0].fail(KafkaError._PURGE_INFLIGHT)
    with pytest.raises(OutcomeUnknownError):
        await lost
    await until_true(lambda: len(bench.producers) == 3)


async def test_an_append_while_the_producer_is_replaced_is_not_stored(make_bench: Callable[..., Bench]) -> None:
    """A fatal producer refuses at once: the caller may try again."""
    bench = make_bench()
    bench.producers[0].refuse = KafkaException(KafkaError(KafkaError._FATAL))
    with pytest.raises(OverloadedError):
        await bench.append()
    assert bench.writer.in_flight == (0, 0)


async def test_records_in_flight_are_bounded(make_bench: Callable[..., Bench]) -> None:
    """One append above the limit is refused at once, and accepted after a delivery."""
    bench = make_bench(writer_in_flight=2)
    first, second = bench.append(), bench.append()
    await until_true(lambda: len(bench.producers[0].held) == 2)
    with pytest.raises(OverloadedError):
        await bench.append()
    bench.producers[0].deliver(0)
    assert await first == 0
    third = bench.append()
    await until_true(lambda: len(bench.producers[0].held) == 2)
    bench.producers[0].deliver(1, 2)
    assert (await second, await third) == (1, 2)


async def test_bytes_in_flight_are_bounded_but_one_record_always_fits(make_bench: Callable[..., Bench]) -> None:
    """A record above the limit is accepted if nothing else is in flight."""
    bench = make_bench(writer_in_flight_bytes=100)
    large = bench.append(size=150)
    await until_true(lambda: len(bench.producers[0].held) == 1)
    with pytest.raises(OverloadedError):
        await bench.append(size=1)
    bench.producers[0].deliver(0)
    assert await large == 0


async def test_past_the_deadline_it_is_not_known_and_still_counts_as_in_flight(
    make_bench: Callable[..., Bench],
) -> None:
    """Callers that give up do not make room for more records than Kafka takes."""
    bench = make_bench()
    late = bench.append()
    LoopTime().advance(LONG_S)
    with pytest.raises(OutcomeUnknownError):
        await late
    assert bench.writer.in_flight == (1, 10)
    bench.producers[0].deliver(0)
    await until_true(lambda: bench.writer.in_flight == (0, 0))


async def test_with_no_time_left_nothing_is_produced(make_bench: Callable[..., Bench]) -> None:
    """A deadline that has passed is an error that reports that nothing was stored."""
    bench = make_bench()
    with pytest.raises(OverloadedError):
        await bench.append(within_s=-1)
    assert len(bench.producers[0]) == 0


async def test_stopping_tells_those_who_wait() -> None:
    """Appends in flight after the prepare time-out are ambiguous; no new ones are accepted."""
    bench = Bench(prepare_timeout_s=0.1)
    bench.writer.start()
    task = bench.append()
    await until_true(lambda: len(bench.producers[0].held) == 1)
    await bench.writer.stop()
    with pytest.raises(OutcomeUnknownError):
        await task
    with pytest.raises(OverloadedError):
        await bench.append()
