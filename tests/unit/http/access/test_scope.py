"""What a caller can see and change in its own group, in other groups, and in batches."""

import asyncio
import shlex
from typing import Any

import pytest

from halfway.protocol.principal import PrincipalKind
from tests.support.rest.client import SHOP
from tests.support.rest.guarded import Guarded, own_id

ORDER = {"topic": "orders", "key": "k", "value": "a payload that is nobody else's"}
BY_HAND = {"Halfway-Cause": "operator"}


async def test_items_of_a_batch_are_judged_one_by_one(both: Guarded) -> None:
    """Items of other groups are refused or not found; the caller's own items in the same batch are done."""
    mine, theirs, here, there = (own_id(shard, name) for shard, name in ((0, "m"), (1, "x"), (0, "h"), (1, "t")))
    for name in (here, there):
        made = {"group": "shop", "id": name, "messages": [ORDER]}
        assert (await both.call("operator", "POST", "/v1/transactions", made)).status == 201
    batch = {
        "prepare": [
            {"group": "other", "id": mine, "messages": [ORDER]},
            {"group": "shop", "id": theirs, "messages": [ORDER]},
        ],
        "end": [{"id": here, "outcome": "commit"}, {"id": there, "outcome": "commit"}],
    }
    answer = await both.call("other", "POST", "/v1/batch", batch)
    assert [item["status"] for item in answer.body["prepare"]] == [201, 403]
    assert [item["status"] for item in answer.body["end"]] == [404, 404]
    for name in (here, there):
        assert (await both.call("shop", "GET", f"/v1/transactions/{name}")).body["state"] == "prepared"
    assert (await both.call("operator", "GET", f"/v1/transactions/{theirs}")).status == 404
    by_hand = {"prepare": [], "end": [{"id": mine, "outcome": "commit"}]}
    answer = await both.call_at(both.here, "other", "POST", "/v1/batch", by_hand, BY_HAND)
    assert answer.body["end"][0]["status"] == 403
    actions = {"check": [{"id": mine}, {"id": here}, {"id": there}], "resume": [{"id": mine}, {"id": there}]}
    answer = await both.call("other", "POST", "/v1/batch", actions)
    assert [item["status"] for item in answer.body["check"]] == [202, 404, 404]
    assert [item["status"] for item in answer.body["resume"]] == [403, 403]


@pytest.mark.parametrize("shard", [0, 1])
async def test_the_transaction_of_another_group_is_answered_as_one_that_does_not_exist(
    both: Guarded, shard: int
) -> None:
    """For every call, the whole answer is the same except for the id."""
    theirs, none = own_id(shard, "theirs"), own_id(shard, "nobody")
    made = {"group": "shop", "id": theirs, "messages": [ORDER]}
    assert (await both.call("operator", "POST", "/v1/transactions", made)).status == 201
    for method, path, body in (
        ("GET", "", None),
        ("POST", "/end", {"outcome": "rollback"}),
        ("POST", "/end", {"outcome": "unknown"}),
        ("POST", "/end", {"outcome": "commit", "check_id": f"{theirs}:1"}),
        ("POST", "/check", None),
    ):
        told = []
        for name in (theirs, none):
            answer = await both.call("other", method, f"/v1/transactions/{name}{path}", body)
            told.append((answer.status, str(answer.body | {"instance": ""}).replace(name, "ID")))
        assert told[0] == told[1]
        assert told[0][0] == 404


async def test_an_end_by_hand_takes_an_operator(both: Guarded) -> None:
    name = own_id(1, "by-hand")
    made = {"group": "shop", "id": name, "messages": [ORDER]}
    assert (await both.call("shop", "POST", "/v1/transactions", made)).status == 201
    path = f"/v1/transactions/{name}/end"
    refused = await both.call("shop", "POST", path, {"outcome": "commit"}, BY_HAND)
    assert (refused.status, refused.error_code) == (403, "forbidden")
    assert (await both.call("operator", "POST", path, {"outcome": "commit"}, BY_HAND)).status == 200


