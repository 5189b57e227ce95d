"""Every run at its smallest: its record has the figures, and its audit is clean. No figure is judged."""

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from confluent_kafka import Producer

from bench import takeover
from bench.__main__ import main
from bench.figures import Row
from bench.scenarios import ALL, Options, Rigs, Scenario, measure
from bench.system import Broker
from tests.support.brokers.fixtures import Kafka

TINY = Options(warm_up=0, lead=0.1, seconds=0.3, raw_seconds=0.3, turns=1, pending=200)
FINDINGS = ("missing", "doubled", "extra", "contradicted", "stuck", "failed", "lanes lost")


def measured(kafka: Kafka, scenarios: Sequence[Scenario], name: str) -> dict[str, Row]:
    """Measure rows once, and return them by name; each has the figures that the page promises."""
    with Rigs(Broker(kafka.bootstrap_servers), TINY, print, name) as rigs:
        record = measure(rigs, scenarios, TINY, print)
    assert record.clean, record.notes
    for row in record.rows:
        for figure in ("tx/s", "p50 ms", "p99 ms", "ends/Kafka tx", "transactions", "audited"):
            assert row[figure] > 0, (figure, row)
        assert min(row["coordinator"], row["load"]) >= 0, "the kernel counts CPU in ticks of 10 ms"
        assert not any(row[finding] for finding in FINDINGS), row
    return {row["scenario"]: row for row in record.rows}


def test_every_shape_of_load_is_measured(kafka: Kafka) -> None:
    """Callers of their own, batches, streams and clients, with the raw limit, beside groups, pending ones; workers."""
    names = (
        "single-1",
        "batch-100",
        "stream-64",
        "stream-64-oneway",
        "tasks-64",
        "threads-64",
        "alone-64",
        "pending-64",
        "2 single-64",
    )
    groups = msgspec.structs.replace(ALL["groups-64"], groups=3)
    rows = measured(kafka, [*(ALL[name] for name in names), groups], "bench-smoke")
    for name, row in rows.items():
        assert (row["raw tx/s"] is not None) is ALL[name].raw
        assert (row["coordinator ratio"] is not None) is (ALL[name].against in rows)
        if ALL[name].raw:
            assert row["of raw"] > 0


@contextmanager
def foreign_messages(kafka: Kafka, topic: str) -> Iterator[None]:
    """Another producer writes to the topic all the time."""
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    stopped = threading.Event()

    def write() -> None:
        while not stopped.wait(0.2):
            producer.produce(topic, b"not halfway's")
            producer.poll(0)

    writing = threading.Thread(target=write)
    writing.start()
    try:
        yield
    finally:
        stopped.set()
        writing.join()
        producer.flush()


def test_another_version_takes_turns_and_the_exit_status_follows_the_checker(
    kafka: Kafka, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is 0 if it finds nothing; 1 if the topic has messages that were not prepared, and the first one is named."""
    json_path = tmp_path / "bench.json"
    arguments = ["--warm-up", "0", "--lead", "0", "--raw-seconds", "0", "--turns", "1"]
    arguments += ["--kafka", kafka.bootstrap_servers, "--json", str(json_path)]
    assert main([*arguments, "--seconds", "0.5", "--only", "stream-256", "--before", sys.executable]) == 0
    rows = json.loads(json_path.read_bytes())["rows"]
    assert [row["scenario"] for row in rows] == ["stream-256, before", "stream-256"]
    assert [row["coordinator ratio"] is not None for row in rows] == [False, True]
    with foreign_messages(kafka, "bench.orders"):
        assert main([*arguments, "--seconds", "1.5", "--only", "single-1"]) == 1
    assert "leaked message_of_no_transaction" in capsys.readouterr().out
    [row] = json.loads(json_path.read_bytes())["rows"]
    assert row["extra"] > 0
    assert not any(row[finding] for finding in FINDINGS if finding != "extra"), row


def test_takeovers_are_measured_and_nothing_is_lost_or_doubled(kafka: Kafka) -> None:
    options = takeover.Options(session=(8.0,), rate=20, lead=1, after=1)
    record = takeover.run(Broker(kafka.bootstrap_servers), options, print)
    events = ["a fourth joins", "one of four is stopped", "one of three is killed"]
    assert [row["event"].split(" (")[0] for row in record.rows] == events
    assert record.clean, record
    for row in record.rows:
        assert min(row["shards moved"], row["requests"], row["to"], row["longest s"]) > 0
