"""What an instance has seen lately: endpoints, and failures until they end, in bounded memory."""

import pytest

from halfway.coordinator.ports import CheckAttempt, CheckReply
from halfway.coordinator.queries import action_log as journal
from halfway.coordinator.queries import activity
from halfway.coordinator.queries.action_log import Journal
from halfway.coordinator.queries.activity import Activity
from halfway.memory import ManualClock, RecordingObserver
from halfway.protocol.transactions import Outcome


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


def test_the_endpoints_of_few_groups_are_kept(seen: Activity) -> None:
    for number in range(activity.MAX_GROUPS + 20):
        seen.note_check_reply(f"g{number}", reply(0))
    assert [len(seen.endpoints(f"g{number}")) for number in (19, 20, activity.MAX_GROUPS + 19)] == [0, 1, 1]


def test_everything_is_passed_on(seen: Activity, observer: RecordingObserver) -> None:
    seen.lane_committed(4, 100, 0.5)
    seen.lane_failed("fenced")
    seen.skipped_record("_halfway.op", "wrong_key")
    seen.checked("shop", "none", sent=True, seconds=0.1)
    assert [call.event for call in observer.calls] == ["lane_committed", "lane_failed", "skipped_record", "checked"]
    assert seen.lane_failure is not None
    assert seen.lane_failure.reason == "fenced"


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
