"""Transactions that are parked because their group's endpoint fails, on one instance or on two over one log."""

import asyncio
from typing import Any

from halfway.client import transaction_id
from tests.support.rest.client import RestWorld
from tests.support.surroundings import no_verdict
from tests.support.waiting import GENEROUS_S

HOSTILE = "<img src=x onerror=alert(1)> \u202e\x1b[31m"
SOON: dict[str, Any] = {
    "check": {"urls": ["http://shop:9000/check"]},
    "topics": ["orders", "coupons"],
    "policy": {"first_check_after_s": 1, "check_interval_s": 1, "max_interval_s": 1, "max_checks": 1},
}


async def scan_all(*worlds: RestWorld, after_s: float = 2) -> None:
    worlds[0].memory.clock.advance(after_s)
    for world in worlds:
        for shard in world.coordinator.shards.served:
            await world.coordinator.scan(shard, world.memory.clock.now_ms())
    for _ in range(100):
        await asyncio.sleep(0)


async def ids_in_state(world: RestWorld, state: str) -> list[str]:
    answer = await world.call("GET", f"/v1/transactions?state={state}&limit=1000")
    return [one["id"] for one in answer.body["transactions"]]


async def park(count: int, *worlds: RestWorld) -> list[str]:
    """Park transactions by means of a failing endpoint."""
    world = worlds[0]
    assert (await world.call("PUT", "/v1/groups/shop", SOON)).status in {200, 201}
    for one in worlds:
        one.memory.caller.always(no_verdict("status 502, not 200"))
    now = world.memory.clock.now_ms()
    ids = [await world.prepared(id=transaction_id(f"t{number}", now + number)) for number in range(count)]
    async with asyncio.timeout(GENEROUS_S):
        while len(await ids_in_state(world, "parked")) < count:
            await scan_all(*worlds)
    return ids
