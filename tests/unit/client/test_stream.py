"""All calls on one stream: what is in flight when it is cut is repeated, and nothing is doubled or misreported."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock

import pytest
from aiohttp import web

from halfway.client import Halfway, Message, PrepareUnconfirmedError, QueueFullError, UnauthenticatedError
from halfway.client.calls import shared
from halfway.client.calls.stream import RefusedStreamError, Stream
from halfway.http.requests.admission import ApiLimits
from tests.support.client.serving import serving
from tests.support.client.silent import Firewall, firewall_before
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.support.waiting import GENEROUS_S, eventually, until_true

ORDER = Message(topic="orders", key="42", value="paid")
CALLERS = 64


@pytest.fixture
async def firewall(world: RestWorld) -> AsyncIterator[Firewall]:
    async with firewall_before(world.url) as firewall:
        yield firewall


def patient(url: Any, **named: Any) -> Halfway:
    return Halfway(url, "shop", prepare_timeout_s=GENEROUS_S, end_timeout_s=GENEROUS_S, **{"stream": True} | named)


def keys(world: RestWorld) -> list[bytes]:
    return sorted(record.key or b"" for record in world.memory.records("orders"))


async def place(client: Halfway, key: str) -> None:
    async with client.transaction([Message(topic="orders", key=key, value="paid")]):
        pass


async def test_a_stream_that_is_cut_anywhere_loses_and_doubles_nothing(world: RestWorld, firewall: Firewall) -> None:
    """Also within a frame."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201 - to repeat it
    chance = random.Random(seed)
    firewall.bytes_of_next = lambda: chance.randrange(300, 20_000)
    ordered = [f"{number:03}" for number in range(300)]
    left = iter(ordered)

    async def caller(client: Halfway) -> None:
        for key in left:
            await place(client, key)

    async with patient(firewall.url) as client:
        await asyncio.gather(*(caller(client) for _ in range(CALLERS)))
    assert keys(world) == [key.encode() for key in ordered]
    assert firewall.accepted > 3
    listed = (await world.call("GET", "/v1/transactions?group=shop&state=prepared")).body
    assert listed["transactions"] == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("new_id, state", [(True, "rolled_back"), (False, "prepared")])
async def test_a_prepare_whose_answer_is_held_back_is_ended_when_its_caller_gives_up(
    world: RestWorld, firewall: Firewall, new_id: bool, state: str, stream: bool
) -> None:
    """A transaction whose id another caller may also use is left to check-back."""
    async with patient(firewall.url, stream=stream) as client:
        await place(client, "first")
        firewall.lets_answers_pass.clear()
        name = named_id("held")
        prepare = asyncio.create_task(client.prepare([ORDER], id=name, new_id=new_id))
        await eventually(lambda: world.show(name), lambda shown: shown.status == 200)
        prepare.cancel()
        await asyncio.gather(prepare, return_exceptions=True)
        firewall.lets_answers_pass.set()
        await asyncio.gather(*client._background)
    assert (await world.show(name)).body["state"] == state


async def test_an_end_that_may_overtake_its_prepare_waits_for_it(world: RestWorld, firewall: Firewall) -> None:
    """The prepare is on a connection that has become silent, and the rollback on the next one."""
    async with patient(firewall.url) as client:
        await place(client, "first")
        name = named_id("lost")
        stream = client._shared._stream
        assert stream is not None
        firewall.forget()
        prepare = asyncio.create_task(client.prepare([ORDER], id=name, new_id=True))
        await until_true(lambda: stream.sent, what="the prepare is sent")
        client._shared.leave(stream)
        prepare.cancel()
        await asyncio.gather(prepare, return_exceptions=True)
        (rollback,) = client._background
        await eventually(lambda: asyncio.sleep(0, world.requests.counts["end", 404]), lambda refused: refused == 1)
        current = client._shared._stream
        assert current is not None
        await until_true(lambda: current.answered_at, what="the refusal has come")
        assert not rollback.done()
        firewall.cut()
        await rollback
        assert world.requests.counts["end", 404] >= 2  # it was never prepared


