"""What is told of what happens: few lines for many events, what was seen lately, and traces in buckets."""

import threading
from collections.abc import Iterator

import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from structlog.testing import capture_logs
from structlog.typing import EventDict

from halfway.app.metrics import Metrics
from halfway.app.serve.worker import merged_metrics
from halfway.coordinator import logging as log_summary
from halfway.coordinator import tracing
from halfway.coordinator.logging import LogSummary, flush_all
from halfway.coordinator.ports import CheckAttempt, CheckReply, LaneWrite, Written
from halfway.coordinator.queries import activity
from halfway.coordinator.queries.activity import Activity
from halfway.coordinator.requests import Prepare, TraceContext
from halfway.protocol.records import Message
from halfway.protocol.transactions import Outcome, State
from tests.support.service.world import World
from tests.support.surroundings import ManualClock, RecordingObserver

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


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = f"00-{TRACE}-00f067aa0ba902b7-01"
ACCEPT = "application/openmetrics-text; version=1.0.0; escaping=allow-utf-8, text/plain; version=0.0.4; q=0.3"
SERIES = {
    ("halfway_prepare_seconds_bucket", "prepared"),
    ("halfway_end_seconds_bucket", "changed"),
    ("halfway_lane_commit_seconds_bucket", None),
}


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    """Observe one of each, of 50 s; the tests add traces."""
    metrics = Metrics()
    metrics.prepared({"shop": 1}, "prepared", 50)
    metrics.ended({"shop": 1}, "commit", "client", "changed", 50)
    metrics.lane_committed(1, 1, 50)
    yield metrics
    tracing.use(None)


async def traced(world: World, metrics: Metrics, provider: TracerProvider) -> None:
    tracing.use(provider)
    tracing.follow(metrics.traced)
    message = Message(topic="orders", value=b"v", headers=(("traceparent", CALLER.encode()),))
    request = Prepare(group="shop", messages=(message,), trace=TraceContext(traceparent=CALLER))
    done = await world.coordinator.prepare(request, deadline=world.deadline())
    await world.end(done.id, Outcome.COMMIT)
    write = LaneWrite(
        id=done.id, shard=0, group="shop", state=State.COMMITTED, prepared_at=0, deadline=0.0, messages=(message,)
    )
    tracing.sent([(write, Written())], 60.0)


def exemplars(page: bytes) -> list[tuple[str, str | None, str | None, str, str]]:
    """Return the series, the workers, the bounds and the traces of the exemplars of a valid page."""
    return [
        (
            one.name,
            one.labels.get("result"),
            one.labels.get("worker"),
            one.labels["le"],
            one.exemplar.labels["trace_id"],
        )
        for family in text_string_to_metric_families(page.decode())  # type: ignore[no-untyped-call]
        for one in family.samples
        if one.exemplar is not None
    ]


async def test_a_bucket_names_its_newest_trace_also_on_the_page_of_all_workers(world: World, metrics: Metrics) -> None:
    await traced(world, metrics, TracerProvider(shutdown_on_exit=False))
    page, content_type = metrics.render(ACCEPT)
    assert content_type.startswith("application/openmetrics-text")
    found = exemplars(page)
    assert {(name, result) for name, result, *_ in found} == SERIES
    assert {trace for *_, trace in found} == {TRACE}
    assert ("halfway_lane_commit_seconds_bucket", None, None, "+Inf", TRACE) in found, "60 s are in the last bucket"
    merged = exemplars(merged_metrics({0: page, 1: page, 2: None}, {0: 1}, ACCEPT))
    assert {(name, result, worker) for name, result, worker, *_ in merged} == {
        (*series, worker) for series in SERIES for worker in "01"
    }
    assert metrics.render()[0].startswith(b"# HELP")
    assert b"# {" not in metrics.render()[0] + merged_metrics({0: metrics.render()[0]}, {})


async def test_a_trace_that_is_not_sampled_is_not_named(world: World, metrics: Metrics) -> None:
    await traced(world, metrics, TracerProvider(ALWAYS_OFF, shutdown_on_exit=False))
    page, _ = metrics.render(ACCEPT)
    assert exemplars(page) == []


def test_the_page_is_as_ever_without_traces(metrics: Metrics) -> None:
    page, content_type = metrics.render(ACCEPT)
    assert content_type.startswith("text/plain")
    assert b"# EOF" not in page


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
