"""The network of the demo loses what the plan says, and only that."""

from collections import Counter
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from examples.orders.network import LossyNetwork
from examples.orders.plan import Fault


class Fixture:
    def __init__(self) -> None:
        self.arrived: list[tuple[str, str]] = []
        self.killed: list[str] = []
        self.happened: Counter[Fault] = Counter()

    async def prepare(self, order: str) -> int | None:
        return (await self.call("prepare", order))[0]

    async def end(self, order: str) -> int | None:
        return (await self.call("end", order))[0]

    async def call(self, step: str, *orders: str) -> list[int | None]:
        """Send items as the client does, together; return the status of each, None for no answer."""
        items = [{"id": order, "outcome": "commit"} for order in orders]
        try:
            async with self.session.post(f"{self.url}/v1/batch", json={step: items}) as response:
                answers = (await response.json())[step]
        except aiohttp.ClientError:
            return [None] * len(orders)
        assert [answer["body"] for answer in answers] == items
        return [answer["status"] for answer in answers]

    session: aiohttp.ClientSession
    url: str


@pytest.fixture
async def lossy() -> AsyncIterator[Fixture]:
    """Give a network with one order for each fault, named after it."""
    fixture = Fixture()

    async def halfway(request: web.Request) -> web.Response:
        body = await request.json()
        if request.path != "/v1/batch":
            return web.json_response({"path": request.path, "query": dict(request.query), "body": body}, status=201)
        for step, items in body.items():
            fixture.arrived += [(step, item["id"]) for item in items]
        return web.json_response(
            {step: [{"status": 409, "body": item} for item in items] for step, items in body.items()}
        )

    async def kill(order: str) -> None:
        fixture.killed.append(order)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", halfway)
    faults = {fault.name: fault for fault in Fault}
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        async with LossyNetwork(url, faults, kill) as network, aiohttp.ClientSession() as session:
            fixture.url, fixture.session, fixture.happened = network.url, session, network.happened
            yield fixture


@pytest.mark.parametrize(
    "fault, answers, arrived",
    [
        (Fault.PREPARE_ANSWERS_LOST, (None, None, None, None), ("prepare", "prepare")),
        (Fault.PREPARE_ANSWER_LOST_ONCE, (None, 409, 409, 409), ("prepare", "prepare", "end", "end")),
        (Fault.END_LOST, (409, 409, None, None), ("prepare", "prepare")),
        (Fault.END_ANSWER_LOST, (409, 409, None, None), ("prepare", "prepare", "end", "end")),
    ],
)
async def test_a_fault_loses_just_what_it_says(
    lossy: Fixture, fault: Fault, answers: tuple[int | None, ...], arrived: tuple[str, ...]
) -> None:
    """Two prepares and two ends: what the service learns, and what halfway gets."""
    name = fault.name
    got = (await lossy.prepare(name), await lossy.prepare(name), await lossy.end(name), await lossy.end(name))
    assert got == answers
    assert lossy.arrived == [(step, name) for step in arrived]
    assert lossy.happened == {fault: 1}
