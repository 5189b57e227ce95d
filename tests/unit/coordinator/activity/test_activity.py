"""What an instance has seen lately: endpoints, and failures until they end, in bounded memory."""

import pytest

from halfway.coordinator.ports import CheckAttempt, CheckReply
from halfway.coordinator.queries import activity
from halfway.coordinator.queries.activity import Activity
from halfway.protocol.transactions import Outcome
from tests.support.surroundings import ManualClock, RecordingObserver


@pytest.fixture
def observer() -> RecordingObserver:
    return RecordingObserver()


@pytest.fixture
def seen(observer: RecordingObserver) -> Activity:
    return Activity(observer, ManualClock())


def reply(number: int, detail: str = "status 502, not 200") -> CheckReply:
    attempt = CheckAttempt(
        host=f"http://h{number}", sent=True, answered=False, status=502, detail=detail, duration_s=0.1
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
