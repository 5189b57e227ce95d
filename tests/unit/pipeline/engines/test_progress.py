"""What a long job says on stderr."""

import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from halfway.pipeline import cli
from halfway.pipeline.engines import dialect
from halfway.pipeline.engines.dialect import Doing, line, told
from halfway.pipeline.engines.duckdb import DuckEngine
from tests.support.pipeline.archives import HISTORY, write_archive
from tests.support.waiting import GENEROUS_S


@pytest.mark.parametrize(
    "doing, said",
    [
        (
            Doing(what="reads orders", done=250_000, total=1_000_000, unit="records"),
            "reads orders: 250,000 of 1,000,000 records, about 30 s left",
        ),
        (Doing(what="judges and writes", done=50, total=100), "judges and writes: 50%, about 10 s left"),
        (Doing(what="reads orders", total=7, unit="records"), "reads orders: 0 of 7 records"),
        (Doing(what="decodes op", done=20_000, unit="records"), "decodes op: 20,000 records, 10 s so far"),
        (Doing(what="reads orders", done=9, total=7, unit="records"), "reads orders: 9 of 7 records, about 0 s left"),
    ],
)
def test_a_line_has_the_amount_and_an_estimate_of_the_rest(doing: Doing, said: str) -> None:
    """After ten seconds. Compacted topics have fewer records than offsets, a client that begins again reads more."""
    assert line(doing, 10) == said


def test_a_long_query_of_duckdb_says_how_much_of_it_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From another thread, while it runs; then it is interrupted."""
    monkeypatch.setattr(dialect, "EVERY_S", 0.01)
    engine = DuckEngine()
    asked = threading.Event()

    def doing() -> Doing:
        found = engine.doing()
        assert found is not None
        if found.done:
            asked.set()
            engine.database.interrupt()
        return found

    stopper = threading.Timer(GENEROUS_S, engine.database.interrupt)
    stopper.start()
    try:
        with told("audit", doing), pytest.raises(Exception, match="Interrupted"):
            engine.rows(engine.query("select sum(hash(a.range) % 7) as s from range(100000) a, range(10000000) b"))
    finally:
        stopper.cancel()
        engine.close()
    assert asked.is_set()
    assert "halfway-pipeline audit: judges and writes: " in capsys.readouterr().err


def test_progress_never_reaches_stdout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script that takes the line of JSON gets that alone; a job that is done at once says nothing."""
    write_archive(tmp_path / "archive", **HISTORY)
    told_by = ["audit", "--snapshot", str(tmp_path / "archive"), "--output", str(tmp_path / "audit"), "--json"]
    quick = CliRunner().invoke(cli.pipeline, [*told_by, "--engine", "duckdb"])
    monkeypatch.setattr(dialect, "EVERY_S", 0.001)
    slow = CliRunner().invoke(cli.pipeline, [*told_by, "--engine", "duckdb"])
    assert slow.stdout == quick.stdout
    assert slow.stdout.count("\n") == 1
    assert "halfway-pipeline audit: judges and writes: " in slow.stderr
