"""Answers of a proxy, or of another server at a wrong URL, are skipped, retried, or named in the error."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import pytest
from aiohttp import web

from halfway.client import (
    EndUnconfirmedError,
    ForbiddenError,
    Halfway,
    Message,
    NotHalfwayError,
    PrepareUnconfirmedError,
    UnavailableError,
)
from tests.support.client.serving import serving
from tests.support.ids import named_id
from tests.support.loop_time import LoopTime
from tests.support.rest.client import RestWorld
from tests.support.waiting import GENEROUS_S

ORDER = Message(topic="orders", key="42", value="paid")
ORDER_ID = named_id("order-42")
REMEDY = r"not by halfway; give the coordinator's URL, such as http://halfway:8080"


class Stranger:
    """A server that answers every request with the same status and page, and counts them."""

    def __init__(self) -> None:
        self.status, self.text, self.request_count = 502, "<html>Bad Gateway</html>", 0
        self.url = ""

    async def answer(self, _: web.Request) -> web.Response:
        self.request_count += 1
        return web.Response(status=self.status, text=self.text, content_type="text/html")

    def next_answer_seen(self) -> Callable[[], bool]:
        """Return a function that returns whether the server has been asked again after an answer since then."""
        before = self.request_count
        return lambda: self.request_count >= before + 2


@pytest.fixture
async def stranger() -> AsyncIterator[Stranger]:
    stranger = Stranger()
    async with serving(stranger.answer) as stranger.url:
        yield stranger


@pytest.mark.parametrize("status", [502, 503, 504, 404, 307, 200])
async def test_the_next_url_is_asked_at_once(
    world: RestWorld, stranger: Stranger, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """A proxy without its coordinator does not delay clients that have another URL, and is avoided for a while."""
    monkeypatch.setattr("halfway.client.calls.transport.AVOID_S", GENEROUS_S)
    stranger.status = status
    async with Halfway([stranger.url, world.url], "shop", prepare_timeout_s=60, end_timeout_s=60) as client:
        for _ in range(3):
            async with client.transaction([ORDER]):
                pass
        assert (await client.show_group())["group"] == "shop"
    assert len(world.memory.records("orders")) == 3
    assert stranger.request_count <= 2  # for prepares and for ends


@pytest.mark.parametrize("status", [404, 405, 301])
async def test_a_wrong_url_is_named_at_once(stranger: Stranger, status: int) -> None:
    stranger.status = status
    async with Halfway(stranger.url, "shop", prepare_timeout_s=60) as client:
        with pytest.raises(
            NotHalfwayError, match=f"/v1/batch at {stranger.url} was answered {status} .text/html., {REMEDY}"
        ):
            await client.prepare([ORDER], id=ORDER_ID)
        with pytest.raises(NotHalfwayError, match=f"PATCH /v1/groups/shop at {stranger.url}"):
            await client.register(topics=["orders"])
    assert stranger.request_count == 2


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_proxy_without_a_ready_coordinator_is_asked_again(stranger: Stranger, status: int) -> None:
    """HAProxy and Envoy answer so during a restart: the URL and the proxy are right."""
    stranger.status = status
    async with Halfway(stranger.url, "shop", prepare_timeout_s=100) as client:
        preparing = client.prepare([ORDER], id=ORDER_ID)
        with pytest.raises(PrepareUnconfirmedError, match=f"{status} .*; no ready coordinator answered"):
            await LoopTime().out(preparing, 102, once=stranger.next_answer_seen(), what="it asks again")


async def test_a_page_in_place_of_an_answer_is_named(stranger: Stranger, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a web application that answers every path with 200 and HTML."""
    stranger.status = 200
    time = LoopTime()
    async with Halfway(stranger.url, "shop", prepare_timeout_s=100) as client:
        with pytest.raises(PrepareUnconfirmedError, match=REMEDY):
            await time.out(
                client.prepare([ORDER], id=ORDER_ID), 102, once=stranger.next_answer_seen(), what="it asks again"
            )
    pausing = asyncio.Event()

    def long_pause(*_: object) -> float:
        pausing.set()
        return 50.0

    monkeypatch.setattr("halfway.client.calls.group.random", SimpleNamespace(uniform=long_pause))
    async with Halfway(stranger.url, "shop") as client:
        registering = client.register(topics=["orders"], timeout_s=100)
        with pytest.raises(UnavailableError, match=REMEDY):
            await time.out(registering, 102, once=pausing.is_set, what="it has an answer, and waits")


async def test_halfways_other_port_is_named(world: RestWorld) -> None:
    async with Halfway(world.url, "shop") as client:
        with pytest.raises(NotHalfwayError, match=f"unknown_path: .*{world.url}"):
            await client._call("GET", "/v2", None, timeout_s=60)


async def test_an_end_goes_on_through_pages_of_a_proxy(world: RestWorld, stranger: Stranger) -> None:
    """While its routes change, a proxy may answer 404: that is not an answer to an end."""
    stranger.status = 404
    async with Halfway(stranger.url, "shop", end_timeout_s=100) as client:
        ending = client.end(ORDER_ID, "commit")
        with pytest.raises(EndUnconfirmedError, match=REMEDY):
            await LoopTime().out(ending, 102, once=stranger.next_answer_seen(), what="it asks again")
    assert stranger.request_count > 1


async def test_a_prepare_that_is_refused_after_a_lost_answer_is_not_left_behind(world: RestWorld) -> None:
    """It was stored, its answer was lost, and a proxy refused the next attempt."""
    lost = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal lost
        body = await request.json()
        if "prepare" in body and lost == 0:
            lost += 1
            await world.call("POST", "/v1/batch", body)
            return web.Response(status=504)
        if "prepare" in body:
            return web.Response(status=403, text="<html>no</html>", content_type="text/html")
        passed = await world.call("POST", "/v1/batch", body)
        return web.json_response(passed.body, status=passed.status)

    async with serving(answer, "/v1/batch") as url:
        async with Halfway(url, "shop", prepare_timeout_s=60) as client:
            with pytest.raises(ForbiddenError, match="403"):
                await client.prepare([ORDER], id=ORDER_ID, new_id=True)
        assert (await world.show(ORDER_ID)).body["state"] == "rolled_back"


async def test_a_commit_that_is_cancelled_goes_on_in_the_background(world: RestWorld) -> None:
    """Otherwise only a check would resolve it, seconds later."""
    async with Halfway(world.url, "shop") as client:
        transaction = client.transaction([ORDER])
        entered = asyncio.Event()

        async def service() -> None:
            async with transaction:
                entered.set()

        task = asyncio.create_task(service())
        await entered.wait()
        task.cancel()  # it waits for the answer to its end
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await world.show(transaction.id)).body["state"] == "committed"
