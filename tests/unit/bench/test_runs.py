"""The command line of the benchmark selects a run and its options."""

from typing import Any

import pytest

from bench.__main__ import RUNS, parsed


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
