"""Two callers with one id, such as a customer's request that is repeated at another instance, never undo each other."""

from typing import Self

import pytest
from aiohttp import web

from halfway.client import Halfway, Message, PrepareUnconfirmedError
from halfway.client.barrier import LateTransactionError
from tests.support.ids import named_id
from tests.support.loop_time import LoopTime
from tests.support.rest.client import RestWorld
from tests.unit.client.test_barrier import Shop, check_of
from tests.unit.client.test_settling import final_state

ORDER = Message(topic="orders", key="42", value="paid")
ORDER_ID = named_id("order-42")


class LostPrepares:
    """A proxy that forwards prepares and loses their answers; everything else passes."""

    def __init__(self, world: RestWorld) -> None:
        self._world = world
        self.url = ""
        self.prepares = 0

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/v1/batch", self._forward)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _forward(self, request: web.Request) -> web.Response:
        body = await request.json()
        answer = await self._world.call("POST", "/v1/batch", body)
        if "prepare" in body:
            self.prepares += 1
            return web.Response(status=502, text="<html>Bad Gateway</html>", content_type="text/html")
        return web.json_response(answer.body, status=answer.status)


@pytest.mark.parametrize("with_barrier", [True, False])
async def test_an_unconfirmed_prepare_does_not_roll_back_what_another_caller_commits(
    world: RestWorld, shop: Shop, with_barrier: bool
) -> None:
    barrier = shop.barrier if with_barrier else None
    async with (
        LostPrepares(world) as lost,
        Halfway(world.url, "shop", barrier=barrier) as first,
        Halfway(lost.url, "shop", barrier=barrier, prepare_timeout_s=100) as second,
        first.transaction([ORDER], id=ORDER_ID) as transaction,
    ):
        with shop.begin() as connection:
            shop.barrier.insert(connection, transaction.id)
        repeated = second.prepare([ORDER], id=ORDER_ID)
        with pytest.raises(PrepareUnconfirmedError, match="502"):
            await LoopTime().out(repeated, 102, once=lambda: lost.prepares > 1, what="it is sent again")
        await second.close()  # its ends in the background have been sent
    assert (await world.show(ORDER_ID)).body["state"] == "committed"
    assert shop.barrier.decide(check_of(ORDER_ID)) == "commit"


async def test_one_that_comes_second_and_fails_does_not_roll_back_the_first(world: RestWorld) -> None:
    """There is no barrier: only a check or the first caller knows the outcome of the local transaction."""
    async with (
        Halfway(world.url, "shop") as first,
        Halfway(world.url, "shop") as second,
        first.transaction([ORDER], id=ORDER_ID),
    ):
        twin = second.transaction([ORDER], id=ORDER_ID)
        with pytest.raises(KeyError, match="taken"):
            async with twin:
                raise KeyError("taken")  # the first caller's row
        await second.close()
    assert (await world.show(ORDER_ID)).body["state"] == "committed"


async def test_with_the_barrier_the_second_one_is_told_and_the_first_stands(world: RestWorld, shop: Shop) -> None:
    async with Halfway(world.url, "shop", barrier=shop.barrier) as client:
        await client.prepare([ORDER], id=ORDER_ID)
        with shop.begin() as connection:
            shop.barrier.insert(connection, ORDER_ID)  # the service crashes, and its customer orders again

        async def again() -> None:
            async with client.transaction([ORDER], id=ORDER_ID) as transaction:
                with shop.begin() as connection:
                    shop.barrier.insert(connection, transaction.id)

        with pytest.raises(LateTransactionError):
            await again()
        assert await final_state(world, ORDER_ID) == "committed"
