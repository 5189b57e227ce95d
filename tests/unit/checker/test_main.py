"""The exit status of `python -m checker`: 0 if nothing is wrong, 1 if something is, 2 if it cannot judge."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from checker.__main__ import main
from checker.history import AnyEvent, Rest, Run
from checker.records import write_records
from tests.support.checker.forgeries import FORGERIES, good


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Return the paths of a history and of a dump, with the records of a good run in the dump."""
    write_records(tmp_path / "dump", good()[1])
    return tmp_path / "history", tmp_path / "dump"


def write_history(path: Path, events: Sequence[AnyEvent]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))


def judge_files(files: tuple[Path, Path], *more: str) -> int:
    return main([*map(str, files), *more])


def test_a_good_run_is_status_0(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    write_history(files[0], good()[0])
    assert judge_files(files) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["complete"]
    assert shown.err == ""


def test_a_violation_is_status_1(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    history, topics = good()
    forge, _ = next(iter(FORGERIES.values()))
    forge(history, topics)
    write_history(files[0], history)
    write_records(files[1], topics)
    assert judge_files(files) == 1
    assert capsys.readouterr().err.count("\n") > 0


@pytest.mark.parametrize(
    "lines, message",
    [
        (None, "history"),
        (b'{"event":"rest"}\n{"event":"re', "history:2: "),
        (b'{"event":"run","topics":[]}\n', "history:1: Object missing required field `seed`"),
    ],
    ids=["missing", "cut off", "run without seed"],
)
def test_a_history_that_cannot_be_read_is_status_2(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], lines: bytes | None, message: str
) -> None:
    """One line on standard error names the file, and nothing is on standard output."""
    if lines is not None:
        files[0].write_bytes(lines)
    assert judge_files(files) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("cannot judge: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err


def test_a_record_that_cannot_be_read_is_status_2(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    write_history(files[0], good()[0])
    files[1].write_bytes(b'{"record":"half"')
    assert judge_files(files) == 2
    assert "dump:1: " in capsys.readouterr().err


def test_a_missing_dump_is_status_2(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The dump is missing and no cluster is given; or the history does not name the topics to read."""
    write_history(files[0], [Rest()])
    files[1].unlink()
    assert judge_files(files) == 2
    assert "--bootstrap-servers" in capsys.readouterr().err
    assert judge_files(files, "--bootstrap-servers", "127.0.0.1:1") == 2
    assert "no `run`" in capsys.readouterr().err
    assert not files[1].exists()


def test_an_incomplete_history_is_status_2(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Without its end there is no verdict."""
    write_history(files[0], [Run(seed=1, topics=("orders",))])
    assert judge_files(files) == 2
    shown = capsys.readouterr()
    assert "`rest`" in shown.err
    assert not json.loads(shown.out)["complete"]
