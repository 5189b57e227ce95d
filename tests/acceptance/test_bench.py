"""The benchmark in short: every scenario through the same code, and what it tells. No figure is judged here."""

import json
from pathlib import Path

from bench.plan import SCENARIOS
from bench.report import write_json
from bench.rig import Rig
from bench.scenarios import Lengths, run_scenarios
from bench.soak import Lasting, soak
from tests.fixtures_kafka import Kafka

KEYS = {
    *("scenario", "tx_per_s", "p50_ms", "p99_ms", "coordinator_cpu_us", "broker_cpu_us", "raw_tx_per_s", "ratio"),
    *("missing", "doubled"),
}


def test_every_scenario_is_measured_and_its_audit_is_clean(kafka: Kafka, tmp_path: Path) -> None:
    """The file has a line a scenario with all that is promised; what was acknowledged stands once."""
    said: list[str] = []
    with Rig(say=said.append, bootstrap_servers=kafka.bootstrap_servers, name="bench-smoke") as rig:
        lengths = Lengths(warm_up_s=0, lead_s=0, run_s=0.5, raw_s=0.5)
        lines = run_scenarios(rig, SCENARIOS, lengths, say=said.append)
        lasted = soak(rig, Lasting(minutes=1 / 60, share=0.5, warm_up_s=0, maximum_s=0.5, window_s=0.5))

    write_json(tmp_path / "bench.json", lines)
    told = json.loads((tmp_path / "bench.json").read_bytes())
    assert [line["scenario"] for line in told] == ["single-1", "single-16", "single-64", "batch-100"]
    for line in told:
        assert line.keys() >= KEYS
        assert line["raw_tx_per_s"] > 0
        assert line["audited"] > 0
        assert (line["missing"], line["doubled"], line["extra"], line["failed"]) == (0, 0, 0, 0), line
    assert len(lasted.lines) == 2
    assert lasted.clean, lasted
