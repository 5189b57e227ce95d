"""The second port: liveness, readiness and metrics."""

from halfway.embedded.broker import HOST, pick_port
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.metrics import samples, total
from tests.support.coordinator.rest_client import Rest, message
from tests.support.waiting import eventually

HASTY = {"first_check_after_s": 0.1, "check_interval_s": 0.1, "max_interval_s": 0.1, "max_checks": 1}


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
