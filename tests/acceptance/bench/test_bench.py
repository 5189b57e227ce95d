"""A short run of the benchmark: every scenario with the same code, and its report. The figures are not checked here."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Producer

from bench.__main__ import main
from bench.measures.client import compare
from bench.measures.scenarios import Lengths, run_scenarios
from bench.plan import SCENARIOS, TOPIC
from bench.report import write_json
from bench.system.rig import Rig
from tests.support.brokers.fixtures import Kafka

KEYS = {
    *("scenario", "tx_per_s", "p50_ms", "p99_ms", "coordinator_cpu_us", "broker_cpu_us", "raw_tx_per_s", "ratio"),
    *("missing", "doubled"),
}


def test_every_scenario_is_measured_and_its_audit_is_clean(kafka: Kafka, tmp_path: Path) -> None:
    """The file has a line per scenario with all promised fields; every acknowledged message is stored once."""
    said: list[str] = []
    with Rig(say=said.append, bootstrap_servers=kafka.bootstrap_servers, name="bench-smoke") as rig:
        lengths = Lengths(warm_up_s=0, lead_s=0, run_s=0.5, raw_s=0.5, slices=1)
        lines = run_scenarios(rig, SCENARIOS, lengths, say=said.append)
        compared = compare(rig, lengths, say=said.append)

    write_json(tmp_path / "bench.json", lines, said.append)
    told = json.loads((tmp_path / "bench.json").read_bytes())
    singles, streams = (
        ["single-1", "single-16", "single-64"],
        ["stream-64", "stream-64-oneway", "stream-256", "stream-1024"],
    )
    assert [line["scenario"] for line in told] == [*singles, "batch-100", *streams]
    for line in told:
        assert line.keys() >= KEYS
        assert line["raw_tx_per_s"] > 0
        assert line["audited"] > 0
        found = (line["missing"], line["doubled"], line["extra"], line["contradicted"], line["stuck"], line["failed"])
        assert not any(found), line
    assert [line.scenario for line in compared.lines] == ["rest-1", "client-1", "rest-64", "client-64"]
    assert all(line.audited for line in compared.lines)
    assert compared.clean, compared


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


def test_the_exit_status_follows_the_checker(kafka: Kafka, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is 0 if it finds nothing; 1 if the topic has messages that were not prepared, and the first one is named."""
    arguments = ["--only", "single-1", "--warm-up", "0", "--lead", "0", "--seconds", "1.5", "--raw-seconds", "0.5"]
    arguments += ["--kafka", kafka.bootstrap_servers, "--json", str(tmp_path / "bench.json")]
    assert main(arguments) == 0
    with foreign_messages(kafka, TOPIC):
        assert main(arguments) == 1
    assert "leaked message_of_no_transaction" in capsys.readouterr().out
    (line,) = json.loads((tmp_path / "bench.json").read_bytes())
    assert line["extra"] > 0
    assert line["missing"] == line["doubled"] == line["contradicted"] == line["stuck"] == line["failed"] == 0
