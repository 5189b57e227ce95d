"""A caller knows what was done: errors reach it, refusals did nothing, and lost answers are ambiguous."""

import asyncio

import pytest
from aiohttp import web

from halfway.coordinator.ports import OwnerHint
from halfway.coordinator.requests import EndResult
from halfway.peers import HttpPeers
from halfway.protocol.errors import AlreadyEndedError, PeerLostError, ShardUnavailableError
from tests.support.loop_time import LoopTime
from tests.support.peers.owner import HOST, Owner, Serve, ask, within


async def test_the_errors_of_an_owner_reach_the_caller(serve: Serve, peers: HttpPeers) -> None:
    owner = Owner()
    owner.error = AlreadyEndedError("t", state="rolled_back")
    with pytest.raises(AlreadyEndedError, match="rolled_back") as caught:
        await ask(peers, await serve(owner), "t")
    assert caught.value.fields == {"id": "t", "state": "rolled_back"}
    owner.error = TimeoutError()
    with pytest.raises(PeerLostError, match="not in time"):
        await ask(peers, await serve(owner), "t")


async def test_whoever_cannot_be_reached_did_nothing(peers: HttpPeers) -> None:
    with pytest.raises(ShardUnavailableError):
        await ask(peers, OwnerHint(incarnation="one", url=f"http://{HOST}:9"), "t")


async def test_an_answer_that_is_lost_leaves_open_what_was_done(serve: Serve, peers: HttpPeers) -> None:
    """A connection that breaks after the call, or an owner that hangs, is not read as a refusal."""

    async def broken(request: web.BaseRequest) -> web.StreamResponse:
        socket = await accepted(request)
        await socket.receive()
        assert request.transport is not None
        request.transport.abort()
        return socket

    with pytest.raises(PeerLostError):
        await ask(peers, await serve(broken), "t")
    hangs = Owner()
    hangs.gates["t"] = asyncio.Event()
    waiting = ask(peers, await serve(hangs), "t")
    with pytest.raises(PeerLostError, match="not in time"):
        await LoopTime().out(waiting, 62, once=lambda: hangs.asked, what="it is asked")
    hangs.gates["t"].set()


async def test_an_owner_that_is_silent_for_long_is_lost(
    serve: Serve, peers: HttpPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that drops everything ends no connection: later calls must try a new one."""
    monkeypatch.setattr("halfway.peers._LOST_S", 0.05)
    connections = 0

    async def silent(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal connections
        connections += 1
        socket = await accepted(request)
        while not socket.closed:
            await socket.receive()
        return socket

    at = await serve(silent)
    for number in (1, 2):
        with pytest.raises(PeerLostError, match="TimeoutError"):
            await ask(peers, at, "t")
        assert connections == number


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


async def test_what_a_stopping_owner_has_not_read_is_known_not_to_be_done(serve: Serve, peers: HttpPeers) -> None:
    """It says up to where it has read: a rolling restart leaves no outcome open."""
    owner, requests = Owner(), list[web.BaseRequest]()

    async def kept(request: web.BaseRequest) -> web.StreamResponse:
        requests.append(request)
        return await owner(request)

    at = await serve(kept)
    await ask(peers, at, "before")
    [link] = peers._links.values()
    late = asyncio.create_task(ask(peers, at, "late"))
    while not any(call.sent for call in link.calls.values()):  # noqa: ASYNC110 - it is needed in this very turn
        await asyncio.sleep(0)
    await owner.port.drain(within())
    for request in requests:
        if request.transport is not None:
            request.transport.abort()  # as the end of a process does
    with pytest.raises(ShardUnavailableError, match="could not be called"):
        await late
    assert len(owner.asked) == 1


@pytest.mark.parametrize(
    "status,headers",
    [
        (200, {}),
        (302, {"Location": "http://127.0.0.1:9/"}),
        (401, {"Halfway-Peer-Refusal": "wrong_credential"}),
        (404, {"Halfway-Peer-Refusal": "not a name\u00e9"}),
        (502, {}),
        (503, {"Halfway-Peer-Refusal": "shutting_down"}),
        (505, {"Halfway-Peer-Refusal": "unknown_version"}),
    ],
)
async def test_a_connection_that_is_refused_did_nothing(
    serve: Serve, peers: HttpPeers, status: int, headers: dict[str, str]
) -> None:
    """Redirects are not followed: the credential would go to another address."""

    async def refuse(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=status, headers=headers, body=b"\xff" * 100_000)

    with pytest.raises(ShardUnavailableError, match=str(status)) as caught:
        await ask(peers, await serve(refuse), "t")
    assert ("_" in caught.value.detail) == ("_" in headers.get("Halfway-Peer-Refusal", ""))


@pytest.mark.parametrize("body", [b"hello", b"\xff" * 200, b"\xc1", b"", "text"])
async def test_an_answer_that_is_none_leaves_open_what_was_done(
    serve: Serve, peers: HttpPeers, body: bytes | str
) -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        socket = await accepted(request)
        await socket.receive()
        await (socket.send_str(body) if isinstance(body, str) else socket.send_bytes(body))
        await socket.receive()
        return socket

    with pytest.raises(PeerLostError):
        await ask(peers, await serve(answer), "t")


async def accepted(request: web.BaseRequest) -> web.WebSocketResponse:
    """Accept a connection as an owner does."""
    socket = web.WebSocketResponse(autoping=True)
    await socket.prepare(request)
    return socket
