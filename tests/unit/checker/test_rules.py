"""The checker finds each kind of violation in a forged history, and nothing in a good one."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from checker.__main__ import main
from checker.cases import marks_of
from checker.history import (
    AnyEvent,
    Checked,
    End,
    Ended,
    Event,
    Fault,
    Held,
    HistoryWriter,
    LogLost,
    Looked,
    LostInMemory,
    Prepare,
    Prepared,
    Removed,
    Rest,
    Run,
    Serving,
    Taken,
    read_history,
)
from checker.judge import judge
from checker.partitions import partition_of
from checker.records import Half, Op, Real, read_records, write_records
from halfway.protocol.ids import shard_of
from tests.support.checker.forgeries import (
    FORGERIES,
    SAME,
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


WALL = 1_000_000_000
SECOND = 1_000
TOPICS = ("orders", "points")


def rolled_back_by_policy(*answers: Event) -> tuple[History, Topics]:
    """Give the run of one transaction that policy rolls back after 20 s; `answers` are what its checks were told."""
    history: History = [
        Run(seed=7, topics=TOPICS, policy_rolls_back=("g",), wall=WALL),
        Prepare(at=1, ref="r", group="g", contents=(content("a"),), id="a"),
        Prepared(at=2, sent_at=1, ref="r", status=201, id="a", state="prepared"),
        Checked(at=3, id="a", said="nothing", manner="error"),
        *answers,  # type: ignore[list-item]  # whichever they are
        Rest(at=60 * SECOND),
    ]
    marker = Op(
        shard=0, offset=1, id="a", kind="ROLLED_BACK", cause="policy", checks=2, half_offset=1, at=WALL + 20 * SECOND
    )
    return history, [half("a", content("a"), offset=1), half("a", offset=2), marker]


PUSHED = (Checked(at=5 * SECOND, id="a", said="commit"), Taken(at=6 * SECOND, id="a", said="commit"))
KILL = Fault(at=9 * SECOND, since=7 * SECOND, kind="kill", target="c")
AWAY = (Serving(at=7 * SECOND, shard=0, serving=False), Serving(at=9 * SECOND, shard=0, serving=True))
TOPIC_DENIED = Fault(at=9 * SECOND, since=4 * SECOND, stops_ms=0, kind="topic_denied", target="orders")


def commit(status: int, error_code: str | None = None, *, by: str = "producer", at: int = 6) -> tuple[Event, ...]:
    """Give an end that says commit, and its answer."""
    answer = Ended(
        at=at * SECOND, sent_at=5 * SECOND, id="a", outcome="commit", by=by, status=status, error_code=error_code
    )
    return End(at=5 * SECOND, id="a", outcome="commit", by=by), answer


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param(PUSHED, id="halfway read the answer to a check"),
        pytest.param((*PUSHED, TOPIC_DENIED), id="the same, and a fault of a topic: the verdict can be recorded"),
        *(
            pytest.param(
                (*commit(503, "topic_unavailable", by=by), *fault), id=f"by {by}, recorded, {len(fault)} fault"
            )
            for by in ("producer", "operator", "check")
            for fault in ((), (KILL,))
        ),
        pytest.param(commit(413, "message_too_large"), id="too large"),
        pytest.param(commit(503, "not_authorised"), id="not authorised"),
        pytest.param(commit(503, "end_unconfirmed"), id="not confirmed, and nothing happened"),
        pytest.param((*commit(503, "end_unconfirmed"), TOPIC_DENIED), id="not confirmed, and a fault of a topic"),
        pytest.param(commit(0), id="not answered, and nothing happened"),
        pytest.param(commit(202), id="one way, and nothing happened"),
        pytest.param(
            (*commit(202), Serving(at=7 * SECOND, shard=1, serving=False)), id="one way, and another shard was unserved"
        ),
    ],
)
def test_policy_must_not_roll_back_what_somebody_said_to_commit(answers: tuple[Event, ...]) -> None:
    """A refusal promises that the commit is in the log; any other commit is remembered unless its owner dies."""
    assert found(*rolled_back_by_policy(*answers)) == {("contradicted", "policy_against_a_commit", "a")}


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param(PUSHED[:1], id="nobody is known to have read the answer"),
        pytest.param((Checked(at=5, id="a", said="unknown"), Taken(at=6, id="a", said="unknown")), id="no verdict"),
        pytest.param((PUSHED[0], Taken(at=20 * SECOND, id="a", said="commit")), id="at the very moment"),
        pytest.param((*PUSHED, KILL), id="a fault in between"),
        pytest.param((*commit(503, "end_unconfirmed"), KILL), id="not confirmed, and a fault in between"),
        pytest.param((*commit(202), KILL), id="one way, and a fault in between"),
        pytest.param((*commit(202), *AWAY), id="one way, and its shard was unserved in between"),
        pytest.param((*commit(0), TOPIC_DENIED), id="not answered, and any fault"),
        pytest.param(commit(0, at=20), id="not answered in time"),
        pytest.param(commit(503, "shard_unavailable"), id="nobody served its shard"),
        pytest.param(commit(429, "overloaded"), id="not taken"),
    ],
)
def test_policy_may_roll_back_where_a_commit_need_not_have_been_heard(answers: tuple[Event, ...]) -> None:
    """Whoever heard it may have died with it, or nobody did."""
    assert found(*rolled_back_by_policy(*answers)) == set()


@pytest.mark.parametrize("status, since, stuck", [(503, 5, set()), (503, 0, {"a"}), (201, 5, {"a"})])
def test_a_half_that_was_cut_may_end_nowhere_if_nobody_was_told_of_it(status: int, since: int, stuck: set[str]) -> None:
    """Its owner need not have the payload of what it has not acknowledged, and cannot write it again."""
    history: History = [
        Run(seed=7, topics=TOPICS),
        Prepare(at=1, ref="r", group="g", contents=(content("a"),), id="a"),
        Prepared(at=2, sent_at=1, ref="r", status=status, id="a", state="prepared" if status == 201 else None),
        LogLost(at=6, since=since, kind="half"),
        Rest(at=60 * SECOND),
    ]
    records: Topics = [half("a", content("a"), offset=1)]
    assert {name for count, _, name in found(history, records) if count == "stuck"} == stuck


@pytest.mark.parametrize("end, stuck", [(1, set()), (2, {"a"})])
def test_a_half_that_was_lost_together_with_its_tombstone_is_not_left(end: int, stuck: set[str]) -> None:
    """If only the tombstone is lost, the half is in the log, and the tombstone must be written again."""
    history, topics = good()
    topics[:] = [record for record in topics if not (isinstance(record, Half) and record.id == "a")]
    topics.append(half("a", content("a"), offset=1))
    at_end(history, LogLost(at=21, since=20, kind="half", ends={0: end}))
    assert {name for count, _, name in found(history, topics) if count == "stuck"} == stuck


def test_what_stood_in_a_topic_that_was_deleted_may_be_gone() -> None:
    """All of it or a part; what was prepared afterwards must stand."""
    history, topics = good()
    without(topics, ("a", 3), ("d", 1))
    missing = {("torn", "committed_in_part", "a"), ("lost", "committed_and_not_there", "d")}
    assert found(history, topics) == missing
    at_end(history, Removed(at=21, topic="points"))
    assert found(history, topics) == {("lost", "committed_and_not_there", "d")}
    at_end(history, Removed(at=10, topic="orders"))
    assert found(history, topics) == {("lost", "committed_and_not_there", "d")}
    at_end(history, Removed(at=21, topic="orders"))
    assert found(history, topics) == set()


def test_an_outcome_that_was_written_again_after_op_was_made_again_is_one_outcome() -> None:
    """It names no message then. Another outcome, or one that was decided anew, is wrong."""
    history, topics = good()
    at_end(history, LogLost(at=21, since=20, kind="op"))
    again = Op(shard=0, offset=0, life=1, id="a", kind="COMMITTED", cause="producer")
    assert found(history, [*topics, again]) == set()
    anew = msgspec.structs.replace(again, messages=marks_of((SAME, SAME, content("a", "points"))))
    assert found(history, [*topics, anew]) == {("contradicted", "resolved_twice", "a")}
    other = msgspec.structs.replace(again, kind="ROLLED_BACK")
    assert ("contradicted", "two_outcomes", "a") in found(history, [*topics, other])


def test_an_outcome_that_was_taken_for_lost_and_written_again_is_one_outcome() -> None:
    """The marker is as the one before it, without the messages. With another time it was decided anew."""
    history, topics = good()
    [first] = [record for record in topics if isinstance(record, Op) and record.id == "a"]
    topics[topics.index(first)] = first = msgspec.structs.replace(first, at=5)
    again = msgspec.structs.replace(first, offset=90, messages=())
    assert found(history, [*topics, again]) == set()
    anew = msgspec.structs.replace(again, at=first.at + 1)
    assert found(history, [*topics, anew]) == {("contradicted", "resolved_twice", "a")}
    assert ("contradicted", "two_outcomes", "a") in found(
        history, [*topics, msgspec.structs.replace(again, kind="ROLLED_BACK")]
    )


@pytest.mark.parametrize("since, at, explained", [(16, 18, True), (18, 19, False), (14, 15, False)])
def test_only_an_end_that_was_on_its_way_when_op_was_deleted_may_be_done_twice(
    since: int, at: int, *, explained: bool
) -> None:
    """The check says commit at 16, and a caller has the outcome at 17."""
    history, topics = good()
    at_end(history, LogLost(at=at, since=since, kind="op"))
    marker = Op(shard=0, offset=0, life=1, id="d", kind="COMMITTED", cause="check")
    topics += [real("d", "1/1", content("d"), offset=9), marker]
    doubled = {("doubled", "message_stands_again", "d")}
    assert found(history, topics) == (set() if explained else doubled)


@pytest.mark.parametrize("shard, at, count", [(0, 30, 4), (1, 30, 0), (0, 0, 0)])
def test_what_kafka_and_the_memory_of_an_owner_lost_at_once_is_excused(shard: int, at: int, count: int) -> None:
    """Transactions of other shards, and later ones, are judged. The number of those that are not is shown."""
    history, topics = good()
    no_op(topics, "a")
    topics.remove(next(record for record in topics if isinstance(record, Real)))
    wrong = found(history, topics)
    assert wrong
    at_end(history, LostInMemory(at=at, since=at - 5, shards=(shard,)))
    verdict = judge(history, topics)
    assert verdict.excused == count
    assert bool(verdict.findings) == (not count)


@pytest.mark.parametrize("is_before", [True, False])
def test_what_had_ended_before_the_end_that_was_lost_is_judged(*, is_before: bool) -> None:
    """Nobody needed to have it in memory."""
    history, topics = good()
    [marker] = [record for record in topics if isinstance(record, Op) and record.id == "a"]
    topics[:] = [record for record in topics if not isinstance(record, Real) or record.id != "a"]
    ends = {"op": {marker.shard: marker.offset + is_before}, "half": {0: 90}}
    at_end(history, LostInMemory(at=30, since=25, shards=(0,), ends=ends))
    assert (("lost", "committed_and_not_there", "a") in found(history, topics)) == is_before


@pytest.mark.parametrize("at_once", [True, False])
def test_what_left_no_record_belongs_to_the_shard_of_its_id(at_once: bool) -> None:
    """Kafka's partitioner says which, as it does for the records of ids."""
    assert all(partition_of(name.encode(), 7) == shard_of(name, 7) for name in ("a", "ab", "abc", "abcd", "abcde"))
    history, topics = good()
    history[0] = Run(seed=7, topics=TOPICS, shards=7)
    no_op(topics, "a")
    topics[:] = [record for record in topics if record.id != "a"]
    assert ("lost", "acknowledged_prepare_is_not_there", "a") in found(history, topics)
    shard = partition_of(b"a", 7)
    at_end(history, LostInMemory(at=30, since=25, shards=(shard if at_once else (shard + 1) % 7,)))
    assert (judge(history, topics).excused == 1) == at_once


