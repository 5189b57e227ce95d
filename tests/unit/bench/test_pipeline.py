"""The made-up topics of the pipeline's benchmark."""

from pathlib import Path

from bench import pipeline


def test_the_audit_gives_each_planted_anomaly_its_verdict(tmp_path: Path) -> None:
    """What was planted is found, and nothing else; the run refuses any other result."""
    options = pipeline.Options(halves=(500,), job=("duckdb",), folder=str(tmp_path), seed=7)
    [row] = pipeline.run(None, options, print).rows
    assert (row["job"], row["halves"]) == ("duckdb", 500)
    assert min(row["seconds"], row["CPU s"], row["memory"]) > 0
    assert pipeline.expected(500) == {
        **dict.fromkeys(pipeline.ANOMALIES, pipeline.PLANTED),
        "committed_ok": 5 * 85 - 60,
        "rolled_back_ok": 5 * 10,
        "pending": 5 * 5,
    }
