"""Checks for producers without an endpoint: fetched by long poll, leased for a time."""

import asyncio
import time

from halfway.protocol.records import OpKind
from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.rest_client import NEVER_S, QUIET, Json, Rest, message, moment_ms
from tests.support.coordinator.topics import Cluster, InternalTopics

SOON = {"first_check_after_s": 0.2, "check_interval_s": 0.2, "max_interval_s": 0.2, "max_checks": 1000}
LONG_S = 30


async def test_a_waiting_poll_is_answered_when_a_check_is_due(
    rest: Rest, cluster: Cluster, internal: InternalTopics, group: str, topic: str
) -> None:
    """Not before; and the end with the `check_id` has the cause `check`."""
    (await rest.put_group(group, topics=[topic], policy={**SOON, "first_check_after_s": 1})).expect(201)
    poll = asyncio.create_task(rest.lease(group, wait_s=LONG_S))
    sent: Json = {"topic": topic, "key": "k", "value": "v", "headers": [], "partition": None}
    prepared = (await rest.prepare(group, [sent])).expect(201)

    (check,) = await poll

    assert time.time() * 1000 >= moment_ms(prepared["prepared_at"]) + 1000
    assert check["id"] == prepared["id"]
    assert check["group"] == group
    assert check["attempt"] == 1
    assert check["prepared_at"] == prepared["prepared_at"]
    assert check["messages"] == [sent]
    await rest.until_checked(prepared["id"], 1)
    ended = await rest.end(prepared["id"], "commit", check_id=check["check_id"])
    assert ended.expect(200)["changed"] is True
    assert await internal.kinds(prepared["id"]) == [(OpKind.CHECKED, "check"), (OpKind.COMMITTED, "check")]
    assert [record.value for record in await cluster.read(topic)] == [b"v"]


async def test_an_end_with_a_check_id_that_was_not_sent_has_the_cause_producer(
    rest: Rest, internal: InternalTopics, group: str, topic: str
) -> None:
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    transaction = await rest.prepared(group, [message(topic)])
    (await rest.end(transaction, "rollback", check_id=f"{transaction}:99")).expect(200)
    assert await internal.kinds(transaction) == [(OpKind.ROLLED_BACK, "producer")]


async def test_a_leased_check_is_not_handed_out_again_before_its_lease_has_passed(
    rest: Rest, group: str, topic: str
) -> None:
    """Several pollers share the checks; each lease is counted."""
    (await rest.put_group(group, topics=[topic], policy=SOON)).expect(201)
    prepared = await asyncio.gather(*(rest.prepared(group, [message(topic)]) for _ in range(10)))
    first: dict[str, float] = {}

    async def poll_until_all_are_leased() -> None:
        while len(first) < len(prepared):
            for check in await rest.lease(group, wait_s=1, at_most=3):
                leased_before = first.get(check["id"])
                if leased_before is not None:
                    assert time.time() * 1000 >= leased_before
                    assert check["attempt"] > 1
                first[check["id"]] = moment_ms(check["lease_until"])

    await asyncio.gather(*(poll_until_all_are_leased() for _ in range(4)))
    assert set(first) == set(prepared)

    again: dict[str, int] = {}
    while len(again) < len(prepared):
        for check in await rest.lease(group, wait_s=LONG_S):
            assert time.time() * 1000 >= first[check["id"]], "handed out twice within its lease"
            again[check["id"]] = check["attempt"]
            await rest.end(check["id"], "rollback", check_id=check["check_id"])
    assert all(attempt >= 2 for attempt in again.values())
    assert await rest.lease(group) == []


async def test_a_poll_takes_at_most_what_it_asks_for(rest: Rest, group: str, topic: str) -> None:
    (await rest.put_group(group, topics=[topic], policy={**SOON, "first_check_after_s": 0.1})).expect(201)
    prepared = set(await asyncio.gather(*(rest.prepared(group, [message(topic)]) for _ in range(5))))
    seen: set[str] = set()
    while len(seen) < 5:
        checks = await rest.lease(group, wait_s=LONG_S, at_most=2)
        assert 1 <= len(checks) <= 2
        seen |= {check["id"] for check in checks}
    assert seen == prepared


async def test_a_poll_without_a_due_check_is_answered_with_none(rest: Rest, group: str, topic: str) -> None:
    """At once, or when the time has passed; young and ended transactions are not handed out."""
    (await rest.put_group(group, topics=[topic], policy={**SOON, "first_check_after_s": 2})).expect(201)
    await rest.prepared(group, [message(topic)], check_after_s=NEVER_S)
    ended = await rest.prepared(group, [message(topic)])
    await rest.rollback(ended)
    assert await rest.lease(group) == []
    assert await rest.lease(group, wait_s=3) == []


async def test_checks_that_are_never_answered_are_exhausted(
    rest: Rest, internal: InternalTopics, group: str, topic: str
) -> None:
    """A lease counts as a sent check: after `max_checks` the transaction is parked."""
    (await rest.put_group(group, topics=[topic], policy={**SOON, "max_checks": 2})).expect(201)
    transaction = await rest.prepared(group, [message(topic)])
    attempts = []
    for _ in range(2):
        (check,) = await rest.lease(group, wait_s=LONG_S)
        attempts.append(check["attempt"])
    assert attempts == [1, 2]
    shown = await rest.until(transaction, "parked")
    assert shown["checks"] == 2
    assert (await internal.kinds(transaction))[-1] == (OpKind.PARKED, "policy")
    assert await rest.lease(group) == []


async def test_a_group_that_is_called_has_nothing_to_fetch(
    rest: Rest, endpoint: CheckEndpoint, group: str, topic: str
) -> None:
    (await rest.call("GET", f"/groups/{group}/checks")).refused(404, "unknown_group")
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=QUIET)).expect(201)
    answer = await rest.call("GET", f"/groups/{group}/checks")
    assert 400 <= answer.status < 500
    assert "pull" in answer.body["detail"]


async def test_a_check_asked_for_by_an_operator_reaches_a_waiting_poll(rest: Rest, group: str, topic: str) -> None:
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    transaction = await rest.prepared(group, [message(topic)])
    poll = asyncio.create_task(rest.lease(group, wait_s=LONG_S))
    (await rest.check(transaction)).expect(202)
    (check,) = await poll
    assert check["id"] == transaction
    await rest.end(transaction, "rollback", check_id=check["check_id"])
