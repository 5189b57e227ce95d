"""The consumer's decisions without Kafka: ids of records, refused settings, and pauses."""

import logging
import sqlite3
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import Producer

from halfway.client.consumer import (
    AsyncConsumer,
    AsyncInbox,
    Consumer,
    Inbox,
    InvalidSettingError,
    Record,
    RetentionTooShortError,
    Retries,
)
from halfway.client.consumer.inbox import _compare
from halfway.client.consumer.record import connection_settings, described, loggable
from tests.support.waiting import GENEROUS_S

KAFKA = {"bootstrap.servers": "127.0.0.1:1"}
DAY_MS = 86_400_000


async def _never(_record: Record, _connection: object) -> None:
    raise AssertionError


def record(*headers: tuple[str, bytes | None], **changes: Any) -> Record:
    place = {"topic": "orders", "partition": 1, "offset": 7, "timestamp_ms": 5, "key": None, "value": None}
    return Record(**{**place, **changes}, headers=headers)


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    @contextmanager
    def begin() -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(tmp_path / "points.sqlite")) as connection, connection:
            yield connection

    inbox = Inbox("sqlite", begin)
    inbox.create()
    return inbox


def test_a_message_of_halfway_is_recognised_wherever_it_stands() -> None:
    """A copy at another position, as a mirror or a dead letter that is sent back makes it, is the same message."""
    headers: list[tuple[str, bytes | None]] = [("halfway-transaction-id", b"3-01"), ("halfway-message", b"2/4")]
    assert record(*headers).id == record(*headers, ("more", b"x"), partition=2, offset=9, timestamp_ms=8).id
    assert record(*headers).id.startswith("#3-01/2/")
    assert record(*headers).transaction_id == "3-01"
    headers.insert(0, ("halfway-transaction-id", b"of-the-producer-itself"))
    assert record(*headers).id.startswith("#3-01/2/")