def test_an_outcome_is_forgotten_when_its_time_is_over_and_no_sooner() -> None:
    """An id is unknown then; before that an answer that takes the outcome back is wrong."""
    history, topics = good()
    history[0] = Run(seed=7, topics=TOPICS, wall=WALL, horizon_s=150)
    no_op(topics, "a")
    topics.append(Op(shard=0, offset=20, id="a", kind="COMMITTED", cause="producer", at=WALL + 4))
    at_end(history, Looked(at=100 * SECOND, sent_at=100 * SECOND, id="a", status=404, error_code="unknown_transaction"))
    assert found(history, topics) == set()
    at_end(history, Looked(at=50 * SECOND, sent_at=50 * SECOND, id="a", status=404, error_code="unknown_transaction"))
    assert found(history, topics) == {
        ("lost", "acknowledged_prepare_is_unknown", "a"),
        ("contradicted", "outcome_taken_back", "a"),
    }


def test_an_id_is_decided_once_also_past_the_horizon() -> None:
    """A prepare that comes then is refused; what is accepted is a second outcome, whatever its content."""
    history, topics = good()
    history[0] = Run(seed=7, topics=TOPICS, wall=WALL, horizon_s=150)
    topics[:] = [msgspec.structs.replace(one, at=WALL) if isinstance(one, Op) else one for one in topics]
    late = 200 * SECOND
    at_end(
        history,
        Prepare(at=late, ref="r9", group="g", contents=(content("z"),), id="d"),
        Prepared(at=late, sent_at=late, ref="r9", status=410, id="d", error_code="outcome_expired"),
    )
    assert found(history, topics) == set()
    at_end(history, Prepared(at=late, sent_at=late, ref="r9", status=201, id="d", state="prepared"))
    topics += [half("d", content("z"), offset=30), half("d", offset=31)]
    topics.append(Op(shard=0, offset=40, id="d", kind="ROLLED_BACK", cause="check", half_offset=30, at=WALL + late))
    at_end(history, Checked(at=late, id="d", said="rollback"))
    assert found(history, topics) == {
        ("contradicted", "outcome_taken_back", "d"),
        ("contradicted", "resolved_twice", "d"),
        ("contradicted", "two_contents_acknowledged", "d"),
        ("contradicted", "two_outcomes", "d"),
    }


