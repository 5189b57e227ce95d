"""Lists show pending, parked and recently ended transactions."""

import asyncio
from io import BytesIO

import pytest

from tests.support.coordinator.endpoints import CheckEndpoint
from tests.support.coordinator.rest_client import QUIET, Json, Rest, message, moment_ms
from tests.support.coordinator.topics import Cluster

HASTY = {"first_check_after_s": 0.1, "check_interval_s": 0.1, "max_interval_s": 0.1, "max_checks": 1}


def ids(page: Json) -> list[str]:
    return [one["id"] for one in page["transactions"]]


@pytest.fixture
async def one_of_each(rest: Rest, endpoint: CheckEndpoint, group: str, topic: str) -> dict[str, str]:
    """Return the ids of one transaction in each state."""
    (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy=HASTY)).expect(201)
    made = {
        state: await rest.prepared(group, [message(topic, "secret", key=state)], check_after_s=after_s)
        for state, after_s in (("prepared", 3600), ("parked", 0.1), ("committed", 3600), ("rolled_back", 3600))
    }
    await rest.commit(made["committed"])
    (await rest.end(made["rolled_back"], "rollback", remark="no stock")).expect(200)
    await rest.until(made["parked"], "parked")
    return made


async def test_each_state_can_be_listed(rest: Rest, group: str, one_of_each: dict[str, str]) -> None:
    """By state; all transactions without a state."""
    for state, transaction in one_of_each.items():
        page = await rest.page(group=group, state=state)
        assert ids(page) == [transaction]
        assert page["transactions"][0]["state"] == state
        assert page["next"] is None
    assert sorted(ids(await rest.page(group=group))) == sorted(one_of_each.values())


async def test_a_list_shows_no_payload_and_an_ended_one_has_none(
    rest: Rest, group: str, topic: str, one_of_each: dict[str, str]
) -> None:
    """Its data is kept for the outcome horizon, its payload while it is pending or parked."""
    for one in (await rest.page(group=group))["transactions"]:
        assert "secret" not in str(one)
        assert one["topics"] == [topic]
    for state in ("prepared", "parked"):
        assert (await rest.show(one_of_each[state]))["messages"][0]["value"] == "secret"
    committed = await rest.show(one_of_each["committed"])
    rolled_back = await rest.show(one_of_each["rolled_back"])
    for shown in (committed, rolled_back):
        assert "secret" not in str(shown)
        assert shown["cause"] == "producer"
        assert moment_ms(shown["ended_at"]) >= moment_ms(shown["prepared_at"])
    assert rolled_back["remark"] == "no stock"


async def test_a_key_finds_a_transaction_and_what_became_of_it(
    rest: Rest, group: str, topic: str, one_of_each: dict[str, str]
) -> None:
    """RocketMQ's half copy never shows that it was ended."""
    for state, transaction in one_of_each.items():
        page = await rest.page(group=group, key=state)
        assert [(one["id"], one["state"]) for one in page["transactions"]] == [(transaction, state)]
    assert ids(await rest.page(group=group, key="nobody's")) == []
    assert ids(await rest.page(group=group, key="parked", state="prepared")) == []


async def test_a_topic_finds_the_transactions_that_write_to_it(rest: Rest, cluster: Cluster, group: str) -> None:
    first, second = await cluster.make_topics("first", "second", partitions=1)
    (await rest.put_group(group, topics=[first, second], policy=QUIET)).expect(201)
    of_first = await rest.prepared(group, [message(first, key="k")])
    of_second = await rest.prepared(group, [message(second, key="k")])
    of_both = await rest.prepared(group, [message(first, key="k"), message(second, key="other")])

    assert set(ids(await rest.page(topic=first))) == {of_first, of_both}
    assert set(ids(await rest.page(topic=second))) == {of_second, of_both}
    assert ids(await rest.page(topic=second, key="k")) == [of_second], "the key of that topic's message"
    assert set(ids(await rest.page(group=group, key="k"))) == {of_first, of_second, of_both}


async def test_pages_follow_one_another_without_gap_or_repeat(rest: Rest, group: str, topic: str) -> None:
    """Also while transactions come and end: those that exist all the time are listed once."""
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    made = [await rest.prepared(group, [message(topic)]) for _ in range(25)]
    seen: list[str] = []
    cursor = None
    while True:
        page = await rest.page(group=group, state="prepared", limit=7, cursor=cursor)
        assert len(page["transactions"]) <= 7
        seen += ids(page)
        cursor = page["next"]
        if cursor is None:
            break
        await rest.prepared(group, [message(topic)])
        await rest.rollback(seen[-1])
    assert len(seen) == len(set(seen))
    assert set(made) <= set(seen)


