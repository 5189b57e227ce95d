"""Instances that call each other over real connections: batching, limits, lost answers, and the end of calls."""

import asyncio
from contextlib import AsyncExitStack
from unittest import mock

import pytest
from aiohttp import web

from halfway.coordinator.ports import OwnerHint
from halfway.coordinator.records import DueCall, EndCall, decode_calls
from halfway.coordinator.requests import EndResult
from halfway.http.server import peer_port
from halfway.peers import HttpPeers, PeerLimits
from halfway.protocol.errors import AlreadyEndedError, OverloadedError, PeerLostError, ShardUnavailableError
from halfway.protocol.principal import ANYBODY
from tests.support.loop_time import LoopTime
from tests.support.peers.owner import CALLER, HOST, SECRET, Owner, Serve, ask, within
from tests.support.waiting import GENEROUS_S, until_true


async def test_all_calls_to_an_owner_share_a_connection(serve: Serve, peers: HttpPeers) -> None:
    """Each call has its own deadline and its caller's principal, and gets its own answer."""
    owner = Owner()
    at = await serve(owner)
    names = [f"t-{number}" for number in range(300)]
    answers = await asyncio.gather(*(ask(peers, at, name) for name in names))
    assert [answer.id for answer in answers] == names
    assert owner.connections == 1
    assert set(owner.principals) == {CALLER}
    assert all(0 < left <= 60 for left in owner.left_s)


async def test_a_call_that_takes_long_holds_up_no_other_of_its_request(serve: Serve, peers: HttpPeers) -> None:
    owner = Owner()
    owner.gates["slow"] = asyncio.Event()
    at = await serve(owner)
    slow = asyncio.create_task(ask(peers, at, "slow"))
    quick = await asyncio.gather(*(ask(peers, at, name) for name in ("a", "b")))
    assert [answer.id for answer in quick] == ["a", "b"]
    assert owner.connections == 1
    assert not slow.done()
    owner.gates["slow"].set()
    assert (await slow).id == "slow"


@pytest.mark.parametrize("limits", [PeerLimits(max_calls=3), PeerLimits(max_message_bytes=400)])
async def test_messages_are_bounded_and_what_waits_goes_with_the_next(
    serve: Serve, stack: AsyncExitStack, limits: PeerLimits
) -> None:
    peers = await stack.enter_async_context(HttpPeers(SECRET, limits=limits))
    at = await serve(Owner())
    names = [f"t-{number}" for number in range(20)]
    with mock.patch.object(peer_port, "decode_calls", wraps=decode_calls) as decode:
        answers = await asyncio.gather(*(ask(peers, at, name) for name in names))
    assert [answer.id for answer in answers] == names
    assert [len(decode_calls(*call.args)) for call in decode.call_args_list] == [3] * 6 + [2]


async def test_large_answers_to_reads_hold_up_no_end(serve: Serve, peers: HttpPeers) -> None:
    """Ends and prepares have a connection of their own."""
    owner = Owner()
    owner.gates[""] = asyncio.Event()
    at = await serve(owner)
    waiting = asyncio.create_task(peers.ask(at, DueCall(group="shop", wait_s=60), deadline=within(), principal=ANYBODY))
    await until_true(lambda: owner.asked, what="it is asked")
    assert (await ask(peers, at, "now")).id == "now"
    assert owner.connections == 2
    waiting.cancel()
    owner.gates[""].set()


