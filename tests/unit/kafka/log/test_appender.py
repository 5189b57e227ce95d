"""The writer of single records, with producers that fail in ways that a test's broker does not.

Most are scripted. The last tests hold the script to the real client, which they make fail in the same ways.
"""

import asyncio
import ctypes
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, cimpl

from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.seam import Clients
from halfway.kafka.clients.threads import answer_all
from halfway.kafka.log import half_log as appender
from halfway.kafka.log.half_log import Record, RecordWriter
from halfway.protocol.errors import OutcomeUnknownError, OverloadedError, TopicUnavailableError
from tests.support.loop_time import LoopTime
from tests.support.waiting import until_true

_HANDLE: Final = object.__basicsize__
"""Where confluent-kafka's clients keep librdkafka's handle: it is their first member."""


def fail_for_good(producer: Producer, code: int) -> None:
    """Make a client fail with a fatal error, as a broker's answer would, by librdkafka's own hook for tests."""
    [library] = (Path(str(cimpl.__file__)).parent.parent / "confluent_kafka.libs").glob("librdkafka*")
    raise_fatal = ctypes.CDLL(str(library)).rd_kafka_test_fatal_error
    raise_fatal.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p]
    handle = ctypes.c_void_p.from_address(id(producer) + _HANDLE)
    assert raise_fatal(handle, code, b"by a test") == 0


LONG_S = 60.0
CAUSE = KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER
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


def _raise(error: KafkaError) -> None:
    raise KafkaException(error)


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
        """Fail for good, as `test_a_scripted_producer_fails_as_a_real_one_does` demands."""
        self.refuse = KafkaException(KafkaError(KafkaError._FATAL, "scripted"))
        self.events.append(partial(_raise, KafkaError(CAUSE, "scripted", fatal=True)))
        self._wake.set()


class Bench:
    """A writer over scripted producers."""

    def __init__(self, **fields: Any) -> None:
        self.producers: list[ScriptedProducer] = []
        settings: dict[str, Any] = {"properties": {"bootstrap.servers": "unused:1"}, "max_prepare_bytes": 1_000}
        self.make: Callable[[dict[str, Any]], Any] = self.make_scripted
        clients = Clients(producer=lambda properties: self.make(properties))  # noqa: PLW0108 - it changes
        self.writer = RecordWriter(KafkaConfig(**(settings | fields), clients=clients), name="test")

    def make_scripted(self, config: dict[str, Any]) -> Any:
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
async def make_bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Bench]]:
    """Create benches whose writers are stopped at the end."""
    monkeypatch.setattr(appender, "_REPLACE_S", 0.0)
    benches: list[Bench] = []

    def make(**fields: Any) -> Bench:
        benches.append(Bench(**fields))
        benches[-1].writer.start()
        return benches[-1]

    yield make
    for bench in benches:
        await bench.writer.stop()


async def test_each_record_of_a_list_gets_its_own_answer(make_bench: Callable[..., Bench]) -> None:
    """In any order of the reports. One that timed out in flight may be stored or not."""
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
    """The rest still counts as in flight: callers that give up make no room for more records than Kafka takes."""
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


async def test_a_record_that_the_broker_finds_too_large_was_not_stored(make_bench: Callable[..., Bench]) -> None:
    """The broker refuses it before it stores anything. The topic is to blame: larger records are refused before."""
    bench = make_bench()
    task = bench.append()
    await until_true(lambda: len(bench.producers[0].held) == 1)
    bench.producers[0].fail(KafkaError.MSG_SIZE_TOO_LARGE)
    with pytest.raises(TopicUnavailableError, match=r"max\.message\.bytes") as caught:
        await task
    assert caught.value.fields["topic"]


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


