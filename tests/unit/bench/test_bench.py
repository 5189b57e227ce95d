"""The benchmark: its options, figures and audits."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import pipeline
from bench.__main__ import RUNS, parsed
from bench.audit import Audit, Journal, history
from bench.figures import Record, percentile
from bench.plan import GROUP
from checker.content import content_of
from checker.judge import judge
from checker.records import AnyRecord, Half, Op, Real


@pytest.mark.parametrize(
    "line, run, changed",
    [
        ("", "bench", {}),
        ("--only a --only b --seconds 3 --before x", "bench", {"only": ("a", "b"), "seconds": 3.0, "before": "x"}),
        ("beside --turns 2 --pending 7", "beside", {"turns": 2, "pending": 7}),
        ("overload --times 0.5 --settings A=1", "overload", {"times": 0.5, "settings": ("A=1",)}),
        ("pipeline --keep --halves 10 --halves 20", "pipeline", {"keep": True, "halves": (10, 20)}),
    ],
)
def test_a_run_has_the_options_that_are_given_and_else_its_own(line: str, run: str, changed: dict[str, Any]) -> None:
    given, options = parsed(line.split())
    assert given["run"] == run
    for name in options.__struct_fields__:
        assert getattr(options, name) == changed.get(name, getattr(RUNS[run].options, name))


@pytest.mark.parametrize("run", RUNS)
def test_every_run_explains_its_options(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(["--help"] if run == "bench" else [run, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for name in RUNS[run].options.__struct_fields__:
        assert f"--{name.replace('_', '-')}" in shown


@pytest.mark.parametrize(
    "values, share, expected",
    [
        ([], 0.5, 0.0),
        ([7.0], 0.99, 7.0),
        ([1.0, 2.0], 0.5, 1.0),
        ([1.0, 2.0, 3.0], 0.5, 2.0),
        ([float(value) for value in range(1, 101)], 0.99, 99.0),
        ([float(value) for value in range(1, 201)], 0.99, 198.0),
        ([1.0, 2.0, 3.0], 1.0, 3.0),
    ],
)
def test_a_percentile_is_a_value_that_was_measured(values: list[float], share: float, expected: float) -> None:
    """It is the nearest rank: the smallest value that this share of all do not exceed."""
    assert percentile(values, share) == expected


def test_a_record_shows_what_it_writes_without_the_figures_that_are_nothing(tmp_path: Path) -> None:
    record = Record(
        title="a run",
        rows=[
            {"scenario": "one", "tx/s": 1234.5, "broker": None, "lost": 0, "answers": {"429": 2, "201": 1}},
            {"scenario": "two", "tx/s": 1.25, "broker": None, "lost": 0, "answers": {}},
        ],
        notes=["a note"],
    )
    record.write(tmp_path / "build" / "run.json")
    told = json.loads((tmp_path / "build" / "run.json").read_bytes())
    assert told["rows"] == record.rows
    assert (told["notes"], told["clean"]) == (["a note"], True)
    text = io.StringIO()
    record.show(Console(file=text, width=120))
    for shown in ("scenario", "one", "1,234", "1.25", "1 201, 2 429", "a note", "clean"):
        assert shown in text.getvalue()
    assert not any(left_out in text.getvalue() for left_out in ("broker", "lost"))


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


TOPIC = "t"
CONTENTS = [content_of(TOPIC, b"k0", b"v0"), content_of(TOPIC, b"k1", b"v1")]


def half(name: str, number: int) -> list[AnyRecord]:
    return [Half(shard=0, offset=0, id=name, contents=(CONTENTS[number],), group=GROUP)]


def ended(name: str, number: int, kind: str = "COMMITTED") -> list[AnyRecord]:
    one = CONTENTS[number]
    mark = ((one.topic, one.key, one.value),)
    return [
        Op(shard=0, offset=0, id=name, kind=kind, cause="producer", group=GROUP, messages=mark),
        Half(shard=0, offset=1, id=name),
    ]


def real(name: str, number: int, offset: int = 0) -> list[AnyRecord]:
    return [Real(shard=0, offset=offset, id=name, content=CONTENTS[number], number=1, total=1)]


def committed(name: str, number: int) -> list[AnyRecord]:
    return [*half(name, number), *ended(name, number), *real(name, number)]


def write(path: Path) -> None:
    """One of each: a and b confirmed, u not, m without an answer."""
    with path.open("wb") as file:
        journal = Journal(file)
        journal.committed([(0, b"a"), (1, b"b")])
        journal.unconfirmed([(1, b"u")])
        journal.unanswered([0], brought=b"m")


STANDS = [*committed("a", 0), *committed("b", 1)]
LEFT = [*half("u", 1), *ended("u", 1, "ROLLED_BACK")]


def test_what_stands_as_it_was_acknowledged_is_clean(tmp_path: Path) -> None:
    """What was not confirmed may stand or not; of what was not answered there may be nothing."""
    write(tmp_path / "journal")
    found = audit(tmp_path, [*STANDS, *committed("u", 1)])
    assert found.clean, found
    assert found.transactions == 3
    assert audit(tmp_path, [*STANDS, *committed("u", 1), *committed("u", 1)]).doubled == 1


def audit(directory: Path, records: Sequence[AnyRecord]) -> Audit:
    return Audit.of(judge(history([directory / "journal"], TOPIC, CONTENTS), records))


@pytest.mark.parametrize(
    "records, name",
    [
        pytest.param([*STANDS[:-1], *committed("u", 1)], "missing", id="a message is not there"),
        pytest.param([*committed("a", 0), *committed("u", 1)], "missing", id="nothing is there"),
        pytest.param([*STANDS, *real("b", 1, 7), *committed("u", 1)], "doubled", id="a message is there twice"),
        pytest.param([*STANDS, *committed("u", 1), *real("x", 1)], "extra", id="a message of nothing that was sent"),
        pytest.param([*STANDS, *committed("u", 1), *real("", 1)], "extra", id="a message that is not halfway's"),
        pytest.param([*STANDS, *committed("u", 1), *half("x", 1)], "extra", id="a refused prepare is kept"),
        pytest.param([*STANDS, *half("u", 1)], "stuck", id="one has no outcome"),
        pytest.param([*STANDS, *committed("u", 1), *half("m", 0)], "stuck", id="an unanswered one is left"),
        pytest.param([*STANDS, *LEFT], "contradicted", id="rolled back by nobody"),
        pytest.param([*committed("a", 1), *committed("b", 1), *committed("u", 1)], "missing", id="other bytes"),
    ],
)
def test_each_wrong_is_found(tmp_path: Path, records: Sequence[AnyRecord], name: str) -> None:
    write(tmp_path / "journal")
    found = audit(tmp_path, records)
    assert getattr(found, name), found
    assert not found.clean
    assert found.first
