"""The second port: liveness, readiness and metrics."""

from halfway.embedded.properties import HOST, pick_port
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.metrics import samples, total
from tests.support.coordinator.process import CoordinatorProcess
from tests.support.coordinator.rest_client import QUIET, Rest, message
from tests.support.waiting import eventually

HASTY = {"first_check_after_s": 0.1, "check_interval_s": 0.1, "max_interval_s": 0.1, "max_checks": 1}


async def test_a_ready_coordinator_says_so(rest: Rest) -> None:
    assert (await rest.health("/health/live"))[0] == 200
    assert (await rest.health("/health/ready"))[0] == 200


async def test_health_is_not_on_the_port_of_the_api(rest: Rest, coordinator: CoordinatorProcess) -> None:
    for path in ("/health/live", "/health/ready", "/metrics"):
        async with rest.session.get(rest.url + path) as response:
            assert response.status == 404
    async with rest.session.get(f"{coordinator.health_url}/v1/groups") as response:
        assert response.status == 404


async def test_work_is_counted_by_group(rest: Rest, endpoint: CheckEndpoint, group: str, topic: str) -> None:
    """Prepares, ends by outcome, checks by verdict, pending and parked transactions, batches and commit latencies."""
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=HASTY)).expect(201)
    pending = [await rest.prepared(group, [message(topic)], check_after_s=3600) for _ in range(3)]
    committed = await rest.prepared(group, [message(topic)], check_after_s=3600)
    rolled_back = await rest.prepared(group, [message(topic)], check_after_s=3600)
    parked = await rest.prepared(group, [message(topic)])
    await rest.commit(committed)
    await rest.rollback(rolled_back)
    await rest.until(parked, "parked")
    refused = f"http://{HOST}:{pick_port()}/check"
    (await rest.put_group(f"{group}-down", topics=[topic], urls=[refused], policy=HASTY)).expect(201)
    await rest.prepared(f"{group}-down", [message(topic)])

    found = await eventually(
        lambda: samples(rest), lambda found: total(found, "check _total", group=f"{group}-down") > 0
    )

    assert total(found, "prepare _total", group=group) == 6
    assert total(found, "end _total", group=group, outcome="commit") == 1
    assert total(found, "end _total", group=group, outcome="rollback") == 1
    assert total(found, "check _total", group=group, verdict="unknown") == 1
    assert total(found, "pending", group=group) == 3
    assert total(found, "parked", group=group) == 1
    for words in ("prepare seconds", "end seconds", "commit seconds", "batch", "lag", "oldest"):
        assert any(all(word in name for word in words.split()) for name, _ in found), words
    assert total(found, "oldest", shard="0") + total(found, "oldest", shard="1") > 0
    for transaction in pending:
        await rest.rollback(transaction)


async def test_counters_to_alert_on_have_samples_before_their_first_event(rest: Rest) -> None:
    """An alert on the increase of a counter misses the first event if that event makes its sample."""
    found = (await rest.health("/metrics"))[1]
    for sample in (
        'halfway_lane_failures_total{reason="fenced"}',
        'halfway_skipped_records_total{reason="undecodable",topic=',
        'halfway_horizon_shortened_total{shard="0"}',
        'halfway_refused_callers_total{reason="no_key"}',
        'halfway_audit_events_total{result="lost"}',
    ):
        assert sample in found


async def test_names_that_nobody_registered_make_no_series(rest: Rest, group: str, topic: str) -> None:
    """Made-up groups and ids cannot fill the memory of the coordinator or of Prometheus."""
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    await rest.prepare("made-up", [message(topic)])
    await rest.end("made-up-id", "commit")
    await rest.get("made-up-id")
    assert "made-up" not in (await rest.health("/metrics"))[1]


async def test_the_api_describes_itself(rest: Rest) -> None:
    """OpenAPI 3.1 on the first port, with every call of the API."""
    async with rest.session.get(f"{rest.url}/openapi.json") as response:
        assert response.status == 200
        description = await response.json()
    assert description["openapi"].startswith("3.1")
    calls = {(path, method) for path, item in description["paths"].items() for method in item}
    assert {
        ("/v1/groups", "get"),
        ("/v1/groups/{group}", "put"),
        ("/v1/groups/{group}", "get"),
        ("/v1/groups/{group}", "delete"),
        ("/v1/groups/{group}/checks", "get"),
        ("/v1/transactions", "post"),
        ("/v1/transactions", "get"),
        ("/v1/transactions/{id}", "get"),
        ("/v1/transactions/{id}/end", "post"),
        ("/v1/transactions/{id}/check", "post"),
        ("/v1/transactions/{id}/resume", "post"),
        ("/v1/batch", "post"),
    } <= calls
