"""Reading a partition whose leader was just elected, or to which anyone can write."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from confluent_kafka import KafkaError
from confluent_kafka import admin as kafka

from halfway.pipeline.access import KafkaAccess
from halfway.pipeline.engines.dialect import DUCKDB
from halfway.pipeline.errors import PipelineError
from halfway.pipeline.sources import duckdb as duckdb_sources
from halfway.pipeline.sources import headers
from halfway.pipeline.sources.duckdb import copy
from halfway.pipeline.sources.headers import UNREADABLE
from halfway.pipeline.sources.pins import Brokers
from tests.support.waiting import GENEROUS_S

TOPIC = "orders"


class Told:
    """A record, or the end of the partition, as a consumer returns it."""

    def __init__(self, offset: int, *, end: bool = False, partition: int = 0) -> None:
        self._offset = offset
        self._partition = partition
        self._error = KafkaError(KafkaError._PARTITION_EOF) if end else None

    def topic(self) -> str:
        return TOPIC

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def error(self) -> KafkaError | None:
        return self._error

    def key(self) -> bytes:
        return b"key"

    def value(self) -> bytes:
        return b"value"

    def headers(self) -> list[tuple[str, bytes]] | None:
        return None

    def timestamp(self) -> tuple[int, int]:
        return 1, 1_760_000_000_000


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """Return the script of a consumer. Elections cannot be timed."""
    script: list[Told] = []
    rest: Iterator[Told] = iter(script)

    class Scripted:
        def __init__(self, settings: dict[str, Any]) -> None:
            del settings

        def assign(self, partitions: list[Any]) -> None:
            del partitions

        def consume(self, most: int, timeout: float) -> list[Told]:
            del most, timeout
            return [next(rest)]

        def close(self) -> None:
            pass

    monkeypatch.setattr("confluent_kafka.Consumer", Scripted)
    return script


def read(folder: Path, start: int, end: int) -> list[int]:
    """Return the offsets that were kept."""
    copy({}, [(TOPIC, 0, start, end)], str(folder))
    file = folder / TOPIC / f"0-{start}.parquet"
    offsets: list[int] = pq.read_table(file).column("offset").to_pylist() if file.exists() else []
    return offsets


def test_an_end_that_is_told_too_early_ends_nothing(told: list[Told], tmp_path: Path) -> None:
    """The leader gives what it does not know yet a moment later: to stop there would be to call messages lost."""
    told += [Told(0), Told(1), Told(2, end=True), Told(2), Told(3), Told(5, end=True)]
    assert read(tmp_path, 0, 5) == [0, 1, 2, 3]


def test_a_client_that_begins_once_more_doubles_nothing(told: list[Told], tmp_path: Path) -> None:
    told += [Told(3), Told(4), Told(0), Told(1), Told(3), Told(4), Told(5), Told(7, end=True)]
    assert read(tmp_path, 3, 7) == [3, 4, 5]


def test_what_stands_behind_the_end_is_not_read(told: list[Told], tmp_path: Path) -> None:
    told += [Told(0), Told(4)]
    assert read(tmp_path, 0, 3) == [0]


def test_a_header_whose_name_is_no_text_stops_nothing(told: list[Told], tmp_path: Path) -> None:
    """Kafka takes any bytes for a name; confluent_kafka has no text for them then."""

    class Hostile(Told):
        def headers(self) -> list[tuple[str, bytes]] | None:
            raise SystemError("returned a result with an exception set")

        def set_headers(self, headers: list[tuple[str, bytes]]) -> None:
            assert headers == []

    told += [Hostile(0), Told(1)]
    assert read(tmp_path, 0, 2) == [0, 1]
    headers = pq.read_table(tmp_path / TOPIC / "0-0.parquet").column("headers").to_pylist()
    assert headers == [[{"key": UNREADABLE, "value": None}], []]


def test_records_of_other_producers_are_not_kept(told: list[Told], tmp_path: Path) -> None:
    """Of halfway's messages only what a verdict needs is kept: no value. What cannot be read is kept as a fault."""

    class Message(Told):
        def headers(self) -> list[tuple[str, bytes]]:
            return [("trace", b"1"), ("halfway-transaction-id", b"id-1")]

    class Hostile(Told):
        def headers(self) -> list[tuple[str, bytes]] | None:
            raise SystemError("returned a result with an exception set")

        def set_headers(self, headers: list[tuple[str, bytes]]) -> None:
            assert headers == []

    told += [Told(0), Message(1), Told(2), Hostile(3)]
    copy({}, [(TOPIC, 0, 0, 4)], str(tmp_path), headers.messages(DUCKDB, "_halfway."))
    rows = pq.read_table(tmp_path / TOPIC / "0-0.parquet").to_pylist()
    assert [(row["offset"], row["id"], row["fault"] is None) for row in rows] == [(1, "id-1", True), (3, None, False)]
    assert "value" not in rows[0]


