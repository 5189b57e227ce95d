"""An end that cannot be written delays no other end, and its caller gets the error."""

import asyncio
from functools import partial

import pytest
from confluent_kafka.admin import AclOperation, ResourceType  # type: ignore[attr-defined]  # they are there

from tests.support.brokers.guarded import USERS, GuardedKafka, credentials
from tests.support.coordinator.callers import Callers
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.metrics import samples, total
from tests.support.coordinator.process import NewCoordinator
from tests.support.coordinator.rest_client import NEVER_S, QUIET, Connect, Rest, message
from tests.support.coordinator.topics import Cluster, InternalTopics
from tests.support.waiting import eventually

ROUNDS = 3


async def lane_counts(rest: Rest) -> tuple[float, float, float]:
    """Return the number of failed incarnations, of the lane's Kafka transactions, and of the writes in them."""
    found = await samples(rest)
    return (
        total(found, "halfway_lane_failures_total"),
        total(found, "halfway_lane_batch_ends_count"),
        total(found, "halfway_lane_batch_ends_sum"),
    )


async def test_a_deleted_topic_blocks_its_own_transactions_only(
    new_coordinator: NewCoordinator, connect: Connect, cluster: Cluster, group: str
) -> None:
    """503 `topic_unavailable`, still pending with the error; others commit, and this one when the topic is back."""
    rest = connect(new_coordinator().start())
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
        # The first may end the incarnation, and the second may come while the next one takes over.
        assert answer.error_code in {"topic_unavailable", "end_unconfirmed", "shard_unavailable"}
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
        assert (await rest.commit(transaction, retry=True))["state"] == "committed"
    failures, transactions, writes = await lane_counts(rest)
    assert failures <= 1
    recorded = 2  # each refused commit, once
    assert transactions <= writes <= len(others) + 4 + recorded, (
        "what is refused is not tried in transactions that count"
    )
    assert sorted(record.value or b"" for record in await cluster.read(doomed)) == [b"both", b"victim"]


async def test_a_topic_that_was_made_again_takes_the_ends_of_what_was_prepared_before(
    rest: Rest, cluster: Cluster, group: str
) -> None:
    """Both producers of the lane have written to the old topic, which had another number of partitions."""
    again, alive = await cluster.make_topics("again", "alive")
    (await rest.put_group(group, topics=[again, alive], policy=QUIET)).expect(201)
    for number in range(4):
        await rest.commit(await rest.prepared(group, [message(again, f"old {number}", key=f"{number}")]))
    waiting = [
        await rest.prepared(group, [message(alive, f"{number}"), message(again, f"{number}", key=f"{number}")])
        for number in range(5)
    ]
    await cluster.delete_topic(again)
    await cluster.make_exactly(again, partitions=5)

    ended = await asyncio.gather(*(rest.end(transaction, "commit", retry=True) for transaction in waiting))

    assert [answer.expect(200)["state"] for answer in ended] == ["committed"] * len(waiting)
    for topic in (again, alive):
        assert sorted(record.transaction_id for record in await cluster.read(topic)) == sorted(waiting)


