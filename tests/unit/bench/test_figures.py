"""Percentiles, what the kernel tells, and the record of a run."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.figures import Record, percentile


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
