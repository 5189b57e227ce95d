"""The end of the checks without a verdict: halfway parks."""

from halfway.protocol.records import OpKind
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.rest_client import Rest, message
from tests.support.coordinator.topics import Cluster, InternalTopics

SOON = {"first_check_after_s": 0.2, "check_interval_s": 0.2, "max_interval_s": 0.2, "max_checks": 1000}


async def test_the_largest_number_of_checks_is_sent_and_then_it_is_parked(
    rest: Rest, endpoint: CheckEndpoint, cluster: Cluster, internal: InternalTopics, group: str, topic: str
) -> None:
    """A parked transaction is listed with its reason, shown with its payload, not checked, and not delivered."""
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy={**SOON, "max_checks": 3})).expect(201)
    transaction = await rest.prepared(group, [message(topic, "kept", key="k")])

    shown = await rest.until(transaction, "parked")

    assert [asked.attempt for asked in endpoint.asked_about(transaction)] == [1, 2, 3]
    assert shown["checks"] == 3
    assert "max_checks" in shown["reason"]
    assert shown["messages"][0]["value"] == "kept"
    listed = await rest.page(group=group, state="parked")
    assert [one["id"] for one in listed["transactions"]] == [transaction]
    *checked, parked = await internal.kinds(transaction)
    assert checked == [(OpKind.CHECKED, "check")] * 3
    assert parked == (OpKind.PARKED, "policy")
    (record,) = await internal.parked(transaction)
    assert record is not None
    assert (record.checks, record.half.messages[0].value) == (3, b"kept")
    assert (await internal.halves(transaction))[-1] is None
    (await rest.check(transaction)).refused(409, "not_pending")
    assert (await rest.end(transaction, "unknown")).expect(200)["state"] == "parked"
    assert await cluster.read(topic) == []
