"""The network of the demo loses what the plan says, and only that."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from examples.orders.network import LossyNetwork
from examples.orders.plan import Fault

Call = Callable[[str, str], Awaitable[int | None]]


class Fixture:
    def __init__(self) -> None:
        self.arrived: list[tuple[str, str]] = []
        self.killed: list[str] = []
        self.happened: Counter[Fault] = Counter()

    async def prepare(self, order: str) -> int | None:
        return await self._call("transactions", {"id": order})

    async def end(self, order: str) -> int | None:
        return await self._call(f"transactions/{order}/end", {"outcome": "commit"})

    async def _call(self, path: str, body: object) -> int | None:
        try:
            async with self.session.post(f"{self.url}/v1/{path}?a=b%20c", json=body) as response:
                assert await response.json() == {"path": f"/v1/{path}", "query": {"a": "b c"}, "body": body}
                return response.status
        except aiohttp.ClientError:
            return None

    session: aiohttp.ClientSession
    url: str


@pytest.fixture
async def lossy() -> AsyncIterator[Fixture]:
    """Give a network with one order for each fault, named after it."""
    fixture = Fixture()

    async def halfway(request: web.Request) -> web.Response:
        body = await request.json()
        step = "end" if request.path.endswith("/end") else "prepare"
        fixture.arrived.append((step, body.get("id") or request.path.split("/")[-2]))
        return web.json_response({"path": request.path, "query": dict(request.query), "body": body}, status=409)

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


async def test_what_is_not_lost_comes_through_as_it_is(lossy: Fixture) -> None:
    """Status, body and query are those of both ends."""
    assert (await lossy.prepare("NONE"), await lossy.end("NONE"), await lossy.end("other")) == (409, 409, 409)
    assert not lossy.happened


@pytest.mark.parametrize(
    "fault, answers, arrived",
    [
        (Fault.PREPARE_ANSWERS_LOST, (None, None, 409, 409), ("prepare", "prepare", "end", "end")),
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


async def test_the_service_is_killed_before_its_end_arrives(lossy: Fixture) -> None:
    """The end that it was sending gets lost with it; one sent later, by whoever, arrives."""
    assert await lossy.end("KILLED") is None
    assert (lossy.killed, lossy.arrived) == (["KILLED"], [])
    assert await lossy.end("KILLED") == 409
    assert lossy.killed == ["KILLED"]
