"""Small pages of lists, names that are not legal in a path, and the answers to a group at its limit."""

from functools import partial
from typing import Any

import pytest

from halfway.coordinator.cluster import forward as fan_out
from halfway.coordinator.requests import ServiceLimits
from halfway.coordinator.shards import groups
from halfway.http.requests.admission import ApiLimits
from halfway.protocol.records import LimitOverrides
from tests.support.ids import named_id
from tests.support.rest.client import SHOP, RestWorld
from tests.unit.http.conftest import NewWorld


async def pages(world: RestWorld, path: str, name: str, limit: int) -> list[list[dict[str, Any]]]:
    """Yield every page of a list."""
    found = []
    cursor = ""
    while True:
        answer = await world.call("GET", f"{path}?limit={limit}{cursor}")
        assert answer.status == 200, answer
        found.append(answer.body[name])
        if answer.body["next"] is None:
            return found
        cursor = f"&cursor={answer.body['next']}"


async def test_groups_are_listed_page_by_page(world: RestWorld) -> None:
    """By name; without a limit, a page has as many groups as may be registered by default."""
    names = sorted([f"group-{number}" for number in range(7)] + ["shop"])
    for name in names[:-1]:
        assert (await world.call("PUT", f"/v1/groups/{name}", SHOP)).status == 201
    found = await pages(world, "/v1/groups", "groups", 3)
    assert [len(page) for page in found] == [3, 3, 2]
    assert [one["group"] for page in found for one in page] == names
    whole = await world.call("GET", "/v1/groups")
    assert [one["group"] for one in whole.body["groups"]] == names
    assert whole.body["next"] is None
    for query in ("limit=0", "limit=1001", "cursor=a%2Fb", "offset=1"):
        assert (await world.call("GET", f"/v1/groups?{query}")).status == 422


async def test_pages_of_large_groups_and_transactions_end_earlier(
    world: RestWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_PAGE_CHARACTERS", 30)
    monkeypatch.setattr(fan_out, "_PAGE_TOPICS", 5)
    for name in ("a", "b"):
        await world.call("PUT", f"/v1/groups/{name}", SHOP)
    assert [len(page) for page in await pages(world, "/v1/groups", "groups", 100)] == [1, 1, 1]
    made = [await world.prepared(*[{"topic": "orders", "value": "v"}] * 3) for _ in range(5)]
    found = await pages(world, "/v1/transactions", "transactions", 100)
    assert [len(page) for page in found] == [2, 2, 1]
    assert sorted(one["id"] for page in found for one in page) == sorted(made)


async def test_groups_are_bounded(world: RestWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Existing groups can be changed; after one is deleted, another can be registered."""
    limits = ServiceLimits(shards=2, max_groups=2)
    monkeypatch.setattr(world.coordinator._groups, "_limits", limits)
    assert (await world.call("PUT", "/v1/groups/second", SHOP)).status == 201
    refused = await world.call("PUT", "/v1/groups/third", SHOP)
    assert (refused.status, refused.error_code) == (429, "overloaded")
    assert "delete some" in refused.body["detail"]
    assert (await world.call("PUT", "/v1/groups/second", SHOP)).status == 200
    assert (await world.call("DELETE", "/v1/groups/second")).status == 204
    assert (await world.call("PUT", "/v1/groups/third", SHOP)).status == 201


@pytest.mark.parametrize("name", [".", ".."])
async def test_names_that_clients_take_out_of_a_path_are_not_made(world: RestWorld, name: str) -> None:
    refused = await world.prepare(id=name)
    assert (refused.status, set(refused.fields)) == (422, {"id"})
    put = b"PUT /v1/groups/%s HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Type: application/json\r\n"
    body = b'{"check":{"mode":"pull"},"topics":["orders"]}'
    answer = await world.send(put % name.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert answer.startswith(b"HTTP/1.1 422 "), answer
    assert (await world.prepare(id=named_id(f"{name}a"))).status == 201
    assert (await world.prepare(id=named_id(f"...{name}"))).status == 201


@pytest.mark.parametrize("name", [b".", b".."])
async def test_such_a_name_of_an_earlier_release_is_still_reached(world: RestWorld, name: bytes) -> None:
    ask = b"GET /v1/transactions/%s HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
    assert (await world.send(ask % name)).startswith(b"HTTP/1.1 404 ")


ORDER = {"group": "shop", "messages": [{"topic": "orders", "value": "v" * 600}]}
LIMITS = {"pending": LimitOverrides(pending=1), "prepares_per_s": LimitOverrides(prepares_per_s=0.01)}


@pytest.mark.parametrize("limit", LIMITS)
async def test_a_refusal_names_the_limit_and_when_to_come_back(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """In the header of a single call, and in the problem of a batch item."""
    monkeypatch.setattr("tests.support.rest.client.ServiceLimits", partial(ServiceLimits, default_limits=LIMITS[limit]))
    world = await new_world(ApiLimits(prepare_wait_s=0.01))
    await world.put_shop()
    assert (await world.call("POST", "/v1/transactions", ORDER)).status == 201
    alone = await world.call("POST", "/v1/transactions", ORDER)
    assert (alone.status, alone.error_code, alone.body["limit"]) == (429, "group_limited", limit)
    assert int(alone.headers["Retry-After"]) >= 1
    batch = await world.call("POST", "/v1/batch", {"prepare": [ORDER]})
    assert batch.status == 200
    problem = batch.body["prepare"][0]["problem"]
    assert (problem["status"], problem["error_code"], problem["limit"]) == (429, "group_limited", limit)
    assert problem["retry_after_s"] >= 1
