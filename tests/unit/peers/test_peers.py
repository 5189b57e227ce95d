"""Instances that ask each other over real connections: the client and the port that answers it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from structlog.testing import capture_logs
from yarl import URL

from halfway.domain.errors import (
    AlreadyEndedError,
    HalfwayError,
    OverloadedError,
    PeerLostError,
    ShardUnavailableError,
)
from halfway.domain.transaction import Outcome, State
from halfway.peers import HttpPeers, PeerLimits
from halfway.rest.peering import PATH, PeerPort
from halfway.rest.server import HttpServer
from halfway.service.peer_calls import (
    CREDENTIAL_HEADER,
    TO_HEADER,
    VERSION_HEADER,
    DueCall,
    EndCall,
    GetCall,
    PeerCall,
)
from halfway.service.ports import OwnerHint
from halfway.service.requests import End, EndResult

HOST = "127.0.0.1"
SECRET = "the secret of this cluster"


def end_of(name: str) -> EndCall:
    return EndCall(request=End(id=name, outcome=Outcome.COMMIT))


class Owner:
    """An instance that answers as a test says, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[PeerCall] = []
        self.credentials: list[str | None] = []
        self.left_s: list[float] = []
        self.requests = 0
        self.incarnation: str | None = "one"
        self.gates: dict[str, asyncio.Event] = {}
        self.error: HalfwayError | None = None
        self.port = PeerPort(
            self,  # type: ignore[arg-type] # it answers, which is all that is asked of it
            credentials=[SECRET, "the one before"],
            incarnation=lambda: self.incarnation,
            max_body_bytes=100_000,
            longest_s=20,
            max_calls=1_000,
        )

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests += 1
        return await self.port(request)

    async def answer(self, call: PeerCall, *, deadline: float, credential: str | None) -> msgspec.Struct:
        self.asked.append(call)
        self.credentials.append(credential)
        self.left_s.append(deadline - asyncio.get_running_loop().time())
        name = call.request.id if isinstance(call, EndCall) else ""
        if name in self.gates:
            await self.gates[name].wait()
        if self.error is not None:
            raise self.error
        return EndResult(id=name, state=State.COMMITTED, changed=True)