async def test_a_report_that_raises_costs_a_producer_and_not_the_thread(make_bench: Callable[..., Bench]) -> None:
    """The thread that serves everybody goes on, whatever happens in it."""
    bench = make_bench()
    lost = bench.append()
    await until_true(lambda: len(bench.producers[0].held) == 1)
    bench.producers[0].events.append(lambda: 1 // 0)
    with pytest.raises(OutcomeUnknownError):
        await lost
    next_one = bench.append()
    await until_true(lambda: len(bench.producers[1].held) == 1)
    bench.producers[1].deliver(3)
    assert await next_one == 3


async def test_trouble_is_a_writer_that_hears_nothing(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that waits for its first report is none; one that waits for longer than librdkafka keeps it is."""
    monkeypatch.setattr(appender, "_UNREPORTED", 0)
    bench = make_bench()
    assert bench.writer.trouble is None
    waiting = bench.append()
    assert "no delivery report" in str(bench.writer.trouble)
    await until_true(lambda: len(bench.producers[0].held) == 1)
    bench.producers[0].deliver(0)
    await waiting
    assert bench.writer.trouble is None


async def test_trouble_is_a_failed_producer_that_cannot_be_replaced(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with the first producer that can be made again."""
    bench = make_bench()
    monkeypatch.setattr(appender, "_SILENT_S", 0.2)

    def refuse(_config: object) -> Producer:
        raise RuntimeError("can't start new thread")

    bench.make = refuse
    bench.producers[0].die()
    await until_true(lambda: "working producer" in str(bench.writer.trouble))
    bench.make = bench.make_scripted
    await until_true(lambda: bench.writer.trouble is None)


def real_producer(config: dict[str, Any]) -> Producer:
    return Producer({**config, "bootstrap.servers": "127.0.0.1:1", "enable.idempotence": True, "log_level": 0})


def die(producer: Any) -> None:
    if isinstance(producer, ScriptedProducer):
        producer.die()
    else:
        fail_for_good(producer, CAUSE)


@pytest.mark.parametrize("make", [ScriptedProducer, real_producer])
def test_a_scripted_producer_fails_as_a_real_one_does(make: Callable[[dict[str, Any]], Any]) -> None:
    """`poll` raises the cause once and `error_cb` does not get it; then `produce` raises; a purge reports the rest."""
    called: list[KafkaError] = []
    producer = make({"error_cb": called.append})
    reports: list[KafkaError | None] = []

    def produce() -> None:
        producer.produce("t", b"v", b"k", 0, lambda error, _message: reports.append(error), None, 0, [])

    def poll() -> KafkaError | None:
        try:
            producer.poll(0.1)
        except KafkaException as exception:
            error: KafkaError = exception.args[0]
            return error
        return None

    produce()
    die(producer)
    found = [poll() for _ in range(10)]
    [fatal] = [error for error in found if error is not None]
    assert (fatal.code(), fatal.fatal()) == (CAUSE, True)
    assert not any(error.fatal() for error in called)
    with pytest.raises(KafkaException) as refused:
        produce()
    assert (refused.value.args[0].code(), refused.value.args[0].fatal()) == (KafkaError._FATAL, False)
    producer.purge(in_queue=True, in_flight=True, blocking=True)
    assert [poll() for _ in range(5)] == [None] * 5
    [report] = reports
    assert report is not None
    assert report.code() in (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)
    assert len(producer) == 0


async def test_a_fatal_error_of_a_real_producer_replaces_it() -> None:
    """What it held is ambiguous, and the next record is with another producer, twice."""
    producers: list[Producer] = []

    def make(config: dict[str, Any]) -> Producer:
        producers.append(real_producer(config))
        return producers[-1]

    def has_made(count: int) -> bool:
        return len(producers) == count

    settings = {"bootstrap.servers": "unused:1"}
    clients = Clients(producer=make)
    config = KafkaConfig(properties=settings, max_prepare_bytes=1_000, prepare_timeout_s=1, clients=clients)
    writer = RecordWriter(config, name="test")
    writer.start()
    deadline = asyncio.get_running_loop().time() + LONG_S
    for number in (0, 1):
        lost = writer.append_one("t", 0, key=b"k", value=b"v", headers=[], deadline=deadline)
        fail_for_good(producers[number], CAUSE)
        with pytest.raises(OutcomeUnknownError):
            await lost
        await until_true(partial(has_made, number + 2))
    assert (writer.trouble, writer.in_flight) == (None, (0, 0))
    last = writer.append_one("t", 0, key=b"k", value=b"v", headers=[], deadline=deadline)
    assert not last.done()
    await writer.stop()
    with pytest.raises(OutcomeUnknownError):
        await last