def test_an_id_that_is_refused_for_its_age_while_it_is_pending_is_lost() -> None:
    """Halfway says 410 of what it does not know: that is as good as 404."""
    history, topics = good()
    at_end(history, Looked(at=21, sent_at=20, id="a", status=410, error_code="outcome_expired"))
    assert ("lost", "acknowledged_prepare_is_unknown", "a") in found(history, topics)


def away(since_s: int, until_s: int) -> tuple[Serving, Serving]:
    return (Serving(at=since_s * SECOND, shard=3, serving=False), Serving(at=until_s * SECOND, shard=3, serving=True))


def test_how_long_shards_were_away_and_calls_took_are_figures() -> None:
    """In seconds; what has not come back was away until the end."""
    history, topics = good()
    history[-1] = Rest(at=130 * SECOND)
    at_end(history, *away(30, 50), *away(60, 65), Serving(at=125 * SECOND, shard=4, serving=False))
    summary = judge(history, topics).summary()
    assert summary["away_s"] == {
        "most": 20.0,
        "shards": {"3": {"times": 2, "most": 20.0, "all": 25.0}, "4": {"times": 1, "most": 5.0, "all": 5.0}},
    }
    assert summary["late"] == 0


FAULT = Fault(at=190 * SECOND, since=40 * SECOND, kind="broker_kill", target="broker-1")


