"""Revocations of keys: calls that wait end, wherever it was; who cannot read the keys' topic learns of none."""

import asyncio

import pytest

from halfway.coordinator.access import REFUSED_S, KeyedAccess
from halfway.protocol.errors import KafkaUnavailableError
from halfway.protocol.principal import Permission, PrincipalKind
from tests.support.elapsed_time import WallClock
from tests.support.rest.client import SHOP
from tests.support.rest.guarded import FIRST, SECRET, Guarded
from tests.support.waiting import until_true


async def test_an_instance_that_cannot_read_the_keys_takes_none_until_it_can(both: Guarded) -> None:
    """Except the first operator's, which is a setting; keys that were accepted before are refused too.

    Time passes on the wall clock only, as it does for a machine that was suspended.
    """
    memory = both.here.memory
    with WallClock() as clock:
        keys = memory.keys
        authority = KeyedAccess(keys.table, [SECRET], memory.clock, first_operator=FIRST, keys_age_s=lambda: keys.age_s)
        key = both.tokens["shop"]
        shop = authority.authenticate(key)
        memory.faults.unavailable = True
        clock.advance(REFUSED_S + 1)
        await until_true(lambda: refuses(authority, key))
        with pytest.raises(KafkaUnavailableError):
            authority.require(shop, Permission.PREPARE, "shop")
        operator = authority.authenticate(FIRST)
        authority.require(operator, Permission.PREPARE, "shop")
        memory.faults.unavailable = False
        await until_true(lambda: not refuses(authority, key))
        assert authority.authenticate(key) == shop
        authority.require(shop, Permission.PREPARE, "shop")


def refuses(authority: KeyedAccess, key: str | None) -> bool:
    try:
        authority.authenticate(key)
    except KafkaUnavailableError as error:
        return "revoked" in error.detail
    return False


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
