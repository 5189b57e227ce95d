"""The end of the checks without a verdict: halfway parks, to be ended or resumed, or rolls back."""

from halfway.protocol.records import OpKind
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.rest_client import Rest, message
from tests.support.coordinator.topics import Cluster, InternalTopics

SOON = {"first_check_after_s": 0.2, "check_interval_s": 0.2, "max_interval_s": 0.2, "max_checks": 1000}
TWICE = {**SOON, "max_checks": 2}


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


async def test_a_parked_one_can_still_be_ended(
    rest: Rest, endpoint: CheckEndpoint, cluster: Cluster, internal: InternalTopics, group: str, topic: str
) -> None:
    """A late commit of the producer is delivered once, a late rollback is accepted; both are final."""
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=TWICE)).expect(201)
    late_commit = await rest.prepared(group, [message(topic, "late")])
    late_rollback = await rest.prepared(group, [message(topic, "never")])
    for transaction in (late_commit, late_rollback):
        await rest.until(transaction, "parked")

    assert (await rest.commit(late_commit))["changed"] is True
    assert (await rest.rollback(late_rollback))["changed"] is True

    assert (await rest.commit(late_commit))["changed"] is False
    (await rest.end(late_rollback, "commit")).refused(409, "already_ended")
    assert [record.value for record in await cluster.read(topic)] == [b"late"]
    assert (await internal.kinds(late_commit))[-2:] == [(OpKind.PARKED, "policy"), (OpKind.COMMITTED, "producer")]
    assert (await internal.kinds(late_rollback))[-1] == (OpKind.ROLLED_BACK, "producer")
    for transaction in (late_commit, late_rollback):
        assert (await internal.parked(transaction))[-1] is None
        (await rest.resume(transaction)).refused(409, "already_ended")


async def test_a_parked_one_can_be_resumed(
    rest: Rest, endpoint: CheckEndpoint, cluster: Cluster, internal: InternalTopics, group: str, topic: str
) -> None:
    """Its count starts at 0 again, and a verdict resolves it."""
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=TWICE)).expect(201)
    transaction = await rest.prepared(group, [message(topic, "resumed")])
    await rest.until(transaction, "parked")
    endpoint.answer("commit")

    resumed = (await rest.resume(transaction)).expect(200)

    assert (resumed["id"], resumed["state"], resumed["checks"]) == (transaction, "prepared", 0)
    shown = await rest.until(transaction, "committed")
    assert shown["cause"] == "check"
    assert [asked.attempt for asked in endpoint.asked_about(transaction)] == [1, 2, 1]
    assert await internal.kinds(transaction) == [
        (OpKind.CHECKED, "check"),
        (OpKind.CHECKED, "check"),
        (OpKind.PARKED, "policy"),
        (OpKind.RESUMED, "operator"),
        (OpKind.COMMITTED, "check"),
    ]
    assert [record.value for record in await cluster.read(topic)] == [b"resumed"]
