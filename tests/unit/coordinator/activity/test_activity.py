"""The recent activity of an instance: rates over ten seconds, and failures until they end, in bounded memory."""

import pytest

from halfway.coordinator.ports import CheckAttempt, CheckReply
from halfway.coordinator.queries import action_log as journal
from halfway.coordinator.queries import activity
from halfway.coordinator.queries.action_log import Journal
from halfway.coordinator.queries.activity import Activity
from halfway.memory import ManualClock, RecordingObserver
from halfway.protocol.transactions import Outcome


class Seconds:
    """A clock of whole seconds that a test advances."""

    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    clock = Seconds()
    monkeypatch.setattr(activity, "_second", clock)
    return clock


@pytest.fixture
def observer() -> RecordingObserver:
    return RecordingObserver()


@pytest.fixture
def seen(observer: RecordingObserver) -> Activity:
    return Activity(observer, ManualClock())


def reply(number: int, detail: str = "status 502, not 200") -> CheckReply:
    attempt = CheckAttempt(
        host=f"http://h{number}", sent=True, answered=False, status=502, detail=detail, excerpt="x", duration_s=0.1
    )
    return CheckReply(
        outcome=Outcome.UNKNOWN, sent=True, answered=False, reachable=True, detail=detail, attempts=(attempt,)
    )


def test_a_rate_is_the_mean_of_the_last_ten_whole_seconds(seen: Activity, seconds: Seconds) -> None:
    """The current second and older ones do not count in the rate; the total counts all."""
    for _ in range(10):
        seen.note_outcomes({"shop": 30}, "commit", "producer")
        seconds.now += 1
    (told,) = seen.ends()
    assert (told.names, told.total, told.per_s) == (("commit", "producer"), 300, 30.0)
    seen.note_outcomes({"shop": 1000}, "commit", "producer")
    assert seen.ends()[0].per_s == 30.0
    seconds.now += 5
    assert seen.ends()[0].per_s == (5 * 30 + 1000) / 10
    seconds.now += 3600
    assert (seen.ends()[0].per_s, seen.ends()[0].total) == (0.0, 1300)


def test_a_group_has_its_own_figures(seen: Activity, seconds: Seconds) -> None:
    seen.prepared({"shop": 20}, "prepared", 0.1)
    seen.prepared({"shop": 20}, "group_limited", 0.1)
    seen.prepared({"other": 10}, "prepared", 0.1)
    seen.note_outcomes({"shop": 3}, "commit", "check")
    seconds.now += 1
    assert (seen.prepares(), seen.prepares("shop"), seen.prepares("nobody")) == (3.0, 2.0, 0.0)
    assert seen.ends("other") == []


def test_more_groups_than_there_is_room_for_are_counted_together(seen: Activity, seconds: Seconds) -> None:
    for number in range(activity.MAX_GROUPS + 20):
        seen.prepared({f"g{number}": 10}, "prepared", 0.1)
        seen.note_outcomes({f"g{number}": 1}, "commit", "producer")
        seen.note_check_reply(f"g{number}", reply(0))
    seconds.now += 1
    assert seen.prepares() == activity.MAX_GROUPS + 20
    assert sum(one.total for one in seen.ends()) == activity.MAX_GROUPS + 20
    assert seen.endpoints(f"g{activity.MAX_GROUPS + 10}") == ()


def test_everything_is_passed_on(seen: Activity, observer: RecordingObserver, seconds: Seconds) -> None:
    seen.lane_committed(4, 100, 0.5)
    seen.lane_failed("fenced")
    seen.skipped_record("_halfway.op", "wrong_key")
    seen.checked("shop", "none", sent=True, seconds=0.1)
    assert [call.event for call in observer.calls] == ["lane_committed", "lane_failed", "skipped_record", "checked"]
    seconds.now += 1
    assert (seen.lane.commits_per_s, seen.lane.ends_per_s, seen.lane.commit_s) == (0.1, 0.4, 0.5)
    assert seen.lane.last_failure is not None
    assert (seen.lane.failures, seen.lane.last_failure.reason) == (1, "fenced")


