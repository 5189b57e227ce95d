"""Payloads that are hidden from operators: no call shows them, at the shard's owner or through another instance."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.rest.client import SHOP, Answer
from tests.support.rest.guarded import Guarded, guarded, own_id
from tests.support.rest.parked import scan_all
from tests.support.waiting import GENEROUS_S
from tests.unit.http.stream.conftest import Opens, opened

__all__ = ["opened"]

SECRET = "p4yl0ad"
HEADER = {"name": "h", "value": f"header of {SECRET}"}
ORDER: dict[str, Any] = {"topic": "orders", "key": f"key of {SECRET}", "value": SECRET, "headers": [HEADER]}
NAMES = [own_id(0, "here"), own_id(1, "there")]
PULL = {**SHOP, "check": {"mode": "pull"}}


@pytest.fixture
async def hidden_payloads() -> AsyncIterator[Guarded]:
    """Provide two instances, and a transaction of the group `shop` in a shard of each."""
    async with guarded(hide_payloads=True) as both:
        for name in NAMES:
            made = {"group": "shop", "id": name, "messages": [ORDER]}
            assert (await both.call("shop", "POST", "/v1/transactions", made)).status == 201
        yield both


async def call_everywhere(
    hidden_payloads: Guarded, caller: str, method: str, path: str, body: dict[str, Any] | None = None
) -> list[Answer]:
    return [
        await hidden_payloads.call_at(world, caller, method, path, body)
        for world in (hidden_payloads.here, hidden_payloads.there)
    ]


@pytest.mark.parametrize("name", NAMES)
async def test_a_transaction_is_shown_without_its_messages(hidden_payloads: Guarded, name: str) -> None:
    path = f"/v1/transactions/{name}"
    for answer in await call_everywhere(hidden_payloads, "operator", "GET", path):
        assert (answer.status, answer.body["id"]) == (200, name)
        assert SECRET not in str(answer.body)
    for answer in await call_everywhere(hidden_payloads, "shop", "GET", path):
        assert answer.body["messages"][0]["value"] == SECRET


async def test_what_a_message_key_is_cannot_be_tried_out(hidden_payloads: Guarded) -> None:
    """With a list: a caller that can search can guess."""
    listing = "/v1/transactions?group=shop&key=key%20of%20" + SECRET
    for method, path, body, status in (("GET", listing, None, 200),):
        for answer in await call_everywhere(hidden_payloads, "operator", method, path, body):
            assert (answer.status, answer.error_code) == (403, "forbidden"), (path, answer)
        for answer in await call_everywhere(hidden_payloads, "shop", method, path, body):
            assert answer.status == status, (path, answer)


async def test_no_check_is_handed_out_by_a_poll_or_on_a_stream(hidden_payloads: Guarded, opened: Opens) -> None:
    """Checks contain messages. The group itself gets them, at any instance."""
    assert (await hidden_payloads.call("operator", "PUT", "/v1/groups/shop", PULL)).status == 200
    await scan_all(hidden_payloads.here, hidden_payloads.there, after_s=100)
    for answer in await call_everywhere(hidden_payloads, "operator", "GET", "/v1/groups/shop/checks?max=10"):
        assert (answer.status, answer.error_code) == (403, "forbidden")
    for world in (hidden_payloads.here, hidden_payloads.there):
        stream = await opened(world, {"Authorization": f"Bearer {hidden_payloads.tokens['operator']}"})
        refused = await stream.subscribe("shop", 10)
        assert (refused.status, refused.document["error_code"]) == (403, "forbidden")
        assert stream.checks.empty()
    stream = await opened(hidden_payloads.there, {"Authorization": f"Bearer {hidden_payloads.tokens['shop']}"})
    assert (await stream.subscribe("shop", 10)).status == 200
    async with asyncio.timeout(GENEROUS_S):
        checks = [await stream.checks.get() for _ in NAMES]
    assert {check["id"]: check["messages"][0]["value"] for check in checks} == dict.fromkeys(NAMES, SECRET)
