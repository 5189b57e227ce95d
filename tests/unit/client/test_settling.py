"""A client with a barrier never contradicts the database, for every exception, time of a check, and second caller."""

import asyncio
from collections.abc import Callable, Iterable
from typing import ParamSpec

import pytest
from aiohttp import web

from halfway.client import Halfway, Message, Outcome, PrepareUnconfirmedError, SyncHalfway
from halfway.client.barrier import AsyncBarrier, LateTransactionError
from halfway.client.barrier.drivers import carry_out
from halfway.client.producer.transaction import Sending
from tests.support.client.serving import serving
from tests.support.client.shop import final_state
from tests.support.ids import named_id, new_id
from tests.support.loop_time import LoopTime
from tests.support.rest.client import RestWorld
from tests.unit.client.test_barrier import Shop, check_of
from tests.unit.client.test_client import OperationalError

ORDER = Message(topic="orders", key="42", value="paid")
ORDER_ID = named_id("order-42")


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


def test_a_client_for_threads_refuses_a_barrier_that_needs_an_event_loop() -> None:
    with pytest.raises(TypeError, match="takes a Barrier"):
        SyncHalfway("http://halfway:8080", "shop", barrier=AsyncBarrier("sqlite", lambda: None))  # type: ignore[arg-type, return-value]  # never called


class LostPrepares:
    """A proxy that forwards prepares and loses their answers; everything else passes."""

    def __init__(self, world: RestWorld) -> None:
        self._world = world
        self.prepares = 0

    async def answer(self, request: web.Request) -> web.Response:
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
    barrier, lost = shop.barrier if with_barrier else None, LostPrepares(world)
    async with (
        serving(lost.answer, "/v1/batch") as url,
        Halfway(world.url, "shop", barrier=barrier) as first,
        Halfway(url, "shop", barrier=barrier, prepare_timeout_s=100) as second,
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


P = ParamSpec("P")
MOMENTS = [f"{when} {step}" for step in ("insert", "prepare", "commit", "end") for when in ("before", "after")]


class Story:
    """One commit, with a check at one moment and an interrupt at another."""

    def __init__(self, shop: Shop, check_at: str | None, interrupt_at: str | None) -> None:
        self._shop = shop
        self._check_at = check_at
        self._interrupt_at = interrupt_at
        self.sending = Sending(self)
        self.sending.add(Message(topic="orders", value="v"))
        self.prepared = False
        self.verdicts: list[Outcome] = []

    def play(self) -> None:
        with self._shop.begin() as connection:
            connection.isolation_level = None
            connection.execute("BEGIN")
            connection.execute("INSERT INTO orders VALUES (1)")
            insert = self._step("insert", lambda transaction_id: self._shop.barrier.write(connection, transaction_id))
            insert(self.sending.id)
            self.sending.commit(
                self,
                insert=insert,
                still_has=lambda transaction_id: carry_out(self._shop.barrier.still_has(transaction_id), connection),
                commit=self._step("commit", connection.commit),
                rollback=connection.rollback,
                confirm=True,
            )

    def new_id(self) -> str:
        return new_id()

    def prepare(
        self,
        messages: Iterable[Message],
        *,
        id: str,  # noqa: A002 - the port's
        new_id: bool,
        keep: bool,
    ) -> None:
        self._step("prepare", lambda: setattr(self, "prepared", True))()

    def begin_end(
        self,
        id: str,  # noqa: A002 - the port's
        outcome: Outcome,
        *,
        remark: str | None = None,
    ) -> Callable[[], None]:
        self._step("end", lambda: self.verdicts.append(outcome))()
        return lambda: None

    def check(self) -> None:
        if self.prepared:
            self.verdicts.append(self._shop.barrier.decide(check_of(self.sending.id)))

    def _step(self, name: str, call: Callable[P, None]) -> Callable[P, None]:
        def step(*arguments: P.args, **named: P.kwargs) -> None:
            self._reach(f"before {name}")
            call(*arguments, **named)
            self._reach(f"after {name}")

        return step

    def _reach(self, moment: str) -> None:
        if moment == self._check_at:
            self.check()
        if moment == self._interrupt_at:
            raise KeyboardInterrupt


@pytest.fixture
def orders(shop: Shop) -> Callable[[], int]:
    def count() -> int:
        with shop.begin() as connection:
            return int(connection.execute("SELECT count(*) FROM orders").fetchone()[0])

    with shop.begin() as connection:
        connection.execute("CREATE TABLE orders (id int)")
    return count


@pytest.mark.parametrize("interrupt_at", [None, *MOMENTS])
def test_database_and_verdicts_agree(shop: Shop, orders: Callable[[], int], interrupt_at: str | None) -> None:
    committed = 0
    for check_at in (None, "before commit", "after commit", "after end"):
        story = Story(shop, check_at, interrupt_at)
        try:
            story.play()
        except KeyboardInterrupt:
            assert interrupt_at is not None
        story.check()
        certain = {verdict for verdict in story.verdicts if verdict != "unknown"}
        now = orders() - committed
        committed += now
        assert certain == ({"commit"} if now else {"rollback"} if story.prepared else set()), (check_at, story.verdicts)
        if not interrupt_at:
            assert now == 1


def test_what_a_check_has_rolled_back_is_not_prepared(shop: Shop, orders: Callable[[], int]) -> None:
    story = Story(shop, None, None)
    assert shop.barrier.decide(check_of(story.sending.id)) == "rollback"
    with pytest.raises(LateTransactionError):
        story.play()
    assert (orders(), story.prepared) == (0, False)