def test_errors_that_come_again_and_again_are_no_answer(
    monkeypatch: pytest.MonkeyPatch, told: list[Told], tmp_path: Path
) -> None:
    """A broker that gives nothing else gives nothing."""
    monkeypatch.setattr(duckdb_sources, "_SILENT_S", -1)

    class Refused(Told):
        def error(self) -> KafkaError:
            return KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION, retriable=True)

    told += [Refused(0), Refused(0), Told(0)]
    with pytest.raises(PipelineError, match="Kafka gave no record of orders"):
        read(tmp_path, 0, 1)


def test_a_property_that_cannot_be_used_is_named() -> None:
    with pytest.raises(PipelineError, match=r'HALFWAY_KAFKA__… .*"bootstrap.servrs": correct or remove it'):
        Brokers(KafkaAccess(librdkafka={"bootstrap.servrs": "127.0.0.1:1"}))


def test_why_no_broker_answers_is_told_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """In the error, not in line after line on stderr."""
    ask = kafka.AdminClient.list_topics

    def ask_once_refused(admin: Any, *, timeout: float) -> Any:
        """Return up as soon as an error was told, in place of after half a minute."""
        deadline = time.monotonic() + GENEROUS_S
        while not admin.poll(0.05):
            assert time.monotonic() < deadline
        return ask(admin, timeout=min(timeout, 0.01))

    monkeypatch.setattr(kafka.AdminClient, "list_topics", ask_once_refused)
    with pytest.raises(PipelineError, match=r"Kafka at 127\.0\.0\.1:1 did not answer: .*Connection refused"):
        Brokers(KafkaAccess(librdkafka={"bootstrap.servers": "127.0.0.1:1"})).pin(["orders"])
    assert not capfd.readouterr().err


def test_what_others_write_keeps_nobody_waiting_for_a_silent_partition(
    monkeypatch: pytest.MonkeyPatch, told: list[Told], tmp_path: Path
) -> None:
    """A partition without a leader says nothing, while records come of one that has been read."""
    monkeypatch.setattr(duckdb_sources, "_SILENT_S", -1)
    told += [Told(0), Told(1)]
    with pytest.raises(PipelineError, match="Kafka gave no record of orders"):
        copy({}, [(TOPIC, 0, 0, 1), (TOPIC, 1, 0, 1)], str(tmp_path))


def test_large_records_are_written_before_there_are_many(
    monkeypatch: pytest.MonkeyPatch, told: list[Told], tmp_path: Path
) -> None:
    """However few fill the memory."""
    monkeypatch.setattr(duckdb_sources, "_HELD", 2 * len(b"keyvalue"))
    told += [Told(number) for number in range(5)]
    assert read(tmp_path, 0, 5) == list(range(5))
    assert pq.ParquetFile(tmp_path / TOPIC / "0-0.parquet").num_row_groups == 3
