"""Health and metrics."""

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from halfway.app.metrics import MAX_GROUPS, Metrics
from halfway.http.console import Console
from halfway.http.server.health_port import HealthPort, Reason, ShardNotAcquired
from halfway.http.server.server import HttpServer
from tests.support.rest.client import HOST, RestWorld
from tests.support.rest.guarded import guarded


async def ask(port: int, path: str, method: str = "GET") -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as session, session.request(method, f"http://{HOST}:{port}{path}") as answer:
        return answer.status, answer.content_type, await answer.text()


async def test_it_is_alive_before_it_is_ready_and_says_why_it_is_not() -> None:
    reasons = [Reason(check="kafka", detail="not reached")]
    lacking: list[ShardNotAcquired] = []
    starting, warnings = list(reasons), list[Reason]()
    handler = HealthPort(
        starting=lambda: starting,
        reasons=lambda: reasons,
        warnings=lambda: warnings,
        not_acquired=lambda: lacking,
        metrics=Metrics().render,
    )
    server = HttpServer(handler)
    port = await server.start(HOST, 0)
    try:
        assert (await ask(port, "/health/live"))[0] == 200
        status, content_type, body = await ask(port, "/health/ready")
        assert (status, content_type) == (503, "application/json")
        reason = '"reasons":[{"check":"kafka","detail":"not reached"}]'
        assert body == f'{{"status":"not_ready",{reason},"warnings":[],"not_acquired":[]}}'
        assert await ask(port, "/health/started") == (503, "application/json", f'{{"status":"not_started",{reason}}}')
        starting.clear()
        assert await ask(port, "/health/started") == (200, "application/json", '{"status":"ok","reasons":[]}')
        reasons.clear()
        warnings.append(Reason(check="topics", detail="compacted"))
        status, _, body = await ask(port, "/health/ready")
        assert (status, '"warnings":[{"check":"topics","detail":"compacted"}]' in body) == (200, True)
        lacking.append(ShardNotAcquired(shard=3, since="2026-01-02T03:04:05Z", tries=2, error="held", remedy="look"))
        status, _, body = await ask(port, "/health/ready")
        assert status == 200
        assert '"not_acquired":[{"shard":3,"since":"2026-01-02T03:04:05Z","tries":2,"error":"held"' in body
        assert (await ask(port, "/v1/groups"))[:2] == (404, "application/problem+json")
        async with aiohttp.ClientSession() as session, session.post(f"http://{HOST}:{port}/metrics") as refused:
            assert (refused.status, refused.headers["Allow"]) == (405, "GET, HEAD")
    finally:
        await server.stop()


async def test_a_console_on_this_port_finds_the_api_here_with_its_keys() -> None:
    """Everything else is unchanged; without a console, this port does not serve the API."""
    async with guarded() as world:
        port = HealthPort(reasons=list, not_acquired=list, metrics=Metrics().render, api=world.here.api)
        server = HttpServer(port, console=Console())
        number = await server.start(HOST, 0)
        try:
            assert (await ask(number, "/console/"))[:2] == (200, "text/html")
            assert (await ask(number, "/v1/groups"))[0] == 401
            assert (await ask(number, "/openapi.json"))[0] == 200
            assert (await ask(number, "/health/live"))[0] == 200
            assert (await ask(number, "/v2"))[0] == 404
        finally:
            await server.stop()


async def test_gauges_show_what_the_coordinator_holds(world: RestWorld) -> None:
    metrics = Metrics()
    metrics.show(world.coordinator, world.api)
    await world.prepared()
    world.memory.clock.advance(5)
    text, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    found = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    assert found["halfway_pending", ("0",)] + found["halfway_pending", ("1",)] == 1
    assert found["halfway_group_overdue_seconds", ("shop",)] == 0
    assert found["halfway_group_pending", ("shop",)] == 1
    assert found["halfway_payload_cache_bytes", ()] > 0
    assert found["halfway_requests_in_flight", ()] == 0


def test_a_figure_is_read_at_each_scrape_with_a_sample_for_each_value_of_its_label() -> None:
    metrics, ages = Metrics(), dict[str, float]()
    metrics.show_gauges("halfway_ages", "Ages", "shard", lambda: ages)
    assert "halfway_ages{" not in metrics.render()[0].decode()
    ages["3"] = 600.0
    assert 'halfway_ages{shard="3"} 600.0\n' in metrics.render()[0].decode()


@pytest.mark.parametrize("group", ["", "made-up"])
def test_groups_beyond_a_bound_are_counted_together(group: str) -> None:
    metrics = Metrics()
    for number in range(MAX_GROUPS if group else 0):
        metrics.prepared({f"g{number}": 1}, "prepared", 0.01)
    metrics.prepared({group: 1}, "prepared", 0.01)
    metrics.ended({group: 1}, "commit", "producer", "changed", 0.01)
    metrics.resolved_after({group: 1}, "commit", 1)
    metrics.checked(group, "unknown", sent=True, seconds=1)
    text = metrics.render()[0].decode()
    assert 'halfway_prepares_total{group="other",result="prepared"} 1.0' in text
    assert "made-up" not in text


async def test_a_deleted_group_leaves_no_series_and_its_place_to_others(
    world: RestWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last figures are scraped once more. However many have come and gone, a new one is not counted as `other`."""
    monkeypatch.setattr("halfway.app.metrics.MAX_GROUPS", 3)
    metrics = Metrics()
    metrics.show(world.coordinator, world.api)

    def counted(group: str) -> None:
        metrics.prepared({group: 1}, "prepared", 0.01)
        metrics.ended({group: 1}, "commit", "producer", "changed", 0.01)
        metrics.resolved_after({group: 1}, "commit", 1)
        metrics.checked(group, "unknown", sent=True, seconds=1)

    def text() -> str:
        return metrics.render()[0].decode()

    for number in range(10):
        name = f"g{number}"
        group = {"check": {"mode": "pull"}, "topics": ["orders"]}
        assert (await world.call("PUT", f"/v1/groups/{name}", group)).status == 201
        counted(name)
        assert f'halfway_prepares_total{{group="{name}",result="prepared"}} 1.0' in text()
        assert (await world.call("DELETE", f"/v1/groups/{name}")).status == 204
        assert name in text()
        assert name not in text()
    counted("g9")  # an end of it that is repeated while its outcome is remembered
    assert "g9" not in text()
    assert 'halfway_prepares_total{group="other",result="prepared"} 1.0' in text()


async def test_idle_groups_take_no_places_from_busy_ones(world: RestWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape exports zeros for registered groups, but not if that would fill the places."""
    monkeypatch.setattr("halfway.app.metrics.MAX_GROUPS", 3)
    metrics = Metrics()
    metrics.show(world.coordinator, world.api)
    for number in range(12):
        group = {"check": {"mode": "pull"}, "topics": ["orders"]}
        assert (await world.call("PUT", f"/v1/groups/g{number}", group)).status == 201
    metrics.render()
    for busy in ("g4", "g8", "g11"):
        metrics.checked(busy, "unknown", sent=True, seconds=1)
        assert (
            f'halfway_checks_total{{group="{busy}",sent="true",verdict="unknown"}} 1.0' in metrics.render()[0].decode()
        )