@pytest.mark.parametrize(
    "fault, late",
    [
        pytest.param((), True, id="no fault"),
        pytest.param((FAULT,), False, id="a fault for most of the time"),
        pytest.param((Fault(at=70 * SECOND, since=40 * SECOND, kind="kill", target="c"),), True, id="a short fault"),
        pytest.param(
            (Fault(at=190 * SECOND, since=40 * SECOND, stops_ms=0, kind="topic_deleted", target="orders"),),
            True,
            id="a fault of a topic",
        ),
        pytest.param(
            tuple(Fault(at=(60 + n) * SECOND, since=40 * SECOND, kind="k", target="c") for n in range(9)),
            True,
            id="many faults at one time explain no more than one",
        ),
    ],
)
def test_a_shard_must_not_be_away_for_longer_than_faults_explain(fault: tuple[Fault, ...], late: bool) -> None:
    """By ninety seconds and what lies in faults that stop shards."""
    history, topics = good()
    at_end(history, *away(40, 200), *fault)
    assert found(history, topics) == ({("late", "shard_was_away_without_a_fault", "")} if late else set())


@pytest.mark.parametrize("faults, late", [((), True), ((FAULT,), False)])
def test_an_acknowledged_call_must_not_take_longer_than_faults_explain(faults: tuple[Fault, ...], late: bool) -> None:
    """From when it was sent to its answer, with all its tries."""
    history, topics = good()
    at_end(history, *faults, Looked(at=200 * SECOND, sent_at=40 * SECOND, id="a", status=200, state="committed"))
    assert found(history, topics) == ({("late", "call_took_long_without_a_fault", "a")} if late else set())


def test_a_partition_that_consumers_cannot_read_to_its_end_is_stuck() -> None:
    """Whatever the reason: what stands behind there reaches nobody."""
    history, topics = good()
    at_end(history, Held(at=21, topic="orders", partition=1, end=7))
    assert found(history, topics) == {("stuck", "consumers_are_held_back", "")}
