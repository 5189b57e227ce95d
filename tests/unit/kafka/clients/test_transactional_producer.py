"""A takeover waits for every former producer except those of the same process that have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from halfway.kafka.clients import transactional_producer
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.clients.seam import Clients
from halfway.kafka.clients.transactional_producer import (
    UNSETTLED,
    ProducerFailedError,
    TransactionalProducer,
    fence,
    initialised,
)
from halfway.kafka.lane.suspect_lane import Rehearsal
from halfway.kafka.records.lane_records import ANY_PARTITION, UserRecord


class Chosen:
    """What makes producers in this test."""

    make: Callable[[dict[str, Any]], Any]


CONFIG = KafkaConfig(
    properties={"bootstrap.servers": "unused:1"},
    max_prepare_bytes=1_000,
    clients=Clients(producer=lambda properties: Chosen.make(properties)),  # noqa: PLW0108 - it changes
)
SOON_S = 45.0
LONG_S = 60.0


class ScriptedProducer:
    """A client whose id cannot be settled while it is in `unsettled`, and that ends when the test allows it."""

    unsettled: frozenset[str] = frozenset()
    failing: frozenset[str] = frozenset()
    """Ids whose last transaction can neither be committed nor aborted."""
    fenced = False
    """Whether the client knows that it was fenced; then every poll raises."""
    may_end = threading.Event()
    closed: list[str]

    def __init__(self, settings: dict[str, Any]) -> None:
        self.id = settings["transactional.id"]

    def init_transactions(self, _timeout: float) -> None:
        if self.id in self.unsettled:
            time.sleep(0.01)
            raise KafkaException(KafkaError(UNSETTLED, "scripted", False, True, False))

    def list_topics(self, *_args: Any, **_fields: Any) -> None: ...

    def begin_transaction(self) -> None: ...

    def abort_transaction(self, _timeout: float) -> None: ...

    def produce(self, *_record: Any, on_delivery: Callable[[Any, Any], None], **_fields: Any) -> None:
        on_delivery(None, SimpleNamespace(offset=lambda: 0))

    def purge(self) -> None: ...

    def poll(self, _timeout: float) -> None:
        if self.fenced:
            raise KafkaException(KafkaError(KafkaError._FENCED, "scripted", True, False, False))

    def flush(self, timeout: float) -> int:
        self.poll(timeout)
        return 0 if self.may_end.wait(SOON_S) else 1

    def close(self) -> bool:
        self.closed.append(self.id)
        if self.id in self.failing:
            raise KafkaException(KafkaError(KafkaError.INVALID_TXN_STATE, "scripted", True, False, False))
        return True

    def __len__(self) -> int:
        return int(self.fenced)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ScriptedProducer]]:
    class Scripted(ScriptedProducer):
        closed: list[str] = []  # noqa: RUF012 - one for each test
        may_end = threading.Event()

    Scripted.may_end.set()
    monkeypatch.setattr(Chosen, "make", Scripted, raising=False)
    monkeypatch.setattr(transactional_producer, "_SETTLE_S", 0.1)
    yield Scripted
    Scripted.may_end.set()


def until_closed(scripted: type[ScriptedProducer], *ids: str) -> None:
    until = time.monotonic() + SOON_S
    while not set(ids) <= set(scripted.closed):
        assert time.monotonic() < until
        time.sleep(0.01)


def abandoned_lane(name: str) -> None:
    """Make this process use a lane id and abandon it."""
    [producer] = initialised(CONFIG, [name], time.monotonic() + SOON_S, of_a_lane=True)
    producer.abandon()


def refused(name: str, seconds: float) -> float:
    """Fence an id that cannot be settled; return how long this was tried."""
    started = time.monotonic()
    with pytest.raises(ProducerFailedError) as failed:
        fence(CONFIG, [name], started + seconds)
    assert failed.value.code == UNSETTLED
    return time.monotonic() - started


def test_a_former_producer_of_this_process_is_not_waited_for(scripted: type[ScriptedProducer]) -> None:
    """Its client has ended, so it sends nothing more. Other ids are still fenced."""
    abandoned_lane("own.0")
    until_closed(scripted, "own.0")
    scripted.unsettled = frozenset({"own.0"})
    fence(CONFIG, ["own.0", "another.0"], time.monotonic() + LONG_S)


def test_a_producer_of_another_process_is_waited_for(scripted: type[ScriptedProducer]) -> None:
    """An unsettled id may not be fenced, regardless of the number of tries."""
    scripted.unsettled = frozenset({"foreign.0"})
    for _ in range(2):
        assert refused("foreign.0", 0.5) >= 0.5


def test_a_former_producer_is_waited_for_until_its_client_has_ended(scripted: type[ScriptedProducer]) -> None:
    """A client that does not end may still send."""
    scripted.may_end.clear()
    abandoned_lane("hanging.0")
    scripted.unsettled = frozenset({"hanging.0"})
    assert refused("hanging.0", 0.5) >= 0.5
    scripted.may_end.set()
    until_closed(scripted, "hanging.0")
    fence(CONFIG, ["hanging.0"], time.monotonic() + LONG_S)


def test_a_former_producer_that_cannot_be_closed_is_waited_for(
    scripted: type[ScriptedProducer], capfd: pytest.CaptureFixture[str]
) -> None:
    """Its transaction could not be aborted: one log line reports this, and it does not count as ended."""
    scripted.failing = frozenset({"failing.0"})
    abandoned_lane("failing.0")
    until_closed(scripted, "failing.0")
    scripted.unsettled = frozenset({"failing.0"})
    assert refused("failing.0", 0.5) >= 0.5
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("step", [lambda lane: lane.commit(1), lambda lane: lane.idle()], ids=["commit", "idle"])
def test_a_producer_that_was_fenced_says_so_even_before_it_is_asked_for_anything(
    scripted: type[ScriptedProducer], step: Callable[[TransactionalProducer], None]
) -> None:
    """The client raises its fatal error from any call that runs its callbacks."""
    [lane] = initialised(CONFIG, ["lane.0"], time.monotonic() + SOON_S)
    scripted.fenced = True
    with pytest.raises(ProducerFailedError) as failed:
        step(lane)
    assert failed.value.fenced


def test_a_rehearsal_whose_client_has_failed_goes_on_with_another(scripted: type[ScriptedProducer]) -> None:
    """The suspect lane is not affected: in use, an error is about the topic; idle, there is none."""
    rehearsal = Rehearsal(CONFIG, "rehearsal.r")
    messages = [UserRecord("orders", b"tried", None, ANY_PARTITION, [])]
    assert rehearsal.attempt("orders", messages) is None
    scripted.fenced = True
    rehearsal.idle()
    verdict = rehearsal.attempt("orders", messages)
    assert verdict is not None
    assert verdict.code == KafkaError._FENCED
    scripted.fenced = False
    assert rehearsal.attempt("orders", messages) is None
    rehearsal.close()


class Committing(ScriptedProducer):
    """A client whose commits end one after the other as given: with the messages left, and the error."""

    waiting = 0
    answers: list[tuple[int, KafkaError | None]]
    given_s: list[float]

    def __len__(self) -> int:
        return self.waiting

    def commit_transaction(self, timeout: float) -> None:
        self.given_s.append(timeout)
        type(self).waiting, error = self.answers.pop(0)
        if error is not None:
            raise KafkaException(error)


def retryable(code: int) -> KafkaError:
    """Return an error after which the same call may be repeated."""
    return KafkaError(code, "scripted", False, True, False)


@pytest.fixture
def committing(monkeypatch: pytest.MonkeyPatch) -> type[Committing]:
    class Scripted(Committing):
        answers: list[tuple[int, KafkaError | None]] = []  # noqa: RUF012 - one for each test
        given_s: list[float] = []  # noqa: RUF012

    monkeypatch.setattr(Chosen, "make", Scripted, raising=False)
    return Scripted


def test_a_commit_that_has_timed_out_with_nothing_to_flush_is_not_called_again(committing: type[Committing]) -> None:
    """Librdkafka would end the process if its own thread did not answer the second call in time."""
    committing.answers += [(0, retryable(KafkaError._TIMED_OUT)), (0, None)]
    with pytest.raises(ProducerFailedError) as failed:
        TransactionalProducer(CONFIG, "lane.0").commit(LONG_S)
    assert failed.value.stalled
    assert committing.given_s == [LONG_S]


def test_a_commit_gets_all_of_the_time_once_its_messages_have_left(committing: type[Committing]) -> None:
    """Before that, calls are short, because only the next one reports that the transaction has failed."""
    committing.waiting = 2
    committing.answers += [(1, retryable(KafkaError._TIMED_OUT)), (0, retryable(KafkaError._TIMED_OUT)), (0, None)]
    TransactionalProducer(CONFIG, "lane.0").commit(LONG_S)
    assert committing.given_s == [transactional_producer._SLICE_S, transactional_producer._SLICE_S, LONG_S]


def test_a_commit_that_could_not_be_asked_for_is_called_again(committing: type[Committing]) -> None:
    """It uses all of the time: a shorter call times out before librdkafka has noticed it."""
    committing.answers += [(0, retryable(KafkaError._STATE)), (0, None)]
    TransactionalProducer(CONFIG, "lane.0").commit(LONG_S)
    assert committing.given_s == [LONG_S, LONG_S]