async def test_lists_show_a_group_its_own_only(both: Guarded) -> None:
    for group in ("shop", "other"):
        for shard in (0, 1):
            made = {"group": group, "id": own_id(shard, group), "messages": [ORDER]}
            assert (await both.call("operator", "POST", "/v1/transactions", made)).status == 201
    for at in (both.here, both.there):
        shown = (await both.call_at(at, "other", "GET", "/v1/transactions")).body["transactions"]
        assert {(one["group"], one["id"]) for one in shown} == {("other", own_id(shard, "other")) for shard in (0, 1)}
        groups = (await both.call_at(at, "other", "GET", "/v1/groups")).body["groups"]
        assert [one["group"] for one in groups] == ["other"]
        assert len((await both.call_at(at, "board", "GET", "/v1/transactions")).body["transactions"]) == 4


async def test_a_reader_sees_only_the_host_of_a_check_endpoint(both: Guarded) -> None:
    """The rest of a URL may contain a secret by which the endpoint recognises halfway."""
    secret = {"check": {"urls": ["http://shop:9000/check/s3cret?token=s3cret"]}, "topics": ["orders"]}
    assert (await both.call("shop", "PUT", "/v1/groups/shop", secret)).status == 200
    for caller, seen in (("operator", True), ("shop", True), ("board", False)):
        one = (await both.call(caller, "GET", "/v1/groups/shop")).body
        [listed] = [
            group for group in (await both.call(caller, "GET", "/v1/groups")).body["groups"] if group["group"] == "shop"
        ]
        for shown in (one, listed):
            assert ("s3cret" in str(shown)) is seen
            assert shown["check"]["urls"][0].startswith("http://shop:9000/")


async def test_a_group_changes_its_checks_but_adds_no_topic(both: Guarded) -> None:
    """It may also remove topics; only an operator adds topics and registers groups."""
    moved = {"check": {"urls": ["http://shop-2:9000/check"]}, "topics": ["orders"]}
    assert (await both.call("shop", "PUT", "/v1/groups/shop", moved)).status == 200
    refused = await both.call("shop", "PUT", "/v1/groups/shop", SHOP)
    assert (refused.status, refused.error_code) == (403, "forbidden")
    assert "operator" in refused.body["detail"]
    [url] = SHOP["check"]["urls"]
    assert f"halfway groups put shop --add --check-url {url} --topic coupons" in refused.body["detail"]
    old_release = {"topics": ["orders"]}
    assert (await both.call("operator", "PUT", "/v1/groups/shop", SHOP)).status == 200
    assert (await both.call("shop", "PATCH", "/v1/groups/shop", old_release)).body["topics"] == SHOP["topics"]
    refused = await both.call("shop", "PATCH", "/v1/groups/shop", {"topics": ["points"]})
    assert (refused.status, refused.error_code) == (403, "forbidden")
    assert refused.body["detail"].endswith("halfway groups put shop --add --topic points")
    both.tokens["new"] = await both.new_key(PrincipalKind.GROUP, "new")
    assert (await both.call("new", "PUT", "/v1/groups/new", SHOP)).status == 403
    assert (await both.call("operator", "PUT", "/v1/groups/new", SHOP)).status == 201
    assert (await both.call("new", "PUT", "/v1/groups/new", SHOP)).status == 200


