"""Audit events while Kafka does not accept them."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from halfway.kafka.log import registries
from halfway.kafka.log.registries import KafkaAuditTrail
from halfway.protocol.errors import OutcomeUnknownError
from tests.support.ownership.cluster_harness import config_of
from tests.support.records.samples import AUDIT_EVENT
from tests.support.surroundings import RecordingObserver
from tests.support.waiting import GENEROUS_S


class Writer:
    """A writer that the test blocks or unblocks."""

    def __init__(self, *_: object, **__: object) -> None:
        self.open = asyncio.Event()
        self.refuses = False
        self.written: list[bytes] = []

    def start(self) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Do nothing."""

    async def append_one(self, _topic: str, _partition: int, *, value: bytes, **_: object) -> int:
        if self.refuses:
            self.refuses = False
            raise OutcomeUnknownError("not confirmed")
        await self.open.wait()
        self.written.append(value)
        return len(self.written)


@pytest.fixture
def make_trail(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[KafkaAuditTrail, Writer, RecordingObserver]]:
    monkeypatch.setattr(registries, "RecordWriter", Writer)
    monkeypatch.setattr(registries, "_REWRITE_S", 0.001)
    monkeypatch.setattr(registries, "_STOP_S", 0.05)

    def make() -> tuple[KafkaAuditTrail, Writer, RecordingObserver]:
        observer = RecordingObserver()
        audit = KafkaAuditTrail(config_of("127.0.0.1:1"), observer)
        return audit, audit._writer, observer  # type: ignore[return-value]  # it is the one above

    return make


async def test_while_kafka_takes_nothing_events_wait_up_to_a_bound_and_nobody_waits_for_them(
    make_trail: Callable[[], tuple[KafkaAuditTrail, Writer, RecordingObserver]],
) -> None:
    """Events above the limit are counted and logged; waiting ones are written once Kafka is back."""
    audit, writer, observer = make_trail()
    await audit.start()
    for number in range(registries.MAX_WAITING + 7):
        audit.record(msgspec.structs.replace(AUDIT_EVENT, id=str(number), actor_kind="operator"))
    assert observer.count("audited", result="lost") == 7
    writer.open.set()
    await audit.stop()
    assert len(writer.written) == registries.MAX_WAITING
    assert observer.count("audited", result="written") == registries.MAX_WAITING


async def test_groups_leave_half_of_the_places_to_operators(
    make_trail: Callable[[], tuple[KafkaAuditTrail, Writer, RecordingObserver]],
) -> None:
    """Otherwise a service that requests checks without end would keep operators' events out of the topic."""
    audit, writer, observer = make_trail()
    await audit.start()
    for kind, count in (("group", registries.MAX_WAITING), ("operator", registries.MAX_WAITING // 2)):
        for _ in range(count):
            audit.record(msgspec.structs.replace(AUDIT_EVENT, actor_kind=kind))
        assert observer.count("audited", result="lost") == registries.MAX_WAITING // 2
    writer.open.set()
    await audit.stop()


async def test_an_event_that_is_not_confirmed_is_written_again(
    make_trail: Callable[[], tuple[KafkaAuditTrail, Writer, RecordingObserver]],
) -> None:
    audit, writer, observer = make_trail()
    writer.refuses = True
    writer.open.set()
    await audit.start()
    audit.record(AUDIT_EVENT)
    await audit.stop()
    assert (len(writer.written), observer.count("audited", result="written")) == (1, 1)


async def test_a_stop_does_not_wait_for_a_kafka_that_is_away(
    make_trail: Callable[[], tuple[KafkaAuditTrail, Writer, RecordingObserver]],
) -> None:
    """Events that it could not write are counted as lost."""
    audit, _, observer = make_trail()
    await audit.start()
    audit.record(AUDIT_EVENT)
    async with asyncio.timeout(GENEROUS_S):
        await audit.stop()
    assert observer.count("audited", result="lost") == 1


async def test_an_event_that_cannot_be_written_at_all_keeps_back_no_other(
    make_trail: Callable[[], tuple[KafkaAuditTrail, Writer, RecordingObserver]],
) -> None:
    """It is counted as lost, and the events after it are written."""
    audit, writer, observer = make_trail()
    writer.open.set()
    await audit.start()
    audit.record(msgspec.structs.replace(AUDIT_EVENT, subject="\ud800"))  # has no UTF-8
    audit.record(AUDIT_EVENT)
    await audit.stop()
    assert len(writer.written) == 1
    assert (observer.count("audited", result="lost"), observer.count("audited", result="written")) == (1, 1)