async def test_wrong_queries_are_refused_by_name(rest: Rest) -> None:
    for query in ({"limit": 0}, {"limit": "many"}, {"limit": 10**9}, {"state": "gone"}, {"cursor": "!"}):
        answer = await rest.call("GET", "/transactions", query=query)
        assert 400 <= answer.status < 500, query
        assert next(iter(query)) in str(answer.body), query
    (await rest.call("GET", "/transactions", query={"group": "nobody"})).refused(404, "unknown_group")


async def test_groups_are_listed_changed_and_removed(
    rest: Rest, endpoint: CheckEndpoint, group: str, topic: str
) -> None:
    """201, then 200; a group with pending or parked transactions stays."""
    made = (await rest.put_group(group, topics=[topic], urls=[endpoint.url], policy={"max_checks": 3})).expect(201)
    assert made["group"] == group
    assert made["check"] == {"mode": "push", "urls": [endpoint.url]}
    assert made["topics"] == [topic]
    assert made["policy"] == {
        "first_check_after_s": 6,
        "check_interval_s": 30,
        "max_interval_s": 300,
        "max_checks": 3,
        "max_age_s": 43_200,
        "on_exhausted": "park",
    }
    changed = (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(200)
    assert changed["check"]["mode"] == "pull"
    assert changed["policy"]["max_checks"] == 15
    shown = (await rest.call("GET", f"/groups/{group}")).expect(200)
    assert shown["policy"] == changed["policy"]
    listed = (await rest.call("GET", "/groups")).expect(200)["groups"]
    assert group in [one["group"] for one in listed]

    transaction = await rest.prepared(group, [message(topic)])
    problem = (await rest.call("DELETE", f"/groups/{group}")).refused(409, "group_in_use")
    assert (problem["pending"], problem["parked"]) == (1, 0)
    await rest.rollback(transaction)
    (await rest.call("DELETE", f"/groups/{group}")).expect(204)
    (await rest.call("GET", f"/groups/{group}")).refused(404, "unknown_group")
    (await rest.call("DELETE", f"/groups/{group}")).refused(404, "unknown_group")


async def test_malformed_requests_are_the_callers_fault_and_named(rest: Rest, group: str, topic: str) -> None:
    """Never a 500: wrong JSON 400, wrong media type 415, wrong fields 422 with their names, too large 413."""
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    url = f"{rest.url}/v1/transactions"
    good = {"group": group, "messages": [message(topic)]}

    async def post(data: bytes, content_type: str = "application/json") -> tuple[int, Json]:
        async with rest.session.post(url, data=BytesIO(data), headers={"Content-Type": content_type}) as response:
            assert response.content_type == "application/problem+json", (data[:80], response.status)
            return response.status, await response.json(content_type=None)

    for data in (b"", b"{", b"nonsense", b"\xff\xfe", b"[" * 100_000, b'{"group": NaN}'):
        assert (await post(data))[0] == 400, data[:80]
    assert (await post(b"x=1", "application/x-www-form-urlencoded"))[0] == 415
    assert (await post(b" " * 30_000_000))[0] == 413

    wrong: dict[str, object] = {
        "group": {**good, "group": 7},
        "messages": {**good, "messages": []},
        "messages[0].topic": {"group": group, "messages": [{"value": "v"}]},
        "messages[0].value": {"group": group, "messages": [{"topic": topic, "value": 7}]},
        "messages[0].value.type": {"group": group, "messages": [message(topic, {"type": "XML", "data": "x"})]},
        "messages[0].value.data": {"group": group, "messages": [message(topic, {"type": "BINARY", "data": "*"})]},
        "messages[0].headers[0].name": {"group": group, "messages": [message(topic, headers=[{"value": "v"}])]},
        "messages[0].partition": {"group": group, "messages": [message(topic, partition="one")]},
        "check_after_s": {**good, "check_after_s": -1},
        "mesages": {**good, "mesages": []},
    }

    async def named(field: str, body: object) -> None:
        answer = await rest.call("POST", "/transactions", body)
        errors = answer.expect(422)["errors"]
        assert any(field in error["field"] for error in errors), (field, errors)

    await asyncio.gather(*(named(*item) for item in wrong.items()))
    assert (await rest.page(group=group))["transactions"] == []
