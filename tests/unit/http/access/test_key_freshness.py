"""An instance that cannot read the keys' topic does not learn of revocations."""

import asyncio

import pytest

from halfway.coordinator.access import KeyedAccess, KeyFreshness
from halfway.protocol.errors import KafkaUnavailableError
from halfway.protocol.principal import Permission
from tests.support.elapsed_time import WallClock
from tests.support.rest.guarded import FIRST, SECRET, Guarded
from tests.support.waiting import until_true


async def test_an_instance_that_cannot_read_the_keys_takes_none_until_it_can(
    both: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except the first operator's, which is a setting; keys that were accepted before are refused too.

    Time passes on the wall clock only, as it does for a machine that was suspended.
    """
    memory = both.here.memory
    current = KeyFreshness(memory.keys, not_ready_s=100, refused_s=1000, every_s=0.01)
    time = WallClock(monkeypatch)
    authority = KeyedAccess(
        memory.keys.table, [SECRET], memory.clock, first_operator=FIRST, require_fresh_keys=current.require_fresh
    )
    key = both.tokens["shop"]
    watching = asyncio.create_task(current.watch())
    try:
        shop = authority.authenticate(key)
        memory.faults.unavailable = True
        time.advance(200)
        await until_true(lambda: current.is_late)
        assert authority.authenticate(key) == shop
        time.advance(1000)
        await until_true(lambda: refuses(authority, key))
        with pytest.raises(KafkaUnavailableError):
            authority.require(shop, Permission.PREPARE, "shop")
        operator = authority.authenticate(FIRST)
        authority.require(operator, Permission.PREPARE, "shop")
        memory.faults.unavailable = False
        await until_true(lambda: not current.is_late)
        assert authority.authenticate(key) == shop
        authority.require(shop, Permission.PREPARE, "shop")
    finally:
        watching.cancel()


def refuses(authority: KeyedAccess, key: str | None) -> bool:
    try:
        authority.authenticate(key)
    except KafkaUnavailableError as error:
        return "revoked" in error.detail
    return False