@pytest.mark.xdist_group("guarded_kafka")
async def test_a_topic_that_an_acl_denies_blocks_its_own_transactions_only(
    new_coordinator: NewCoordinator, connect: Connect, guarded_kafka: GuardedKafka, group: str
) -> None:
    """503 `not_authorised` with the reason, for a topic without write and one without describe; others continue."""
    coordinator = new_coordinator(
        credentials("entitled", USERS["entitled"]), bootstrap_servers=guarded_kafka.guarded_servers
    )
    cluster = Cluster(guarded_kafka.bootstrap_servers)
    unwritable, unseen, mixed, alive = topics = await cluster.make_topics("unwritable", "unseen", "mixed", "alive")
    for kind in (ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID):
        guarded_kafka.allow("entitled", kind, coordinator.prefix, AclOperation.ALL)
    for topic in topics:
        guarded_kafka.allow("entitled", ResourceType.TOPIC, topic, AclOperation.WRITE, AclOperation.DESCRIBE_CONFIGS)
    coordinator.start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=topics, policy=QUIET)).expect(201)
    denials = {unwritable: AclOperation.WRITE, unseen: AclOperation.DESCRIBE}
    victims = [
        (topic, await rest.prepared(group, [message(mixed), message(topic)])) for topic in denials for _ in range(3)
    ]

    async with Callers(rest, group, [alive], callers=4) as callers:
        history = callers.history
        await callers.committed(20)
        for topic, operation in denials.items():
            guarded_kafka.deny("entitled", topic, operation)
        for topic, victim in victims:
            answer = await eventually(
                partial(rest.end, victim, "commit"), lambda answer: answer.error_code == "not_authorised"
            )
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) > 0
            assert topic in answer.body["detail"]
        await callers.committed(20)
        refused = history.refused("end")
        for _ in range(ROUNDS):
            again = asyncio.gather(*(rest.end(victim, "commit") for _, victim in victims))
            await callers.committed(20)
            assert {answer.error_code for answer in await again} == {"not_authorised"}
        await callers.finish()
    assert history.refused("end") == refused, "the others were not held up any more"
    await history.audit(cluster, [alive])
    assert await cluster.read(mixed, *denials) == []
    for _, victim in victims:
        shown = await rest.show(victim)
        assert shown["state"] == "prepared"
        assert "not_authorised" in shown["last_error"]
    failures, transactions, writes = await lane_counts(rest)
    assert failures <= 1
    recorded = len(victims)  # each refused commit, once
    assert transactions <= writes <= len(history.committed) + len(history.rolled_back) + recorded

    for topic, operation in denials.items():
        guarded_kafka.stop_denying("entitled", topic, operation)

    for _, victim in victims:
        assert (await rest.commit(victim, retry=True))["state"] == "committed"
    for topic in denials:
        mine = sorted(victim for bad, victim in victims if bad == topic)
        assert sorted(record.transaction_id for record in await cluster.read(topic)) == mine
    assert sorted(record.transaction_id for record in await cluster.read(mixed)) == sorted(one for _, one in victims)


@pytest.mark.parametrize("said_by", ["a check", "the caller"])
async def test_a_commit_that_cannot_be_written_is_never_rolled_back_by_policy(
    new_coordinator: NewCoordinator,
    connect: Connect,
    cluster: Cluster,
    endpoint: CheckEndpoint,
    group: str,
    said_by: str,
) -> None:
    """The group chose rollback, commit was said, the topic is deleted: it is parked, also across a crash.

    Then checks are answered with `unknown`. The commit succeeds when the topic is back.
    """
    coordinator = new_coordinator().start()
    rest = connect(coordinator)
    doomed = await cluster.make_topic("doomed")
    policy = {"first_check_after_s": NEVER_S, "max_checks": 1, "on_exhausted": "rollback"}
    (await rest.put_group(group, topics=[doomed], urls=[endpoint.url], policy=policy)).expect(201)
    transaction = await rest.prepared(group, [message(doomed, "owed")])
    await cluster.delete_topic(doomed)
    # A topic that is deleted between two look-ups ends the incarnation: other answers until the next one serves.
    if said_by == "a check":
        endpoint.answer("commit")
        (await rest.check(transaction)).expect(202)
        await eventually(
            lambda: rest.show(transaction, retry=True), lambda shown: shown["commit_verdict"] and shown["checks"] == 1
        )
    else:
        await eventually(
            lambda: rest.end(transaction, "commit"), lambda answer: answer.error_code == "topic_unavailable"
        )
    endpoint.answer("unknown")
    coordinator.kill()
    coordinator.start()
    assert (await rest.show(transaction))["commit_verdict"] is True
    hasty = {"first_check_after_s": 0.1, "check_interval_s": 0.1, "max_interval_s": 0.1}
    (await rest.put_group(group, topics=[doomed], urls=[endpoint.url], policy={**policy, **hasty})).expect(200)
    (await rest.check(transaction)).expect(202, 409)  # it may be parked already
    shown = await eventually(lambda: rest.show(transaction, retry=True), lambda shown: shown["state"] != "prepared")
    assert (shown["state"], shown["commit_verdict"]) == ("parked", True)
    assert "commit was said" in shown["reason"]
    internal = InternalTopics(cluster, coordinator.prefix)
    assert [kind.value for kind, _ in await internal.kinds(transaction)][-1] == "PARKED"
    await cluster.make_exactly(doomed)
    await rest.commit(transaction, retry=True)
    assert [record.value for record in await cluster.read(doomed)] == [b"owed"]
