"""The demo's order service against what a halfway would do, and the judge of its end."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from examples.orders.judge import Evidence, judge
from examples.orders.plan import Planned
from examples.orders.service import OrderService
from tests.support.client.patience import patient
from tests.support.ids import named_id, new_id
from tests.support.waiting import until_true

__all__ = ["patient"]


O_1 = named_id("o-1")
CLIENT = TestClient[web.Request, web.Application]


class FakeHalfway:
    """Takes all prepares and ends, and records the ends."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, str]] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_patch("/v1/groups/{group}", self._group)
        app.router.add_post("/v1/batch", self._batch)
        return app

    async def ended(self) -> list[tuple[str, str]]:
        """Give what was ended and how, once it was; the service sends that beside its answer."""
        await until_true(lambda: self.ends, what="it is ended")
        return self.ends

    async def _group(self, _: web.Request) -> web.Response:
        return web.json_response({}, status=201)

    async def _batch(self, request: web.Request) -> web.Response:
        ((step, items),) = (await request.json()).items()
        if step == "end":
            self.ends += [(item["id"], item["outcome"]) for item in items]
        state = "prepared" if step == "prepare" else "committed"
        return web.json_response({step: [{"status": 200, "body": {"state": state}} for _ in items]})


@pytest.fixture
async def halfway() -> FakeHalfway:
    return FakeHalfway()


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "orders.sqlite"


@pytest.fixture
async def service(halfway: FakeHalfway, database: Path) -> AsyncIterator[CLIENT]:
    async with TestServer(halfway.app()) as fake:
        service = OrderService(database, str(fake.make_url("")).rstrip("/"), "http://orders.example/check")
        async with TestClient(TestServer(service.app)) as client:
            yield client


async def post(service: CLIENT, path: str, body: object) -> tuple[int, Any]:
    async with service.post(path, json=body) as response:
        return response.status, await response.json()


async def order(service: CLIENT, payment: str = "card") -> tuple[int, Any]:
    return await post(service, "/orders", Planned(id=O_1, customer="c", payment=payment).body)


async def check(service: CLIENT, transaction_id: str = O_1) -> Any:
    now = datetime.now(UTC).isoformat()
    question = {"type": "transaction.check", "id": transaction_id, "group": "orders", "attempt": 1, "messages": []}
    return await post(service, "/check", {**question, "prepared_at": now})


async def verdict(service: CLIENT, transaction_id: str) -> str:
    """Ask as halfway does, until the answer is known: while the order is being placed it is not."""
    while (outcome := (await check(service, transaction_id))[1]["outcome"]) == "unknown":
        pass
    return str(outcome)


