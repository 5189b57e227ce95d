"""A client with a barrier never contradicts the database, for every exception of its block."""

import asyncio

import pytest

from halfway.client import Halfway, Message, SyncHalfway
from halfway.client.barrier import AsyncBarrier, Barrier, InvalidRetentionError
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.support.waiting import eventually
from tests.unit.client.test_barrier import Shop, check_of
from tests.unit.client.test_client import OperationalError

ORDER = Message(topic="orders", key="42", value="paid")
ORDER_ID = named_id("order-42")


async def final_state(world: RestWorld, transaction_id: str) -> str:
    """Return the state after the end in the background is done."""
    shown = await eventually(lambda: world.show(transaction_id), lambda shown: shown.body["state"] != "prepared")
    return str(shown.body["state"])


@pytest.mark.parametrize("error", [ZeroDivisionError, OperationalError, asyncio.CancelledError])
async def test_an_exception_after_the_local_commit_does_not_roll_back(
    world: RestWorld, shop: Shop, error: type[BaseException]
) -> None:
    async with Halfway(world.url, "shop", barrier=shop.barrier) as client:
        transaction = client.transaction([ORDER])

        async def service() -> None:
            async with transaction:
                with shop.begin() as connection:
                    shop.barrier.insert(connection, transaction.id)
                raise error

        with pytest.raises(error):
            await service()
        assert await final_state(world, transaction.id) == "committed"
    assert len(world.memory.records("orders")) == 1


@pytest.mark.parametrize("error", [ZeroDivisionError, OperationalError])
async def test_an_exception_before_it_rolls_both_back_for_good(
    world: RestWorld, shop: Shop, error: type[BaseException]
) -> None:
    def service(client: SyncHalfway) -> None:
        with client.transaction([ORDER], id=ORDER_ID) as transaction, shop.begin() as connection:
            shop.barrier.insert(connection, transaction.id)
            raise error

    def work() -> None:
        with SyncHalfway(world.url, "shop", barrier=shop.barrier) as client, pytest.raises(error):
            service(client)

    await asyncio.to_thread(work)
    assert await final_state(world, ORDER_ID) == "rolled_back"
    assert shop.barrier.decide(check_of(ORDER_ID)) == "rollback"


async def test_while_the_local_transaction_is_open_it_is_left_to_check_back(world: RestWorld, shop: Shop) -> None:
    async with Halfway(world.url, "shop", barrier=shop.barrier) as client:
        transaction = client.transaction([ORDER])
        with shop.begin() as connection:

            async def service() -> None:
                async with transaction:
                    shop.barrier.insert(connection, transaction.id)
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await service()
            await client.close()  # waits for the end in the background
        assert (await world.show(transaction.id)).body["state"] == "prepared"
    assert shop.barrier.decide(check_of(transaction.id)) == "commit"


async def test_registering_refuses_a_barrier_that_forgets_too_early(world: RestWorld, shop: Shop) -> None:
    barrier = Barrier("sqlite", shop.begin, retention_s=3600)
    async with Halfway(world.url, "shop", barrier=barrier) as client:
        with pytest.raises(InvalidRetentionError, match="retention_s of"):
            await client.register(topics=["orders"])


def test_a_client_for_threads_refuses_a_barrier_that_needs_an_event_loop() -> None:
    with pytest.raises(TypeError, match="takes a Barrier"):
        SyncHalfway("http://halfway:8080", "shop", barrier=AsyncBarrier("sqlite", lambda: None))  # type: ignore[arg-type, return-value]  # never called