def test_failures_are_bounded_and_forgotten_once_they_are_mended(seen: Activity) -> None:
    for number in range(activity.MAX_ENTRIES + 50):
        seen.note_refused_write(f"t{number}", f"topic-{number}", "topic_unavailable", "d", 1.0)
        seen.skipped_record(f"topic-{number}", "wrong_key")
    topics, writes, skipped = seen.failing
    assert len(topics) == len(writes) == len(skipped) == activity.MAX_ENTRIES
    assert topics[-1].topic == f"topic-{activity.MAX_ENTRIES + 49}"
    for number in range(activity.MAX_ENTRIES + 50):
        seen.clear_failures(f"t{number}", [f"topic-{number}"])
    assert seen.failing[:2] == ((), ())


def test_a_journal_keeps_the_last_of_each_and_the_last_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_IDS", 3)
    kept = Journal(0)
    for number in range(5):
        for attempt in range(journal.MAX_EVENTS_PER_ID + 4):
            kept.add_check(f"t{number}", attempt, reply(number), attempt)
    assert [bool(kept.events_of(f"t{number}")) for number in range(5)] == [False, False, True, True, True]
    assert [event.attempt for event in kept.events_of("t4")] == [*range(4, journal.MAX_EVENTS_PER_ID + 4)]


def test_large_answers_of_endpoints_push_out_the_oldest_and_equal_ones_count_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory for answers of endpoints is bounded, independent of their size."""
    monkeypatch.setattr(journal, "MAX_BYTES", 10_000)
    kept = Journal(0)

    def answered(name: str, attempt: int, excerpt: str) -> None:
        one = CheckAttempt(
            host="http://shop",
            sent=True,
            answered=False,
            status=502,
            detail="status 502, not 200",
            excerpt=excerpt,
            duration_s=0.1,
        )
        reply = CheckReply(
            outcome=Outcome.UNKNOWN, sent=True, answered=False, reachable=True, detail="502", attempts=(one,)
        )
        kept.add_check(name, attempt, reply, attempt)

    for number in range(100):
        for attempt in range(40):
            answered(f"same-{number}", attempt, "a page of 502 " * 30)
    assert len(kept.events_of("same-0")) == 16
    for number in range(100):
        answered(f"own-{number}", 1, f"{number} " + "x" * 500)
    assert not kept.events_of("same-99")
    assert [number for number in range(100) if kept.events_of(f"own-{number}")] == list(range(83, 100))
    assert kept._bytes <= 10_000
    assert len(kept._texts) == 18


def test_a_deleted_group_leaves_its_place_to_others_and_the_totals_stay(
    seen: Activity, seconds: Seconds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity, "MAX_GROUPS", 3)
    registered = {"a", "b", "c"}
    seen.is_registered = registered.__contains__
    for group in "abc":
        seen.prepared({group: 10}, "prepared", 0.1)
        seen.note_outcomes({group: 10}, "committed", "producer")
        seen.checked(group, "unknown", sent=True, seconds=0.1)
        seen.note_check_reply(group, reply(1))
    registered -= {"a", "b"}
    registered.add("d")
    seen.prepared({"d": 10}, "prepared", 0.1)
    seen.note_outcomes({"d": 10}, "committed", "producer")
    seen.note_check_reply("d", reply(1))
    seconds.now += 1
    assert (seen.prepares("d"), seen.prepares("a"), seen.prepares()) == (1, 0, 4)
    assert [tally.total for tally in seen.ends("d")] == [10]
    assert [tally.total for tally in seen.ends()] == [40]
    assert [tally.total for tally in seen.checks()] == [3]
    assert seen.endpoints("a") == ()
    assert len(seen.endpoints("d")) == 1