def rows(database: Path, table: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(f"SELECT * FROM {table}").fetchall()  # noqa: S608 - a name from this file


@pytest.mark.parametrize(
    "payment, state, outcome",
    [("card", "paid", "commit"), ("card-declined", "failed", "rollback"), ("invoice", "awaiting", "unknown")],
)
async def test_the_end_and_a_check_tell_what_the_database_holds(
    service: CLIENT, halfway: FakeHalfway, payment: str, state: str, outcome: str
) -> None:
    """Paid is commit, failed is rollback, and a payment under way is unknown: from the end and from the check alike."""
    assert await order(service, payment) == (201, {"id": O_1, "state": state})
    assert await halfway.ended() == [(O_1, outcome)]
    assert await check(service) == (200, {"outcome": outcome})


async def test_an_absent_order_is_rolled_back_and_can_never_be_placed_afterwards(
    service: CLIENT, halfway: FakeHalfway, database: Path
) -> None:
    """The check takes the order's place: the local transaction that comes too late fails, and its end is a rollback."""
    assert await check(service) == (200, {"outcome": "rollback"})
    assert await order(service) == (201, {"id": O_1, "state": "fenced"})
    assert rows(database, "orders") == []
    assert (await halfway.ended())[0][1] in {"rollback", "unknown"}
    assert await check(service) == (200, {"outcome": "rollback"})


async def test_checks_and_orders_at_the_same_instant_agree(service: CLIENT, database: Path) -> None:
    """Whoever comes first, every check says what the database holds in the end."""
    bodies = [Planned(id=new_id(), customer="c").body for number in range(40)]
    ordered, checked = await asyncio.gather(
        asyncio.gather(*(post(service, "/orders", body) for body in bodies)),
        asyncio.gather(*(verdict(service, str(body["id"])) for body in bodies)),
    )
    placed = {row[0] for row in rows(database, "orders")}
    for (_, answer), outcome in zip(ordered, checked, strict=True):
        expected = ("paid", "commit") if answer["id"] in placed else ("fenced", "rollback")
        assert (answer["state"], outcome) == expected


@pytest.mark.parametrize("paid, outcome", [(True, "commit"), (False, "rollback")])
async def test_a_person_can_settle_what_awaits_its_payment_once(service: CLIENT, paid: bool, outcome: str) -> None:
    """What stands after that is not changed by a second, different finding."""
    await order(service, "invoice")
    assert (await post(service, f"/orders/{O_1}/settle", {"paid": paid}))[1]["outcome"] == outcome
    assert (await post(service, f"/orders/{O_1}/settle", {"paid": not paid}))[1]["outcome"] == outcome
    assert await check(service) == (200, {"outcome": outcome})


async def test_settling_an_absent_order_fences_it(service: CLIENT) -> None:
    """As with a check: it is not placed afterwards."""
    assert (await post(service, f"/orders/{O_1}/settle", {"paid": True}))[1]["outcome"] == "rollback"
    assert (await order(service))[1]["state"] == "fenced"


AGREED = Evidence(
    sent={"a", "b", "c", "d", "e", "f"},
    orders={"a": "paid", "b": "paid", "c": "failed", "d": "awaiting"},
    fenced={"e"},
    seen={"coupon": ["a", "b"], "cart": ["b", "a"]},
    effects={"coupon": ["a"], "cart": ["a", "b"]},
    dead={"coupon": ["b"], "cart": []},
    # c is flawed too, but was never paid: its message was not sent.
    flawed={"coupon": {"b", "c"}, "cart": set()},
    transactions=[
        {"id": "a", "state": "committed", "cause": "producer"},
        {"id": "b", "state": "committed", "cause": "check"},
        {"id": "c", "state": "rolled_back", "cause": "operator"},
        {"id": "d", "state": "rolled_back", "cause": "policy"},
        {"id": "e", "state": "rolled_back", "cause": "check"},
    ],
)


def found(evidence: Evidence) -> set[tuple[str, str, tuple[str, ...]]]:
    return {(problem.where, problem.what, problem.orders) for problem in judge(evidence)}


def test_a_story_without_contradiction_has_no_problem() -> None:
    """Paid orders stand once in each topic, whatever the order of reading; the others in none."""
    assert judge(AGREED) == []


def test_a_doubled_message_is_found_though_the_count_may_fit() -> None:
    """Two messages for two paid orders, but twice the same one."""
    assert found(replace(AGREED, seen={"coupon": ["a", "b"], "cart": ["a", "a"]})) == {
        ("cart", "missing", ("b",)),
        ("cart", "doubled", ("a",)),
    }


@pytest.mark.parametrize("order", ["c", "d", "e", "f", "z"])
def test_an_invented_message_is_found(order: str) -> None:
    """A message of an order that failed, awaits payment, was fenced off, was never taken or never heard of."""
    assert found(replace(AGREED, seen={"coupon": ["a", "b"], "cart": ["a", "b", order]})) == {
        ("cart", "invented", (order,))
    }


def test_dead_letters_are_exactly_the_flawed_orders_that_were_sent() -> None:
    """A missing, an invented, a doubled dead letter and one of no known topic."""
    dead = {"coupon": [], "cart": ["a", "a"], "points": ["b"]}
    assert found(replace(AGREED, dead=dead)) == {
        ("dead letters of coupon", "missing", ("b",)),
        ("dead letters of cart", "invented", ("a",)),
        ("dead letters of cart", "doubled", ("a",)),
        ("dead letters", "of no known topic", ("b",)),
    }


@pytest.mark.parametrize("state", ["prepared", "parked"])
def test_a_transaction_without_an_outcome_is_found(state: str) -> None:
    """When everything has come to rest nothing may be pending."""
    transactions = [*AGREED.transactions[:4], {"id": "e", "state": state}]
    assert found(replace(AGREED, transactions=transactions)) == {("halfway", "still without an outcome", ("e",))}


def test_an_effect_that_is_missing_doubled_or_invented_is_found() -> None:
    """A message that its consumer cannot digest has none."""
    assert found(replace(AGREED, effects={"coupon": ["a", "b"], "cart": ["a", "a"]})) == {
        ("effects of coupon", "invented", ("b",)),
        ("effects of cart", "missing", ("b",)),
        ("effects of cart", "doubled", ("a",)),
    }
