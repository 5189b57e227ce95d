"""An end that cannot be written holds up nobody else, and is told to its caller."""

import asyncio

from tests.acceptance.coordinator_process import NewCoordinator
from tests.acceptance.endpoints import CheckEndpoint
from tests.acceptance.rest_client import NEVER_S, QUIET, Connect, message
from tests.acceptance.topics import Cluster, InternalTopics
from tests.acceptance.waiting import eventually


async def test_a_deleted_topic_blocks_its_own_transactions_only(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, group: str
) -> None:
    """503 `topic_unavailable`, still pending, the error shown; others commit meanwhile, and it does when it is back."""
    coordinator = new_coordinator()
    coordinator.start()
    rest = connect(coordinator)
    doomed, alive = await cluster.make_topics("doomed", "alive")
    (await rest.put_group(group, topics=[doomed, alive], policy=QUIET)).expect(201)
    both = await rest.prepared(group, [message(alive, "both"), message(doomed, "both")])
    victim = await rest.prepared(group, [message(doomed, "victim")])
    rolled_back = await rest.prepared(group, [message(doomed, "rolled back")])
    others = [await rest.prepared(group, [message(alive, f"{number}")]) for number in range(20)]
    await rest.commit(await rest.prepared(group, [message(doomed, "seen by the producers")]))
    await cluster.delete_topic(doomed)

    blocked = asyncio.gather(rest.end(both, "commit"), rest.end(victim, "commit"))
    ended = await asyncio.gather(*(rest.end(transaction, "commit", retry=True) for transaction in others))

    assert all(answer.expect(200)["state"] == "committed" for answer in ended)
    for answer in await blocked:
        assert answer.status == 503, answer
        assert answer.error_code in {"topic_unavailable", "end_unconfirmed"}
    again = await eventually(
        lambda: rest.end(victim, "commit"), lambda answer: answer.error_code == "topic_unavailable"
    )
    assert again.status == 503
    assert doomed in again.body["detail"]
    shown = await rest.show(victim)
    assert shown["state"] == "prepared"
    assert "topic_unavailable" in shown["last_error"]
    assert (await rest.rollback(rolled_back))["state"] == "rolled_back", "a rollback writes nothing to the topic"
    assert {record.value for record in await cluster.read(alive)} == {str(number).encode() for number in range(20)}

    await cluster.make_exactly(doomed)

    for transaction in (both, victim):
        assert (await rest.end(transaction, "commit", retry=True)).expect(200)["state"] == "committed"
    assert sorted(record.value or b"" for record in await cluster.read(doomed)) == [b"both", b"victim"]


async def test_a_commit_verdict_that_cannot_be_written_is_never_rolled_back_by_policy(
    new_coordinator: NewCoordinator,
    connect: Connect,
    cluster: Cluster,
    endpoint: CheckEndpoint,
    group: str,
) -> None:
    """The group chose rollback, a check said commit, the topic is gone: it is parked, also across a crash."""
    coordinator = new_coordinator()
    coordinator.start()
    rest = connect(coordinator)
    internal = InternalTopics(cluster, coordinator.prefix)
    doomed = await cluster.make_topic("doomed")
    policy = {"first_check_after_s": NEVER_S, "max_checks": 1, "on_exhausted": "rollback"}
    (await rest.put_group(group, topics=[doomed], urls=[endpoint.url], policy=policy)).expect(201)
    transaction = await rest.prepared(group, [message(doomed, "owed")])
    await cluster.delete_topic(doomed)
    endpoint.answer("commit")

    (await rest.check(transaction)).expect(202)
    # A topic that goes away between two looks at it costs the incarnation: 503 until the next one serves.
    await eventually(
        lambda: rest.show(transaction, retry=True), lambda shown: shown["commit_verdict"] and shown["checks"] == 1
    )
    coordinator.kill()
    coordinator.start()
    assert (await rest.show(transaction))["commit_verdict"] is True
    hasty = {"first_check_after_s": 0.1, "check_interval_s": 0.1, "max_interval_s": 0.1}
    (await rest.put_group(group, topics=[doomed], urls=[endpoint.url], policy={**policy, **hasty})).expect(200)
    (await rest.check(transaction)).expect(202)

    shown = await eventually(lambda: rest.show(transaction, retry=True), lambda shown: shown["state"] != "prepared")

    assert shown["state"] == "parked"
    assert "commit" in shown["reason"]
    assert [kind.value for kind, _ in await internal.kinds(transaction)][-1] == "PARKED"
    await cluster.make_exactly(doomed)
    (await rest.end(transaction, "commit", retry=True)).expect(200)
    assert [record.value for record in await cluster.read(doomed)] == [b"owed"]