async def test_a_groups_change_under_way_does_not_bring_back_a_topic_that_an_operator_takes(
    both: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also does not restore a group that an operator deletes, and has no effect once its key is revoked."""
    groups = both.here.memory.groups
    change = groups.change
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def delayed_change(*args: Any, **fields: Any) -> None:
        monkeypatch.setattr(groups, "change", change)
        entered.set()
        await go_on.wait()
        await change(*args, **fields)

    key = both.tokens["other"]
    assert key is not None
    for method, path, body, status in (
        ("PUT", "/v1/groups/other", {**SHOP, "topics": ["orders"]}, 403),
        ("DELETE", "/v1/groups/other", None, 403),
        ("DELETE", f"/v1/keys/{key[5:17]}", None, 401),
    ):
        assert (await both.call("operator", "PUT", "/v1/groups/other", SHOP)).status in (200, 201)
        entered.clear()
        go_on.clear()
        monkeypatch.setattr(groups, "change", delayed_change)
        own = asyncio.create_task(both.call("other", "PUT", "/v1/groups/other", SHOP))
        await entered.wait()
        assert (await both.call("operator", method, path, body)).status in (200, 204)
        go_on.set()
        assert (await own).status == status, (method, path)


async def test_a_page_of_another_site_changes_nothing_in_the_name_of_a_browsers_owner(both: Guarded) -> None:
    """A browser shows a client certificate for any page, and sends requests without a body without asking first."""
    name = own_id(0, "browser")
    made = {"group": "shop", "id": name, "messages": [ORDER]}
    assert (await both.call("operator", "POST", "/v1/transactions", made)).status == 201
    path = f"/v1/transactions/{name}"
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 202), ("none", 202)):
        headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}
        assert (await both.call("operator", "POST", f"{path}/check", None, headers)).status == status
    for origin in ("https://evil.example", "null", "http://[x", f"{both.here.url}.evil.example"):
        assert (await both.call("operator", "POST", f"{path}/check", None, {"Origin": origin})).status == 403
        assert (await both.call("operator", "GET", path, None, {"Origin": origin})).status == 403
    own = {"Origin": both.here.url}
    assert (await both.call("operator", "POST", f"{path}/check", None, own)).status == 202
    proxied = {"Origin": "https://halfway.example", "Sec-Fetch-Site": "same-origin"}
    assert (await both.call("operator", "POST", f"{path}/check", None, proxied)).status == 202
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert (await both.call("operator", "GET", path, None, link)).status == 200
    assert (await both.call("operator", "POST", f"{path}/check", None, link)).status == 403
    checks = "/v1/groups/shop/checks"  # a fetched check counts as sent, but the page answers none
    assert (await both.call("operator", "GET", checks, None, link)).status == 403
    assert (await both.call("operator", "GET", checks, None, {"Sec-Fetch-Site": "none"})).status != 403


async def test_the_command_for_the_operator_takes_nothing_away(both: Guarded) -> None:
    """It adds the new topics and what the call named, and a shell reads it as it is."""
    kept = {**SHOP, "policy": {"max_checks": 7}}
    assert (await both.call("operator", "PUT", "/v1/groups/shop", kept)).status == 200
    wanted = {"topics": ["orders", "points"], "policy": {"max_age_s": 900}}
    refused = await both.call("shop", "PATCH", "/v1/groups/shop", wanted)
    assert shlex.split(refused.body["detail"].partition("run: ")[2]) == [
        *("halfway", "groups", "put", "shop", "--add", "--topic", "points", "--policy", '{"max_age_s":900.0}')
    ]
    secret = {"topics": ["points"], "check": {"urls": ["http://shop:9000/check?token=s3cret"]}}
    refused = await both.call("shop", "PATCH", "/v1/groups/shop", secret)
    assert refused.body["detail"].endswith("run: halfway groups put shop --add --topic points")
    many = {"topics": [f"points-{number}" for number in range(30)]}
    refused = await both.call("shop", "PATCH", "/v1/groups/shop", many)
    command, _, more = refused.body["detail"].partition("run: ")[2].partition(" (")
    assert command.count("--topic") == 20
    assert "10 more topics" in more


async def test_only_an_operator_limits_a_group(both: Guarded) -> None:
    """The group sees its limits, and keeps them when it replaces itself."""
    path, service = "/v1/groups/shop", {"check": SHOP["check"], "topics": SHOP["topics"]}
    limits, own = {"pending": 50, "prepares_per_s": 2.5}, {"limits": {"pending": 9}}
    made = await both.call("operator", "PATCH", path, {"limits": limits, "reject_prepares": True})
    assert (made.status, made.body["limits"], made.body["reject_prepares"]) == (200, limits, True)
    for method, change in (("PATCH", own), ("PATCH", {"reject_prepares": False}), ("PUT", service | own)):
        refused = await both.call("shop", method, path, change)
        assert (refused.status, refused.error_code) == (403, "forbidden")
        assert "change a group's limits" in refused.body["detail"]
    assert (await both.call("shop", "PUT", path, service)).status == 200
    shown = (await both.call("shop", "GET", path)).body
    assert (shown["limits"], shown["reject_prepares"], shown["policy_overrides"]) == (limits, True, {})
    prepare = {"group": "shop", "messages": [ORDER]}
    refused = await both.call("shop", "POST", "/v1/transactions", prepare)
    assert (refused.status, refused.error_code) == (403, "prepares_rejected")
    lifted = await both.call("operator", "PATCH", path, {"limits": {}, "reject_prepares": False})
    assert (lifted.status, lifted.body["limits"]) == (200, {})
    assert (await both.call("shop", "POST", "/v1/transactions", prepare)).status == 201
    new = await both.call("operator", "PATCH", "/v1/groups/new", own)
    assert (new.status, new.body["errors"][0]["field"]) == (422, "topics")
