"""An event that comes thousands of times is a few lines a minute with a sample, and all of it is counted."""

import threading

import structlog
from structlog.testing import capture_logs
from structlog.typing import EventDict

from halfway.coordinator import logging as log_summary
from halfway.coordinator.logging import LogSummary, flush_all

log = structlog.get_logger()
EVENT = "summed_up_by_these_tests"


def summary() -> LogSummary:
    return LogSummary(log, "warning", EVENT, every_s=3600)


def mine(logs: list[EventDict]) -> list[EventDict]:
    """Return the lines of these tests: the minute of another summary of the process can end meanwhile."""
    return [one for one in logs if one["event"] == EVENT]


def test_a_new_kind_is_logged_at_once_and_the_rest_once_a_minute_with_a_sample() -> None:
    gave_up = summary()
    with capture_logs() as logs:
        for number in range(100):
            gave_up.note({"group": "shop"}, id=f"s{number}")
            gave_up.note({"group": "bank"}, id=f"b{number}")
    assert [(one["group"], one["id"]) for one in mine(logs)] == [("shop", "s0"), ("bank", "b0")]
    with capture_logs() as logs:
        gave_up.flush()
    assert mine(logs)[0] == {
        "event": EVENT,
        "log_level": "warning",
        "group": "shop",
        "id": "s99",
        "more": 99,
        "within_s": 3600,
    }
    assert [one["more"] for one in mine(logs)] == [99, 99]
    with capture_logs() as logs:
        gave_up.flush()
    assert mine(logs) == []


def test_what_goes_on_is_one_line_a_minute_and_what_has_ended_is_new_again() -> None:
    gave_up = summary()
    with capture_logs() as logs:
        for _ in range(2):
            gave_up.note({"group": "shop"}, id="1")
        gave_up.note({"group": "bank"}, id="2")
        gave_up._end_minute()
        assert [one.get("more") for one in mine(logs)] == [None, None, 1]
        gave_up.note({"group": "shop"}, id="3")
        gave_up.note({"group": "bank"}, id="4")
        gave_up._end_minute()
    assert [(one["group"], one["id"], one.get("more")) for one in mine(logs)[3:]] == [
        ("bank", "4", None),
        ("shop", "3", 1),
    ]
    gave_up.flush()


def test_further_kinds_are_counted_together() -> None:
    """A caller that makes up names fills neither the memory nor the log."""
    gave_up = summary()
    with capture_logs() as logs:
        for number in range(10 * log_summary.MAX_KINDS):
            gave_up.note({"group": f"made-up-{number}"})
        gave_up.flush()
    assert len(mine(logs)) == log_summary.MAX_KINDS + 2
    assert mine(logs)[-1]["group"] is None
    assert mine(logs)[-1]["more"] == 9 * log_summary.MAX_KINDS - 1


def test_any_thread_may_note_and_a_stop_logs_what_is_left() -> None:
    flush_all()
    gave_up = summary()

    def note_many() -> None:
        for _ in range(1000):
            gave_up.note({"group": "shop"})

    with capture_logs() as logs:
        threads = [threading.Thread(target=note_many) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        flush_all()
    assert [one.get("more") for one in mine(logs)] == [None, 3999]