Serve = Callable[[Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]], Awaitable[OwnerHint]]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def serve(stack: AsyncExitStack) -> Serve:
    """Let a handler listen on a free port, as the owner `one`."""

    async def started(handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> OwnerHint:
        server = HttpServer(handler)
        stack.push_async_callback(server.stop)
        port = await server.start(HOST, 0)
        return OwnerHint(incarnation="one", url=f"http://{HOST}:{port}")

    return started


@pytest.fixture
async def peers(stack: AsyncExitStack) -> HttpPeers:
    return await stack.enter_async_context(HttpPeers(SECRET))


def within(seconds: float = 10) -> float:
    return asyncio.get_running_loop().time() + seconds


async def ask(peers: HttpPeers, owner: OwnerHint, name: str, seconds: float = 10) -> Any:
    return await peers.ask(owner, end_of(name), deadline=within(seconds), credential="of the caller")


async def test_what_is_asked_at_one_moment_goes_as_one_request(serve: Serve, peers: HttpPeers) -> None:
    """Each call has its own deadline and its caller's credential, and gets its own answer."""
    owner = Owner()
    at = await serve(owner)
    names = [f"t-{number}" for number in range(300)]
    answers = await asyncio.gather(*(ask(peers, at, name, 5) for name in names))
    assert [answer.id for answer in answers] == names
    assert owner.requests == 1
    assert set(owner.credentials) == {"of the caller"}
    assert all(0 < left <= 5 for left in owner.left_s)


async def test_a_call_that_takes_long_holds_up_no_other_of_its_request(serve: Serve, peers: HttpPeers) -> None:
    owner = Owner()
    owner.gates["slow"] = asyncio.Event()
    at = await serve(owner)
    slow = asyncio.create_task(ask(peers, at, "slow"))
    quick = await asyncio.gather(*(ask(peers, at, name) for name in ("a", "b")))
    assert [answer.id for answer in quick] == ["a", "b"]
    assert owner.requests == 1
    assert not slow.done()
    owner.gates["slow"].set()
    assert (await slow).id == "slow"


async def test_requests_under_way_are_bounded_and_what_waits_goes_with_the_next(
    serve: Serve, stack: AsyncExitStack
) -> None:
    peers = await stack.enter_async_context(HttpPeers(SECRET, limits=PeerLimits(max_requests=2, max_calls=3)))
    owner = Owner()
    gate = asyncio.Event()
    names = [f"t-{number}" for number in range(20)]
    owner.gates = dict.fromkeys(names, gate)
    at = await serve(owner)
    asked = [asyncio.create_task(ask(peers, at, name)) for name in names]
    while len(owner.asked) < 6:  # noqa: ASYNC110 - nothing tells when they have come
        await asyncio.sleep(0.005)
    assert owner.requests == 2
    gate.set()
    assert [answer.id for answer in await asyncio.gather(*asked)] == names
    assert owner.requests == 7


async def test_those_that_wait_for_checks_take_no_place_of_the_others(serve: Serve, stack: AsyncExitStack) -> None:
    peers = await stack.enter_async_context(HttpPeers(SECRET, limits=PeerLimits(max_requests=1)))
    owner = Owner()
    owner.gates[""] = asyncio.Event()
    at = await serve(owner)
    waiting = asyncio.create_task(peers.ask(at, DueCall(group="shop", wait_s=60), deadline=within(), credential=None))
    while not owner.asked:  # noqa: ASYNC110 - nothing tells when it has come
        await asyncio.sleep(0.005)
    assert (await ask(peers, at, "now")).id == "now"
    waiting.cancel()
    owner.gates[""].set()


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
    """Those who would ask it are told at once, and take no places that others need."""
    monkeypatch.setattr("halfway.peers.client._SILENT_S", 0.1)
    peers = await stack.enter_async_context(HttpPeers(SECRET, limits=PeerLimits(max_requests=2, max_calls=1)))
    owner = Owner()
    owner.gates = dict.fromkeys(("a", "b"), asyncio.Event())
    at = await serve(owner)
    waiting = [asyncio.create_task(ask(peers, at, name)) for name in ("a", "b")]
    await asyncio.sleep(0.3)
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
    while len(hanging.asked) < len(names):  # noqa: ASYNC110 - nothing tells when they have come
        await asyncio.sleep(0.005)
    with pytest.raises(OverloadedError):
        await ask(peers, at, "one more")
    assert (await ask(peers, elsewhere, "of another")).id == "of another"
    gate.set()
    assert [answer.id for answer in await asyncio.gather(*asked)] == names
    assert (await ask(peers, at, "later")).id == "later"


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
    """A connection that breaks after the request, or an owner that hangs, is not taken for a refusal."""

    async def broken(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    with pytest.raises(PeerLostError):
        await ask(peers, await serve(broken), "t")
    hangs = Owner()
    hangs.gates["t"] = asyncio.Event()
    with pytest.raises(PeerLostError, match="not in time"):
        await ask(peers, await serve(hangs), "t", 0.2)
    hangs.gates["t"].set()


async def test_a_part_of_the_answers_is_kept_where_the_rest_is_lost(serve: Serve, peers: HttpPeers) -> None:
    owner = Owner()
    owner.gates["never"] = asyncio.Event()

    async def cut(request: web.BaseRequest) -> web.StreamResponse:
        def abort() -> None:
            assert request.transport is not None
            request.transport.abort()

        asyncio.get_running_loop().call_later(0.3, abort)
        return await owner(request)

    at = await serve(cut)
    answers: list[object] = await asyncio.gather(
        ask(peers, at, "done"), ask(peers, at, "never"), return_exceptions=True
    )
    assert isinstance(answers[0], EndResult)
    assert isinstance(answers[1], PeerLostError)
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
    """A proxy between instances answers so when it has passed the request on and lost the owner."""

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


async def test_closing_tells_those_who_wait(serve: Serve) -> None:
    owner = Owner()
    owner.gates["t"] = asyncio.Event()
    at = await serve(owner)
    async with HttpPeers(SECRET) as peers:
        waiting = asyncio.create_task(ask(peers, at, "t"))
        while not owner.asked:  # noqa: ASYNC110 - nothing tells when it has come
            await asyncio.sleep(0.005)
    with pytest.raises(PeerLostError):
        await waiting
    with pytest.raises(ShardUnavailableError):
        await ask(peers, at, "later")
    owner.gates["t"].set()


@pytest.mark.parametrize("turns", [1, 2], ids=["before its request is made", "before its request begins"])
async def test_closing_tells_those_whose_request_has_not_begun(serve: Serve, turns: int) -> None:
    """Nothing was sent: they hear at once, not at their deadline, that it was not done."""
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


async def test_closing_tells_those_who_wait_for_a_place(serve: Serve) -> None:
    owner = Owner()
    owner.gates["first"] = asyncio.Event()
    at = await serve(owner)
    async with HttpPeers(SECRET, limits=PeerLimits(max_requests=1)) as peers:
        first = asyncio.create_task(ask(peers, at, "first", seconds=3600))
        while not owner.asked:  # noqa: ASYNC110 - nothing tells when it has come
            await asyncio.sleep(0.005)
        second = asyncio.create_task(ask(peers, at, "second", seconds=3600))
        await asyncio.sleep(0)
    with pytest.raises(PeerLostError):
        await first
    with pytest.raises(ShardUnavailableError):
        await second
    owner.gates["first"].set()


async def test_the_credential_before_is_accepted_too(serve: Serve, stack: AsyncExitStack) -> None:
    """So that it can be changed while instances run."""
    owner = Owner()
    at = await serve(owner)
    for credential in ("the one before", SECRET):
        peers = await stack.enter_async_context(HttpPeers(credential))
        assert (await ask(peers, at, credential)).changed
    peers = await stack.enter_async_context(HttpPeers("another one"))
    with pytest.raises(ShardUnavailableError, match="wrong_credential"):
        await ask(peers, at, "t")
    assert len(owner.asked) == 2


async def test_another_incarnation_at_the_address_does_nothing(serve: Serve, peers: HttpPeers) -> None:
    """It may be another cluster's instance by now, or this one's after it lost its shards."""
    owner = Owner()
    at = await serve(owner)
    for incarnation in ("two", None):
        owner.incarnation = incarnation
        with pytest.raises(ShardUnavailableError, match="421"):
            await ask(peers, at, "t")
    assert owner.asked == []


async def test_bodies_are_bounded_and_nothing_is_read_without_the_credential(serve: Serve) -> None:
    at = await serve(Owner())
    url = at.url + PATH
    known = {CREDENTIAL_HEADER: SECRET, "Halfway-Peer-Version": "1", "Halfway-Peer-To": "one"}
    async with aiohttp.ClientSession() as session:

        async def status(headers: dict[str, str], data: Any) -> int:
            async with session.post(url, data=data, headers=headers) as response:
                return response.status

        async def chunks() -> AsyncIterator[bytes]:
            yield b"x"

        assert await status({}, b"x" * 1_000_000) == 401
        assert await status(known, b"x" * 200_000) == 413
        assert await status(known, chunks()) == 413
        assert await status(known, b"x") == 400
        async with session.get(url, headers=known) as response:
            assert response.status == 405


async def test_a_port_that_drains_takes_no_more_and_answers_what_it_has(serve: Serve, peers: HttpPeers) -> None:
    owner = Owner()
    owner.gates["t"] = asyncio.Event()
    at = await serve(owner)
    waiting = asyncio.create_task(ask(peers, at, "t"))
    while not owner.asked:  # noqa: ASYNC110 - nothing tells when it has come
        await asyncio.sleep(0.005)
    draining = asyncio.create_task(owner.port.drain(within()))
    await asyncio.sleep(0)
    with pytest.raises(ShardUnavailableError, match="shutting_down"):
        await ask(peers, at, "later")
    assert not draining.done()
    owner.gates["t"].set()
    await draining
    assert (await waiting).id == "t"


async def test_a_call_of_which_this_release_knows_nothing_spoils_no_other(serve: Serve) -> None:
    at = await serve(Owner())
    body = msgspec.msgpack.encode(
        {
            "calls": [
                {"within_ms": 1000, "call": {"type": "teleport"}},
                {"within_ms": 1000, "call": msgspec.to_builtins(end_of("t"))},
            ]
        }
    )
    headers = {CREDENTIAL_HEADER: SECRET, "Halfway-Peer-Version": "1", "Halfway-Peer-To": "one"}
    from halfway.service.peer_wire import AnswerReader, result_of

    async with aiohttp.ClientSession() as session, session.post(at.url + PATH, data=body, headers=headers) as response:
        frames = {frame.index: frame for frame in AnswerReader(10_000).feed(await response.read())}
    with pytest.raises(ShardUnavailableError):
        result_of(GetCall(id="t"), frames[0])
    assert result_of(end_of("t"), frames[1]).id == "t"


async def test_an_asker_that_dies_in_the_middle_of_its_request_is_no_fault(serve: Serve) -> None:
    """It is not logged as an error of the one that was asked, and its calls were not done."""
    owner, began, ended = Owner(), asyncio.Event(), asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        began.set()
        try:
            return await owner(request)
        finally:
            ended.set()

    at = URL((await serve(handler)).url)
    with capture_logs() as logged:
        async with asyncio.timeout(30):
            _, writer = await asyncio.open_connection(at.host, at.port)
            head = f"POST {PATH} HTTP/1.1\r\nHost: h\r\n{CREDENTIAL_HEADER}: {SECRET}\r\n{VERSION_HEADER}: 1\r\n"
            writer.write(f"{head}{TO_HEADER}: one\r\nContent-Length: 1000\r\n\r\nhalf of it".encode())
            await began.wait()
            writer.close()
            await ended.wait()
        await asyncio.sleep(0.05)  # what is logged is logged in the same turn
    assert owner.asked == []
    assert [entry for entry in logged if entry["log_level"] == "error"] == []


async def test_an_asker_that_dies_before_its_answer_comes_is_no_fault(serve: Serve) -> None:
    owner, faults, ended = Owner(), list[Exception](), asyncio.Event()
    owner.gates = {name: asyncio.Event() for name in ("first", "second")}

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await owner(request)
        except Exception as error:
            faults.append(error)
            raise
        finally:
            ended.set()

    at = await serve(handler)
    async with asyncio.timeout(30):
        async with HttpPeers(SECRET) as asker:
            asked = [asyncio.create_task(ask(asker, at, name)) for name in owner.gates]
            while len(owner.asked) < len(asked):  # noqa: ASYNC110 - the owner sets no event
                await asyncio.sleep(0.01)
        await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(0.1)  # until the owner's side has seen the connection close
        owner.gates["first"].set()
        await asyncio.sleep(0)
        owner.gates["second"].set()
        await ended.wait()
    assert faults == []
