"""Buckets of latencies name a trace if traces are on and the scraper accepts OpenMetrics."""

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from halfway.app.metrics import Metrics
from halfway.app.serve.worker import merged_metrics
from halfway.coordinator import tracing
from halfway.coordinator.ports import LaneWrite, Written
from halfway.coordinator.requests import Prepare, TraceContext
from halfway.protocol.records import Message
from halfway.protocol.transactions import Outcome, State
from tests.support.service.world import World

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