async def test_a_coordinator_that_stops_disturbs_no_caller(world: RestWorld) -> None:
    """Its answers still come, and everything else goes to another stream."""
    async with patient(world.url) as client:
        for key in ("a", "b"):
            await place(client, key)
        first = client._shared._stream
        world.api.streams.stop()
        await asyncio.gather(*(place(client, f"c{number}") for number in range(CALLERS)))
        assert client._shared._stream is not first
    assert len(keys(world)) == 2 + CALLERS


async def test_calls_on_a_stopping_stream_are_sent_again_on_the_next_one(
    world: RestWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that crosses the announcement is refused with `shutting_down`; its caller does not notice."""
    async with patient(world.url) as client:
        await place(client, "a")
        first = client._shared._stream
        (stream,) = world.api.streams
        monkeypatch.setattr(stream, "_say", lambda _: None)  # the announcement is late
        stream.stop()
        await place(client, "b")
        assert client._shared._stream is not first
    assert keys(world) == [b"a", b"b"]
    assert world.requests.counts["batch", 200] == 0


class Proxy:
    """Passes requests on, and upgrades none."""

    def __init__(self, world: RestWorld, status: int) -> None:
        self._world = world
        self._status = status
        self.refused = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/stream":
            self.refused += 1
            if self._status == 200:
                socket = web.WebSocketResponse()  # of another application
                await socket.prepare(request)
                await socket.send_str('{"welcome": true}')
                return socket
            return web.Response(status=self._status, headers={"Location": "/v1/elsewhere"})
        raw = await request.read()
        passed = await self._world.call(request.method, request.path, raw=raw or None)
        return web.json_response(passed.body, status=passed.status, headers={"Date": passed.headers["Date"]})


@pytest.mark.parametrize("status", [400, 403, 404, 426, 429, 502, 301, 200])
async def test_where_no_stream_is_accepted_calls_are_requests(world: RestWorld, status: int) -> None:
    """It is asked once, not for each call."""
    proxy = Proxy(world, status)
    async with serving(proxy.answer) as url, patient(url) as client:
        await asyncio.gather(*(place(client, f"{number:02}") for number in range(CALLERS)))
        await place(client, "last")
    assert len(keys(world)) == CALLERS + 1
    assert proxy.refused == 1


async def test_a_coordinator_that_accepts_a_stream_is_preferred(world: RestWorld) -> None:
    """Such as one of a newer release among older ones."""
    proxy = Proxy(world, 404)
    async with serving(proxy.answer) as url, patient([url, world.url]) as client:
        await asyncio.gather(*(place(client, f"{number:02}") for number in range(CALLERS)))
    assert world.requests.counts["prepare", 201] == CALLERS
    assert {operation for operation, _ in world.requests.counts} == {"putGroup", "stream", "prepare", "end"}


async def test_a_key_that_is_revoked_ends_the_calls_with_the_reason(world: RestWorld) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path != "/v1/stream" or revoked:
            problem = {"error_code": "unauthenticated", "detail": "the key was revoked"}
            return web.json_response(problem, status=401)
        socket = web.WebSocketResponse(protocols=("halfway.stream.v1",))
        await socket.prepare(request)
        hello = {"max_frame_bytes": 2**20, "max_frame_operations": 9, "max_in_flight": 9}
        await socket.send_json({"hello": hello})
        await socket.receive()
        revoked.append(True)
        await socket.send_json({"problem": {"error_code": "unauthenticated"}})
        await socket.close(code=4403)
        return socket

    revoked: list[bool] = []
    async with serving(answer) as url, patient(url) as client:
        with pytest.raises(UnauthenticatedError, match="revoked") as told:
            await client.prepare([ORDER], id=named_id("a"))
        assert told.value.in_doubt


HELLO = {"max_frame_bytes": 2**20, "max_frame_operations": 9, "max_in_flight": 9}
Talk = Callable[[web.WebSocketResponse], Awaitable[None]]


class Tunnel(Proxy):
    """Passes requests on, and upgrades to a stream of its own."""

    def __init__(self, world: RestWorld, talk: Talk, hello: Any) -> None:
        super().__init__(world, 101)
        self._talk = talk
        self._hello = hello
        self.upgraded = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/v1/stream":
            return await super().answer(request)
        self.upgraded += 1
        socket = web.WebSocketResponse(protocols=("halfway.stream.v1",))
        await socket.prepare(request)
        await socket.send_json({"hello": self._hello})
        await self._talk(socket)
        return socket


@asynccontextmanager
async def tunnel_before(world: RestWorld, talk: Talk, hello: Any = HELLO) -> AsyncIterator[tuple[Tunnel, str]]:
    tunnel = Tunnel(world, talk, hello)
    async with serving(tunnel.answer) as url:
        yield tunnel, url


async def cut_at_once(socket: web.WebSocketResponse) -> None:
    await socket.close()


async def cut_at_the_first_frame(socket: web.WebSocketResponse) -> None:
    await socket.receive()
    await socket.close()


async def swallow(socket: web.WebSocketResponse) -> None:
    async for _ in socket:
        pass


async def stop_at_once(socket: web.WebSocketResponse) -> None:
    await socket.send_json({"closing": {"detail": "stopping"}})
    await swallow(socket)


def replying(answer: Any) -> Talk:
    async def reply(socket: web.WebSocketResponse) -> None:
        async for message in socket:
            for operation in json.loads(message.data)["prepare"]:
                await socket.send_json({"answers": [answer | {"n": operation["n"]}]})

    return reply


@pytest.mark.parametrize("talk", [cut_at_once, cut_at_the_first_frame, swallow, stop_at_once])
async def test_a_tunnel_that_brings_no_answer_is_left_for_requests(world: RestWorld, talk: Talk) -> None:
    """Such as a proxy that upgrades, and cuts or holds what follows."""
    async with tunnel_before(world, talk) as (tunnel, url), patient(url) as client:
        await asyncio.gather(*(place(client, f"{number:02}") for number in range(8)))
    assert len(keys(world)) == 8
    assert tunnel.upgraded == 1


@pytest.mark.parametrize("answer", [{}, {"status": 200, "body": [1]}, {"status": None}, {"status": 429, "body": "x"}])
async def test_an_answer_that_is_none_leaves_no_call_behind(world: RestWorld, answer: Any) -> None:
    async with tunnel_before(world, replying(answer)) as (_, url), patient(url) as client:
        await client.prepare([ORDER], id=named_id("a"))
    assert (await world.show(named_id("a"))).body["state"] == "prepared"


@pytest.mark.parametrize("answer", [{}, {"status": 200, "body": [1]}, {"status": None}, 7])
async def test_an_item_of_a_batch_that_is_no_answer_leaves_no_call_behind(answer: Any) -> None:
    async def reply(_: web.Request) -> web.Response:
        return web.json_response({"prepare": [answer]})

    async with serving(reply, "/v1/batch") as url, Halfway(url, "shop", prepare_timeout_s=0.3, stream=False) as client:
        with pytest.raises(PrepareUnconfirmedError, match="without a status"):
            await client.prepare([ORDER], id=named_id("a"))


@pytest.mark.parametrize("hello", [None, 7, HELLO | {"max_frame_bytes": None}, HELLO | {"max_in_flight": "many"}])
async def test_limits_that_are_none_are_no_stream(world: RestWorld, hello: Any) -> None:
    async with tunnel_before(world, swallow, hello) as (tunnel, url), patient(url) as client:
        await place(client, "a")
    assert keys(world) == [b"a"]
    assert tunnel.upgraded == 1


async def test_a_client_that_was_closed_while_its_stream_opened_can_be_opened_again(
    world: RestWorld, firewall: Firewall
) -> None:
    client = patient(firewall.url)
    async with client:
        firewall.lets_answers_pass.clear()
        prepare = asyncio.create_task(client.prepare([ORDER], id=named_id("a")))
        await until_true(lambda: firewall.accepted, what="the stream is being opened")
    await asyncio.gather(prepare, return_exceptions=True)
    firewall.lets_answers_pass.set()
    async with client:
        await place(client, "b")
    assert keys(world) == [b"b"]


async def test_ends_that_wait_do_not_delay_prepares(world: RestWorld) -> None:
    """An end may have to wait for its topic."""

    async def hold_ends(socket: web.WebSocketResponse) -> None:
        async for message in socket:
            for operation in json.loads(message.data).get("prepare", ()):
                await socket.send_json({"answers": [{"n": operation["n"], "status": 201, "body": prepared}]})

    prepared = {"state": "prepared"}
    async with tunnel_before(world, hold_ends) as (_, url), patient(url) as client:
        await client.prepare([ORDER], id=client.new_id())
        for _ in range(20):
            client.begin_end(client.new_id(), "commit")
        stream = client._shared._stream
        assert stream is not None
        await until_true(lambda: stream.sent, what="ends are under way")
        await client.prepare([ORDER], id=client.new_id())
        assert client._shared._stream is stream
        await client._shared.close()


async def test_a_large_call_is_a_request(world: RestWorld) -> None:
    """On a slow link, small ones and the answers to pings would wait behind it, and the connection be given up."""
    large = Message(topic="orders", value="x" * 70_000)
    async with patient(world.url) as client:
        await asyncio.gather(client.prepare([large], id=named_id("large")), place(client, "small"))
    assert world.requests.counts["batch", 200] == 1
    assert world.requests.counts["prepare", 201] == 1  # the small one


async def test_large_calls_share_no_frame_and_too_large_ones_are_refused_by_name(world: RestWorld) -> None:
    small = RestWorld(ApiLimits(max_body_bytes=100_000), memory=world.memory.restarted())
    async with small:
        await small.put_shop()
        async with patient(small.url) as client:
            large = Message(topic="orders", value="x" * 60_000)
            names = [named_id(f"large-{number}") for number in range(5)]
            await asyncio.gather(*(client.prepare([large], id=name) for name in names))
            with pytest.raises(Exception, match="too_large"):
                await client.prepare([Message(topic="orders", value="x" * 110_000)], id=named_id("too large"))
        assert small.requests.counts["prepare", 201] == 5


async def test_waiting_calls_are_bounded_in_bytes(firewall: Firewall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfway.client.calls.shared._MAX_BYTES", 50_000)
    large = Message(topic="orders", value="x" * 30_000)
    async with patient(firewall.url) as client:
        firewall.lets_answers_pass.clear()
        first = asyncio.create_task(client.prepare([large], id=named_id("a")))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="bytes"):
            await client.prepare([large], id=named_id("b"))
        firewall.lets_answers_pass.set()
        await first
        await client.prepare([large], id=named_id("b"))


async def test_no_more_calls_are_under_way_than_the_coordinator_takes(world: RestWorld) -> None:
    few = RestWorld(ApiLimits(max_stream_operations=8), memory=world.memory.restarted())
    async with few:
        await few.put_shop()
        async with patient(few.url) as client:
            await asyncio.gather(*(place(client, f"{number:02}") for number in range(CALLERS)))
        assert few.requests.counts["prepare", 201] == CALLERS


async def test_an_attempt_that_gets_no_answer_is_over_at_the_deadline(firewall: Firewall) -> None:
    async with Halfway(firewall.url, "shop", prepare_timeout_s=0.3, end_timeout_s=GENEROUS_S, stream=True) as client:
        firewall.lets_answers_pass.clear()
        with pytest.raises(PrepareUnconfirmedError):
            await client.prepare([ORDER], id=named_id("a"))
        firewall.lets_answers_pass.set()


async def test_an_old_stream_is_replaced_so_that_a_coordinator_that_was_away_gets_calls_again(
    world: RestWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a load balancer after a rolling restart. No call waits for it or fails."""
    monkeypatch.setattr(shared, "_AGE_S", 0.02)
    async with (
        firewall_before(world.url) as away,
        firewall_before(world.url) as other,
        patient([away.url, other.url]) as client,
    ):
        client._transport.avoid(away.url)
        await place(client, "first")
        assert away.accepted == 0
        client._transport._avoided_until[away.url] = 0.0  # it is back
        number = 0
        while not away.accepted and number < 1000:
            number += 1
            await asyncio.gather(*(place(client, f"{number}/{caller}") for caller in range(CALLERS)))
    assert away.accepted
    assert len(keys(world)) == 1 + number * CALLERS


async def test_a_stream_that_cannot_be_replaced_goes_on(
    world: RestWorld, firewall: Firewall, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with patient(firewall.url) as client:
        await place(client, "first")
        stream = client._shared._stream
        client._shared._open_at = 0.0
        monkeypatch.setattr(Stream, "connect", AsyncMock(side_effect=RefusedStreamError(503)))
        for key in ("a", "b", "c"):
            await place(client, key)
        assert client._shared._stream is stream
        assert firewall.accepted == 1
    assert len(keys(world)) == 4