async def test_a_connection_without_calls_is_closed_after_a_while(
    serve: Serve, peers: HttpPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while a call waits for its answer, however long it takes."""
    monkeypatch.setattr("halfway.peers._IDLE_S", 0.05)
    owner, ended = Owner(), asyncio.Event()
    owner.gates["slow"] = asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await owner(request)
        finally:
            ended.set()

    slow = asyncio.create_task(ask(peers, await serve(handler), "slow"))
    await asyncio.sleep(0.2)
    assert not ended.is_set()
    owner.gates["slow"].set()
    assert (await slow).id == "slow"
    await asyncio.wait_for(ended.wait(), GENEROUS_S)


async def test_more_than_may_wait_is_refused_and_was_not_done(serve: Serve, stack: AsyncExitStack) -> None:
    limits = PeerLimits(max_waiting=2)
    peers = await stack.enter_async_context(HttpPeers(SECRET, limits=limits))
    owner = Owner()
    owner.gates = dict.fromkeys(("a", "b"), asyncio.Event())
    at = await serve(owner)
    waiting = [asyncio.create_task(ask(peers, at, name)) for name in ("a", "b")]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await ask(peers, at, "c")
    owner.gates["a"].set()
    await asyncio.gather(*waiting)
    assert (await ask(peers, at, "d")).id == "d"


async def test_an_owner_that_hangs_is_asked_no_more_until_it_answers(
    serve: Serve, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its callers get the error at once, and take no places that others need."""
    monkeypatch.setattr("halfway.peers._SILENT_S", 20.0)
    monkeypatch.setattr("halfway.peers._LOST_S", 3600.0)
    monkeypatch.setattr("halfway.peers._MANY", 2)
    monkeypatch.setattr("halfway.http.server.peer_port._ALIVE_S", 3600.0)
    peers = await stack.enter_async_context(HttpPeers(SECRET))
    owner = Owner()
    owner.gates = dict.fromkeys(("a", "b"), asyncio.Event())
    at = await serve(owner)
    waiting = [asyncio.create_task(ask(peers, at, name)) for name in ("a", "b")]
    await until_true(lambda: len(owner.asked) == 2, what="both are asked")
    LoopTime().advance(25)
    for _ in range(3):
        with pytest.raises(ShardUnavailableError, match="does not answer"):
            await ask(peers, at, "c")
    owner.gates["a"].set()
    await asyncio.gather(*waiting)
    assert (await ask(peers, at, "d")).id == "d"
    assert [call.request.id for call in owner.asked if isinstance(call, EndCall)] == ["a", "b", "d"]


async def test_an_owner_that_hangs_leaves_places_for_calls_to_the_others(serve: Serve, stack: AsyncExitStack) -> None:
    limits = PeerLimits(max_waiting=10, max_waiting_of_one=5)
    peers = await stack.enter_async_context(HttpPeers(SECRET, limits=limits))
    hanging, other = Owner(), Owner()
    gate = asyncio.Event()
    names = [f"t-{number}" for number in range(5)]
    hanging.gates = dict.fromkeys(names, gate)
    at, elsewhere = await serve(hanging), await serve(other)
    asked = [asyncio.create_task(ask(peers, at, name)) for name in names]
    await until_true(lambda: len(hanging.asked) >= len(names))
    with pytest.raises(OverloadedError):
        await ask(peers, at, "one more")
    assert (await ask(peers, elsewhere, "of another")).id == "of another"
    gate.set()
    assert [answer.id for answer in await asyncio.gather(*asked)] == names
    assert (await ask(peers, at, "later")).id == "later"


async def test_closing_tells_those_who_wait(serve: Serve) -> None:
    owner = Owner()
    owner.gates["t"] = asyncio.Event()
    at = await serve(owner)
    async with HttpPeers(SECRET) as peers:
        waiting = asyncio.create_task(ask(peers, at, "t"))
        await until_true(lambda: owner.asked)
    with pytest.raises(PeerLostError):
        await waiting
    with pytest.raises(ShardUnavailableError):
        await ask(peers, at, "later")
    owner.gates["t"].set()


@pytest.mark.parametrize("turns", [1, 2], ids=["before its connection is begun", "before it is open"])
async def test_closing_tells_those_whose_call_is_not_sent(serve: Serve, turns: int) -> None:
    """Nothing was sent: callers get this error at once, not at their deadline."""
    owner = Owner()
    at = await serve(owner)
    peers = HttpPeers(SECRET)
    asked = asyncio.create_task(ask(peers, at, "t", seconds=3600))
    for _ in range(turns):
        await asyncio.sleep(0)
    await peers.close()
    with pytest.raises(ShardUnavailableError):
        await asked
    assert owner.asked == []


async def test_whether_an_owner_accepts_connections_is_known_without_a_call() -> None:
    """An instance that serves nothing is ready only if it reaches another one."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with HttpPeers("c" * 16) as peers:
        there = OwnerHint(incarnation="a", url=f"http://127.0.0.1:{port}")
        assert await peers.reaches(there)
        server.close()
        await server.wait_closed()
        assert not await peers.reaches(there)
        assert not await peers.reaches(OwnerHint(incarnation="a", url="http://no.such.host.invalid:8080"))


async def test_an_answer_that_is_too_large_ends_no_other_call(serve: Serve, peers: HttpPeers) -> None:
    owner = Owner()
    owner.gates["slow"] = asyncio.Event()
    at = await serve(owner)
    slow = asyncio.create_task(ask(peers, at, "slow"))
    with (
        mock.patch.object(peer_port, "MAX_ANSWER_BYTES", 100),
        pytest.raises(PeerLostError, match="more than 100 bytes"),
    ):
        await ask(peers, at, "x" * 100)
    owner.gates["slow"].set()
    assert (await slow).id == "slow"


async def test_a_call_that_was_given_up_unsent_is_not_kept(serve: Serve, peers: HttpPeers) -> None:
    """An owner that does not take the connection would let the memory of its callers grow, beyond every bound."""

    async def hang(_: web.BaseRequest) -> web.StreamResponse:
        await asyncio.sleep(GENEROUS_S)
        raise ConnectionResetError

    at = await serve(hang)
    with pytest.raises(ShardUnavailableError):
        await ask(peers, at, "t", seconds=0.05)
    [link] = peers._links.values()
    assert not link.unsent.get_nowait().body


async def test_an_owner_whose_url_cannot_be_read_is_not_waited_for(peers: HttpPeers) -> None:
    for _ in range(2):
        with pytest.raises(ShardUnavailableError, match="could not be called"):
            await ask(peers, OwnerHint(incarnation="one", url="http://[::1"), "t")


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