def test_a_consumer_waits_for_a_kafka_that_is_away_at_its_start(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As it does later: a service that starts in an outage needs nobody to start it again."""
    monkeypatch.setattr("halfway.client.consumer.inbox._TIMEOUT_S", 0.1)
    monkeypatch.setattr("halfway.client.consumer.consumer._LOOK_AGAIN_S", 0.1)
    consumer = Consumer(KAFKA, group="points", topics=["orders"], handle=lambda *_: None, inbox=inbox)
    running = threading.Thread(target=consumer.run)
    running.start()
    deadline = time.monotonic() + GENEROUS_S
    while caplog.text.count("Kafka: ") < 2:
        assert running.is_alive()
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.05)
    consumer.stop()
    running.join(GENEROUS_S)
    assert not running.is_alive()


def test_a_record_of_aiokafka_is_read_without_deserializers() -> None:
    """Otherwise its id would not be the one that other consumers give to it."""
    place: dict[str, Any] = {"topic": "orders", "partition": 1, "offset": 7, "timestamp": 5, "headers": ()}
    assert Record.of(SimpleNamespace(**place, key=None, value=b"v")).value == b"v"
    for wrong in ({"key": "k", "value": b"v"}, {"key": b"k", "value": {"total": 9}}):
        with pytest.raises(TypeError, match=r"the (key|value) is no bytes: give the consumer no \1_deserializer"):
            Record.of(SimpleNamespace(**place, **wrong))


GENUINE: list[tuple[str, bytes | None]] = [
    ("halfway-transaction-id", b"3-01"),
    ("halfway-message", b"1/1"),
    ("halfway-prepared-at", b"1760000000000"),
    ("halfway-prefix", b"shop."),
]


@pytest.mark.parametrize(
    "headers, changes",
    [
        ({"halfway-prepared-at": b"1760000900000"}, {}),
        ({"halfway-prepared-at": None}, {}),
        ({"halfway-prefix": b"other."}, {}),
        ({}, {"topic": "coupons"}),
        ({}, {"key": b"k"}),
        ({}, {"value": b"forged"}),
    ],
)
def test_nothing_that_another_group_writes_is_taken_for_a_message(
    headers: dict[str, bytes | None], changes: dict[str, Any]
) -> None:
    """It may use an id again, in this deployment or another, or write the headers itself with content of its own."""
    others = [(name, headers.get(name, value)) for name, value in GENUINE]
    assert record(*GENUINE).id != record(*others, **changes).id
    assert len(record(*GENUINE, value=b"x" * 10_000).id) < 300


def test_a_place_and_a_message_have_ids_that_no_other_record_can_have() -> None:
    """No part can move from one field to the next, and no id of a place is one of a message."""
    assert record(*GENUINE, key=b"ab", value=b"c").id != record(*GENUINE, key=b"a", value=b"bc").id
    assert record(*GENUINE, key=b"", value=None).id != record(*GENUINE, key=None, value=b"").id
    assert record(topic="3-01").id != record(*GENUINE).id


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("halfway-transaction-id", b"3-01")],
        [("halfway-transaction-id", b"3 01"), ("halfway-message", b"1/1")],
        [("halfway-transaction-id", None), ("halfway-message", b"1/1")],
        [("halfway-transaction-id", b"3-01"), ("halfway-message", b"one")],
    ],
)
def test_any_other_record_is_recognised_by_its_place(headers: list[tuple[str, bytes | None]]) -> None:
    assert record(*headers).id == "#orders/1/7/5"


def test_cleaning_goes_through_the_index(inbox: Inbox) -> None:
    sql = next(inbox._table.clean(1, 1)).sql
    with inbox.connect() as connection:
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql.replace('{p}', '?')}", (1, 1))]
    assert any("halfway_inbox_processed_at" in step for step in plan), plan
    assert not any("TEMP B-TREE" in step for step in plan), plan


@pytest.mark.parametrize(
    "config, kept_s, remedy",
    [
        (
            {"cleanup.policy": "delete", "retention.ms": str(7 * DAY_MS), "segment.ms": str(7 * DAY_MS)},
            86_400,
            "1209600",
        ),
        ({"cleanup.policy": "delete", "retention.ms": "-1", "segment.ms": "1"}, 86_400, "retention_s=None"),
        ({"cleanup.policy": "compact", "retention.ms": "1", "segment.ms": "1"}, 86_400, "retention_s=None"),
    ],
)
def test_rows_may_not_go_before_their_records(config: dict[str, str | None], kept_s: float, remedy: str) -> None:
    with pytest.raises(RetentionTooShortError, match=remedy):
        _compare("orders", config, kept_s)


def test_rows_of_the_default_retention_outlive_a_topic_of_kafkas_default(inbox: Inbox) -> None:
    defaults: dict[str, str | None] = {
        "cleanup.policy": "delete",
        "retention.ms": str(7 * DAY_MS),
        "segment.ms": str(7 * DAY_MS),
    }
    assert inbox.retention_s is not None
    _compare("orders", defaults, inbox.retention_s)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"settings": {}}, "bootstrap.servers is missing"),
        ({"settings": {**KAFKA, "enable.auto.commit": False}}, "enable.auto.commit: leave it out"),
        ({"group": "points department"}, "give 1 to 128"),
        ({"handle": lambda record: None}, "a function of a record and a connection"),
        ({"handle": None}, "a function of a record and a connection"),
        ({"handle": _never}, "give both to an AsyncConsumer"),
        ({"clean_every_s": 0}, "clean_every_s is 0: give a number above 0"),
        ({"topics": []}, "at least one name"),
        ({"topics": "orders"}, "give a list"),
        ({"topics": ["^orders.*"]}, "without patterns"),
        ({"dead_letter_topic": "orders"}, "give another topic"),
    ],
)
def test_wrong_settings_are_refused_with_what_to_give(inbox: Inbox, changes: dict[str, Any], told: str) -> None:
    given: dict[str, Any] = {"settings": KAFKA, "group": "points", "topics": ["orders"], "inbox": inbox}
    given |= {"handle": lambda _record, _connection: None} | changes
    with pytest.raises(InvalidSettingError, match=told):
        Consumer(given.pop("settings"), **given)


def test_a_decorator_may_give_the_handler_more(inbox: Inbox) -> None:
    def pack(_record: Record, _connection: object, _mailer: object) -> None:
        raise AssertionError

    @wraps(pack)
    def with_mailer(record: Record, connection: object) -> None:
        pack(record, connection, None)

    Consumer(KAFKA, group="points", topics=["orders"], handle=with_mailer, inbox=inbox)


def test_an_inbox_of_the_other_kind_is_refused(inbox: Inbox) -> None:
    given: dict[str, Any] = {"group": "points", "topics": ["orders"], "handle": lambda _record, _connection: None}
    with pytest.raises(InvalidSettingError, match="give both to an AsyncConsumer"):
        Consumer(KAFKA, inbox=AsyncInbox("sqlite", inbox.connect), **given)  # type: ignore[arg-type]
    with pytest.raises(InvalidSettingError, match="an Inbox blocks the event loop"):
        AsyncConsumer(KAFKA, inbox=inbox, **given)  # type: ignore[arg-type]


def test_pauses_double_up_to_their_limit() -> None:
    retries = Retries(first_pause_s=1, max_pause_s=10)
    longest = [1, 2, 4, 8, 10, 10]
    for failures, pause_s in enumerate(longest, 1):
        assert pause_s / 2 <= retries.pause_s(failures) <= pause_s
    assert retries.pause_s(10**6) <= 10
    with pytest.raises(ValueError, match="at least 1 attempt"):
        Retries(attempts=0)


def test_the_lines_of_the_kafka_clients_go_to_a_logger(
    inbox: Inbox, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Not to standard error, between the lines of the service's own log."""
    consumer = Consumer(
        {"bootstrap.servers": "127.0.0.1:9"},
        group="points",
        topics=["orders"],
        handle=lambda _record, _connection: None,
        inbox=inbox,
    )
    client = KafkaConsumer(consumer._consumer_settings())
    try:
        until = time.monotonic() + GENEROUS_S
        while not caplog.records and time.monotonic() < until:
            client.poll(0.05)
    finally:
        client.close()
    assert {line.name for line in caplog.records} == {"halfway.client.consumer.librdkafka"}
    assert "rdkafka#" not in capfd.readouterr().err


def test_no_client_keeps_an_idle_connection_or_waits_a_minute_on_a_silent_one(inbox: Inbox) -> None:
    """A firewall drops what is sent on a connection that was idle for minutes; a service may set other times."""

    def settings_of(given: dict[str, Any]) -> list[dict[str, Any]]:
        consumer = Consumer(given, group="g", topics=["t"], handle=lambda _record, _connection: None, inbox=inbox)
        return [consumer._consumer_settings(), connection_settings(consumer._settings)]

    for settings in settings_of(KAFKA):
        assert settings["connections.max.idle.ms"] < 240_000
        assert settings["socket.timeout.ms"] <= 10_000
    for settings in settings_of({**KAFKA, "connections.max.idle.ms": 30_000}):
        assert settings["connections.max.idle.ms"] == 30_000
    patient = settings_of({**KAFKA, "fetch.wait.max.ms": 20_000})[0]
    KafkaConsumer(patient).close()


def test_all_clients_get_what_is_about_connections_and_only_consumers_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also what has no prefix in common with the rest; a producer complains about nothing."""
    shared = {
        **KAFKA,
        "sasl.password": "x",
        "enable.ssl.certificate.verification": False,
        "https.ca.location": "/etc/ca.pem",
        "enable.sasl.oauthbearer.unsecure.jwt": True,
        "client.dns.lookup": "use_all_dns_ips",
        "client.rack": "a",
        "metadata.max.age.ms": 60_000,
        "topic.metadata.refresh.interval.ms": 30_000,
        "api.version.request.timeout.ms": 5_000,
        "retry.backoff.ms": 200,
    }
    of_consumers = {
        "auto.commit.interval.ms": 500,
        "auto.offset.reset": "latest",
        "session.timeout.ms": 6000,
        "heartbeat.interval.ms": 2000,
        "max.poll.interval.ms": 600_000,
        "partition.assignment.strategy": "cooperative-sticky",
        "group.instance.id": "a",
        "group.protocol": "classic",
        "fetch.wait.max.ms": 20,
        "fetch.min.bytes": 1,
        "max.partition.fetch.bytes": 1000,
        "queued.min.messages": 1,
        "check.crcs": True,
        "coordinator.query.interval.ms": 1000,
        "allow.auto.create.topics": False,
        "enable.partition.eof": True,
        "isolation.level": "read_committed",
    }
    assert connection_settings({**shared, **of_consumers}) == shared
    known = {name: value for name, value in shared.items() if not name.startswith(("sasl.", "https."))}
    producer = Producer({**connection_settings({**known, **of_consumers}), "logger": logging.getLogger("given")})
    producer.poll(0)
    producer.close()
    assert not [line for line in caplog.records if "CONFWARN" in line.getMessage()]


class _UnreadableError(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


class _NotTextError(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]  # noqa: PLE0307


class _OddText(str):
    __slots__ = ()

    def __format__(self, _: str) -> str:
        raise ZeroDivisionError


class _OddError(Exception):
    def __str__(self) -> str:
        return _OddText("x")


@pytest.mark.parametrize(
    "error, text",
    [
        (ValueError("\ud800"), "ValueError: \\ud800"),
        (_UnreadableError(), "_UnreadableError: its text cannot be read"),
        (_NotTextError(), "_NotTextError: its text cannot be read"),
        (_OddError(), None),
        (ValueError("\x00"), "ValueError: \x00"),
    ],
)
def test_any_exception_has_a_text_that_can_be_sent(error: Exception, text: str | None) -> None:
    assert described(error).encode().decode() == described(error)
    assert text is None or described(error) == text
    "".join(traceback.format_exception(loggable(error))).encode()
