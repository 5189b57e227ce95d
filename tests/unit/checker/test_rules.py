"""The checker finds each kind of violation in a forged history, and nothing in a good one."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from checker.__main__ import main
from checker.history import AnyEvent, Checked, HistoryWriter, Looked, Prepare, Prepared, Rest, Run, read_history
from checker.judge import judge
from checker.records import Op, read_records, write_records
from tests.support.checker.forgeries import (
    FORGERIES,
    History,
    Topics,
    at_end,
    content,
    good,
    half,
    no_op,
    op,
    real,
    without,
)


def found(history: History, topics: Topics) -> set[tuple[str, str, str]]:
    return {(finding.count, finding.rule, finding.id) for finding in judge(history, topics).findings}


def test_a_good_run_is_sound() -> None:
    """Two equal messages in one transaction, lost answers and ids that never arrived are nothing wrong."""
    verdict = judge(*good())
    assert verdict.findings == ()
    assert verdict.sound
    assert verdict.summary() == {
        "transactions": 4,
        "committed": 2,
        "rolled_back": 2,
        "faults": {"kill": 1},
        "excused": 0,
        "lost": 0,
        "doubled": 0,
        "torn": 0,
        "contradicted": 0,
        "leaked": 0,
        "stuck": 0,
        "disordered": 0,
        "late": 0,
        "calls_s": {"acknowledged": 5, "p50": 0.0, "p99": 0.0, "most": 0.0},
        "away_s": {"most": 0.0, "shards": {}},
        "complete": True,
        "seed": 7,
    }


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_history_is_found(name: str) -> None:
    """Each way to break the contract gives the findings that name it, and no others."""
    forge, expected = FORGERIES[name]
    history, topics = good()
    forge(history, topics)
    assert found(history, topics) == expected
    assert all(finding.evidence for finding in judge(history, topics).findings)


def test_a_prepare_that_was_told_its_id_explains_no_other_transaction() -> None:
    """Only one whose answer was lost can be found again by its content."""
    history, topics = good()
    strays = [half("0-x", content("b"), offset=90), half("0-y", content("c"), offset=91)]
    found = {(one.rule, one.id) for one in judge(history, [*topics, *strays]).findings}
    assert ("half_nobody_prepared", "0-x") in found
    assert ("half_nobody_prepared", "0-y") not in found


def test_an_answer_that_tells_the_id_and_nothing_else_explains_that_transaction() -> None:
    """Halfway did not know whether it was stored: it may stand, and be rolled back by policy, or not stand at all."""
    history, topics = good()
    at = history.index(Rest(at=22))
    history[0] = Run(seed=7, topics=("orders", "points"), policy_rolls_back=("h",))
    for ref, told in (("r6", "0-f"), ("r7", "0-g")):
        history[at:at] = [
            Prepare(at=21, ref=ref, group="h", contents=(content(ref),)),
            Prepared(at=21, sent_at=21, ref=ref, status=503, id=told, error_code="outcome_unknown"),
            Checked(at=21, id=told, said="nothing", manner="late"),
        ]
    stored = [half("0-f", content("r6"), offset=90), half("0-f", offset=91)]
    given_up = op("0-f", "ROLLED_BACK", offset=90, cause="policy", checks=1)
    assert judge(history, [*topics, *stored, given_up]).findings == ()


def test_of_two_contents_that_nobody_acknowledged_either_may_be_delivered() -> None:
    """The marker says which one was committed; the half that stands first in the log need not be it."""
    history, topics = good()
    one, other = content("one"), content("other")
    mark = (other.topic, other.key, other.value)
    history[history.index(Rest(at=22)) : -1] = [
        Prepare(at=21, ref="r6", group="g", contents=(one,), id="f"),
        Prepare(at=21, ref="r7", group="g", contents=(other,), id="f"),
        Checked(at=21, id="f", said="commit"),
    ]
    records: Topics = [
        half("f", one, offset=90),
        half("f", other, offset=91),
        half("f", offset=92),
        Op(shard=0, offset=90, id="f", kind="COMMITTED", cause="check", messages=(mark,)),
        real("f", "1/1", other, offset=90),
    ]
    assert judge(history, [*topics, *records]).findings == ()


def test_a_part_of_a_history_is_no_verdict() -> None:
    """Without its end a history proves nothing, even if nothing is wrong in it."""
    history, topics = good()
    verdict = judge(history[:-1], topics)
    assert verdict.findings == ()
    assert not verdict.sound


def test_a_policy_may_roll_back_where_its_group_chose_that() -> None:
    """Nobody said rollback, and the policy of the group did; of another group it may not."""
    history, topics = good()
    history[7:9] = [Checked(at=8, id="0-b", said="unknown")]
    no_op(topics, "0-b")
    topics.append(op("0-b", "ROLLED_BACK", offset=9, cause="policy", checks=1))
    assert found(history, topics) == {("contradicted", "outcome_nobody_gave", "0-b")}
    history[0] = Run(seed=7, topics=("orders", "points"), policy_rolls_back=("g",))
    assert found(history, topics) == set()


def test_a_question_asked_before_the_outcome_was_told_may_be_answered_late() -> None:
    """The answer `prepared` takes nothing back where the question was asked first."""
    history, topics = good()
    at_end(history, Looked(at=21, sent_at=3, id="a", status=200, state="prepared"))
    assert found(history, topics) == set()


def test_history_and_dump_come_back_from_their_files(tmp_path: Path) -> None:
    """What is written is read again as it was, with the times of the writing."""
    history, topics = good()
    clock = iter(range(1000))
    with HistoryWriter(tmp_path / "history", clock=lambda: next(clock)) as writer:
        for event in history:
            writer.write(event)
    read = list(read_history(tmp_path / "history"))
    assert [msgspec.structs.replace(event, at=0) for event in read] == [
        msgspec.structs.replace(event, at=0) for event in history
    ]
    assert [event.at for event in read] == [1000 * number for number in range(len(history))]
    write_records(tmp_path / "dump", topics)
    assert list(read_records(tmp_path / "dump")) == topics


def test_findings_are_counted_by_kind() -> None:
    """The JSON line has the number of findings of each count."""
    history, topics = good()
    without(topics, ("d", 1), ("a", 2))
    summary = judge(history, topics).summary()
    assert (summary["lost"], summary["torn"], summary["doubled"]) == (1, 1, 0)


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
