"""The made-up topics of the pipeline's benchmark, and what DuckDB makes of them."""

from pathlib import Path

import pyarrow.parquet as pq

from bench import pipeline_duckdb, pipeline_snapshot
from bench.pipeline import Cost, growth
from halfway.domain.records import OpKind
from halfway.kafka import codec

HALVES = 500


def test_every_op_marker_is_one_that_the_coordinator_reads(tmp_path: Path) -> None:
    """Ids, times and hashes stand in the coordinator's own bytes, each record with its key and headers."""
    pipeline_snapshot.write(tmp_path, HALVES, messages=False, seed=7)
    records = pq.read_table(tmp_path / "committed" / "topic=_halfway.op", partitioning=None).to_pylist()
    ops = [codec.decode_op(record["value"]) for record in records]
    assert [op.id.encode() for op in ops] == [record["key"] for record in records]
    for op, record in zip(ops, records, strict=True):
        state = "committed" if op.kind is OpKind.COMMITTED else "rolled_back"
        assert [(each["key"], each["value"]) for each in record["headers"]] == codec.record_headers("op", "shop", state)
    assert len({op.id for op in ops}) == len(ops) - pipeline_snapshot.PLANTED, "contradicted ones have two"


def test_duckdb_gives_each_planted_anomaly_its_verdict(tmp_path: Path) -> None:
    """The rules that the benchmark compares Spark with find what was planted, and nothing else."""
    pipeline_snapshot.write(tmp_path / "archive", HALVES, messages=True, seed=7)
    found = pipeline_duckdb.audit(tmp_path / "archive", tmp_path / "verdicts.parquet", processes=1)
    assert found == pipeline_snapshot.expected(HALVES)


def test_growth_is_told_for_ten_times_the_work() -> None:
    """Also where one size is not ten times the one before."""
    costs = [
        Cost(job="audit", halves=halves, seconds=seconds, cpu_s=1, memory_mib=1)
        for halves, seconds in ((10, 1.0), (100, 8.0), (200, 16.0))
    ]
    assert growth(costs) == {"audit": [8.0, 10.0]}
