"""Maintenance of the barrier: it ends decided transactions that are open, and deletes old rows."""

import asyncio
from pathlib import Path

import pytest

from halfway.client import Halfway, Message, SyncHalfway, UnavailableError
from halfway.client.barrier import Barrier, BarrierMaintenance, InvalidRetentionError, sqlite_transactions
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.support.waiting import GENEROUS_S

ORDER = Message(topic="orders", key="42", value="paid")
ORDER_ID = named_id("order-42")
OPEN_ID = named_id("open")


@pytest.fixture
def barrier(tmp_path: Path) -> Barrier:
    barrier = Barrier("sqlite", sqlite_transactions(tmp_path / "shop.sqlite", busy_s=GENEROUS_S))
    barrier.create()
    return barrier


def decide_here(barrier: Barrier, *ids: str) -> None:
    with barrier._connect() as connection:
        for one in ids:
            barrier.insert(connection, one)


async def test_what_was_decided_and_never_ended_is_ended(world: RestWorld, barrier: Barrier) -> None:
    ids = [named_id(f"order-{number}") for number in range(120)]
    async with Halfway(world.url, "shop") as client:
        await asyncio.gather(*(client.prepare([ORDER], id=one) for one in [*ids, OPEN_ID]))
        decide_here(barrier, *ids)
        assert await BarrierMaintenance(client, barrier, older_than_s=1e9).reconcile() == 0  # too young
        maintenance = BarrierMaintenance(client, barrier, older_than_s=0)
        assert await maintenance.reconcile() == 120
        assert await maintenance.reconcile() == 0
        assert (await client.show(OPEN_ID))["state"] == "prepared"
    assert len(world.memory.records("orders")) == 120


async def test_a_retention_that_is_too_short_is_refused_at_the_start(world: RestWorld, barrier: Barrier) -> None:
    barrier.retention_s = 3600
    async with Halfway(world.url, "shop") as client:
        with pytest.raises(InvalidRetentionError, match="retention_s of 86400 or more"):
            await BarrierMaintenance(client, barrier).run()


async def test_it_goes_on_beside_a_client_for_threads(world: RestWorld, barrier: Barrier) -> None:
    def work() -> None:
        with SyncHalfway(world.url, "shop") as client:
            client.run_in_background(
                lambda inner: BarrierMaintenance(inner, barrier, every_s=0.01, older_than_s=0).run()
            )
            client.prepare([ORDER], id=ORDER_ID)
            decide_here(barrier, ORDER_ID)
            while client.show(ORDER_ID)["state"] != "committed":
                pass

    async with asyncio.timeout(GENEROUS_S):
        await asyncio.to_thread(work)
    assert len(world.memory.records("orders")) == 1


async def test_a_coordinator_that_is_away_is_one_line(
    world: RestWorld, barrier: Barrier, caplog: pytest.LogCaptureFixture
) -> None:
    """It passes, and the work is done again: neither an error nor a traceback."""
    async with Halfway(world.url, "shop") as client:
        maintenance = BarrierMaintenance(client, barrier)

        async def away() -> int:
            raise UnavailableError("503 shard_unavailable: moving")

        await maintenance._log_failure_of(away, "the barrier was not reconciled")
    [record] = caplog.records
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert record.message == "the barrier was not reconciled, trying again: 503 shard_unavailable: moving"
