"""Calls that wait end when their key is revoked, however long they would wait, and wherever it is revoked."""

import asyncio

import pytest

from halfway.protocol.principal import PrincipalKind
from tests.support.rest.client import SHOP
from tests.support.rest.guarded import Guarded
from tests.support.waiting import until_true


@pytest.fixture
async def token(both: Guarded) -> str:
    """Return a key of the group `shop`, which fetches its checks."""
    fetching = {**SHOP, "check": {"mode": "pull"}}
    assert (await both.call("operator", "PUT", "/v1/groups/shop", fetching)).status == 200
    token = await both.new_key(PrincipalKind.GROUP, "shop")
    both.tokens["waits"] = token
    return token


async def revoke(both: Guarded, token: str) -> None:
    revoked = await both.call_at(both.there, "operator", "DELETE", f"/v1/keys/{token[5:17]}")
    assert revoked.status == 204


async def test_a_poll_that_waits_is_refused(both: Guarded, token: str) -> None:
    poll = asyncio.create_task(both.call("waits", "GET", "/v1/groups/shop/checks?wait_s=60"))
    await until_true(lambda: both.here.coordinator._checks.queue("shop").polls == 1)
    await revoke(both, token)
    answer = await poll
    assert (answer.status, answer.error_code) == (401, "unauthenticated")
