"""The second port: liveness, readiness and metrics."""

import re

from prometheus_client.parser import text_string_to_metric_families

from deploy.metrics import rows
from halfway.embedded.broker import HOST, pick_port
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.metrics import samples, total
from tests.support.coordinator.rest_client import Rest, message
from tests.support.queries import named, queries
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
    for words in ("prepare seconds", "end seconds", "commit seconds", "batch", "lag", "overdue"):
        assert any(all(word in name for word in words.split()) for name, _ in found), words
    assert total(found, "overdue", group=group) == 0
    for transaction in pending:
        await rest.rollback(transaction)


NOT_HERE = {
    "halfway_audit_events_total",  # with keys
    "halfway_audit_transactions",  # by the audit
    "halfway_changes_waiting",  # while something waits
    "halfway_forwarded_seconds",  # with other instances
    "halfway_forwarded_total",
    "halfway_kafka_round_trip_p99_seconds",  # after 15 s
    "halfway_kafka_round_trip_seconds",
    "halfway_keys_age_seconds",  # with keys
    "halfway_missing_transactions_total",  # with a fault of Kafka
    "halfway_shard_not_acquired_seconds",
    "halfway_stream_operations_total",  # with a stream
    "halfway_worker_replaced_total",  # with workers
}
"""What this run does not export with each label."""


async def test_queries_and_reference_fit_what_is_exported(
    rest: Rest, endpoint: CheckEndpoint, group: str, topic: str
) -> None:
    """Each query of alerts and dashboard finds its metrics and labels; the reference has the labels of each sample."""
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=HASTY)).expect(201)
    await rest.commit(await rest.prepared(group, [message(topic)], check_after_s=3600))
    await rest.until(await rest.prepared(group, [message(topic)]), "parked")
    await eventually(lambda: samples(rest), lambda found: total(found, "to_outcome count", group=group) > 0)
    status, text = await rest.health("/metrics")
    assert status == 200
    documented = {row.name: row for row in rows()}
    exported: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        row = documented[family.name + {"counter": "_total"}.get(family.type, "")]
        assert (row.type, row.text) == (family.type, family.documentation)
        for sample in family.samples:
            exported.setdefault(sample.name, set()).update(sample.labels)
            for label, value in sample.labels.items():
                known = row.labels.get(label)
                assert label == "le" or isinstance(known, str) or value in (known or ()), sample
    missing = set()
    for query in queries():
        for metric, labels in named(query).items():
            if metric in exported:
                assert labels.keys() - {"job", "instance"} <= exported[metric], query
            elif metric != "up":
                missing.add(re.sub(r"_(bucket|sum|count)$", "", metric))
    assert missing <= NOT_HERE
