"""A caller knows what was done: errors reach it, refusals did nothing, and lost answers are ambiguous."""

import asyncio

import pytest
from aiohttp import web

from halfway.coordinator.ports import OwnerHint
from halfway.coordinator.requests import EndResult
from halfway.peers import HttpPeers
from halfway.protocol.errors import AlreadyEndedError, PeerLostError, ShardUnavailableError
from tests.support.loop_time import LoopTime
from tests.support.peers.owner import HOST, Owner, Serve, ask


async def test_the_errors_of_an_owner_reach_the_caller(serve: Serve, peers: HttpPeers) -> None:
    owner = Owner()
    owner.error = AlreadyEndedError("t", state="rolled_back")
    with pytest.raises(AlreadyEndedError, match="rolled_back") as caught:
        await ask(peers, await serve(owner), "t")
    assert caught.value.fields == {"id": "t", "state": "rolled_back"}


async def test_whoever_cannot_be_reached_did_nothing(peers: HttpPeers) -> None:
    with pytest.raises(ShardUnavailableError):
        await ask(peers, OwnerHint(incarnation="one", url=f"http://{HOST}:9"), "t")


async def test_an_answer_that_is_lost_leaves_open_what_was_done(serve: Serve, peers: HttpPeers) -> None:
    """A connection that breaks after the request, or an owner that hangs, is not read as a refusal."""

    async def broken(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    with pytest.raises(PeerLostError):
        await ask(peers, await serve(broken), "t")
    hangs = Owner()
    hangs.gates["t"] = asyncio.Event()
    waiting = ask(peers, await serve(hangs), "t")
    with pytest.raises(PeerLostError, match="not in time"):
        await LoopTime().out(waiting, 62, once=lambda: hangs.asked, what="it is asked")
    hangs.gates["t"].set()


async def test_a_part_of_the_answers_is_kept_where_the_rest_is_lost(serve: Serve, peers: HttpPeers) -> None:
    owner, requests = Owner(), list[web.BaseRequest]()
    owner.gates["never"] = asyncio.Event()

    async def kept(request: web.BaseRequest) -> web.StreamResponse:
        requests.append(request)
        return await owner(request)

    at = await serve(kept)
    done, never = (asyncio.create_task(ask(peers, at, name)) for name in ("done", "never"))
    assert isinstance(await done, EndResult)
    [request] = requests
    assert request.transport is not None
    request.transport.abort()
    with pytest.raises(PeerLostError):
        await never
    owner.gates["never"].set()


@pytest.mark.parametrize(
    "status,headers,body",
    [
        (302, {"Location": "http://127.0.0.1:9/"}, b""),
        (401, {}, b'{"error_code": "wrong_credential"}'),
        (404, {}, b"<html>"),
        (503, {}, b'{"error_code": "shutting_down"}'),
        (505, {}, b'{"error_code": "unknown_version"}'),
    ],
)
async def test_a_request_that_is_refused_as_a_whole_was_not_done(
    serve: Serve, peers: HttpPeers, status: int, headers: dict[str, str], body: bytes
) -> None:
    """Redirects are not followed."""

    async def refuse(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=status, headers=headers, body=body)

    with pytest.raises(ShardUnavailableError, match=str(status)):
        await ask(peers, await serve(refuse), "t")


@pytest.mark.parametrize(
    "status,body", [(500, b"\xff" * 100_000), (502, b"<html>"), (503, b"upstream reset"), (504, b"[1]"), (504, b"")]
)
async def test_an_error_that_is_not_an_instances_leaves_open_what_was_done(
    serve: Serve, peers: HttpPeers, status: int, body: bytes
) -> None:
    """A proxy between instances answers like this if it has forwarded the request and lost the owner."""

    async def fail(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=status, body=body)

    with pytest.raises(PeerLostError):
        await ask(peers, await serve(fail), "t")


@pytest.mark.parametrize("body", [b"hello", b"\xff" * 200, b"\0\0\0\1\xc1", b""])
async def test_an_answer_that_is_none_leaves_open_what_was_done(serve: Serve, peers: HttpPeers, body: bytes) -> None:
    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=body)

    with pytest.raises(PeerLostError):
        await ask(peers, await serve(answer), "t")
