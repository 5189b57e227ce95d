"""The made-up topics of the pipeline's benchmark, and what DuckDB makes of them."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from bench.pipeline import archive, continued
from bench.pipeline.scale import Cost, growth
from bench.pipeline.stream import Batch, by_minute
from halfway.domain.records import OpKind
from halfway.kafka.records import codec
from halfway.pipeline.engines.duckdb import DuckEngine
from halfway.pipeline.jobs import audit
from halfway.pipeline.sources.duckdb import QuickArchive
from halfway.pipeline.tables.folders import LocalFolder

HALVES = 500


def test_every_op_marker_is_one_that_the_coordinator_reads(tmp_path: Path) -> None:
    """Ids, times and hashes stand in the coordinator's own bytes, each record with its key and headers."""
    archive.write(tmp_path, HALVES, messages=False, seed=7)
    records = pq.read_table(tmp_path / "committed" / "topic=_halfway.op", partitioning=None).to_pylist()
    ops = [codec.decode_op(record["value"]) for record in records]
    assert [op.id.encode() for op in ops] == [record["key"] for record in records]
    for op, record in zip(ops, records, strict=True):
        state = "committed" if op.kind is OpKind.COMMITTED else "rolled_back"
        assert [(each["key"], each["value"]) for each in record["headers"]] == codec.record_headers("op", "shop", state)
    assert len({op.id for op in ops}) == len(ops) - archive.PLANTED, "contradicted ones have two"


def test_duckdb_gives_each_planted_anomaly_its_verdict(tmp_path: Path) -> None:
    """What was planted is found, and nothing else."""
    archive.write(tmp_path / "archive", HALVES, messages=True, seed=7)
    engine = DuckEngine()
    source = QuickArchive(engine, LocalFolder(str(tmp_path / "archive")))
    summary = audit.run(engine, source, LocalFolder(str(tmp_path / "audit")), audit.AuditOptions())
    engine.close()
    assert {name: count for name, count in summary.verdicts.items() if count} == archive.expected(HALVES)


def test_a_tenth_that_is_new_gives_the_verdicts_of_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run that is measured goes on from one over nine tenths."""
    archive.write(tmp_path / "archive", HALVES, messages=True, seed=7)
    for pins in (archive.CUT, "offsets.json"):
        continued.main("duckdb", str(tmp_path / "archive"), pins, str(tmp_path / "audit"), "")
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert sum(first.values()) == HALVES * 9 // 10
    assert {name: count for name, count in second.items() if count} == archive.expected(HALVES)


def test_growth_is_told_for_ten_times_the_work() -> None:
    """Also where one size is not ten times the one before."""
    costs = [
        Cost(job="audit", halves=halves, seconds=seconds, cpu_s=1, memory_mib=1)
        for halves, seconds in ((10, 1.0), (100, 8.0), (200, 16.0))
    ]
    assert growth(costs) == {"audit": [8.0, 10.0]}


def test_a_minute_is_told_by_its_batches() -> None:
    """The rate is over the time since the last batch of the minute before; of what is held, the most."""
    batches = [
        Batch(at_s=at_s, records=records, behind=behind, pending=5, memory_mib=900, checkpoint_mib=1)
        for at_s, records, behind in ((30, 3_000, 70), (50, 5_000, 10), (70, 8_000, 20))
    ]
    first, second = by_minute(batches)
    assert (first.minute, first.batches, first.records_per_s, first.behind_at_most) == (1, 2, 100, 70)
    assert (second.minute, second.batches, second.records_per_s, second.behind_at_most) == (2, 1, 150, 20)
