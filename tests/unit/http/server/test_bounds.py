"""Limits of requests in flight, stalled clients and connections; and input that is not HTTP."""

import asyncio
import contextlib
import errno
import gc
import json
import re
import socket
from collections.abc import Callable
from unittest.mock import AsyncMock

import pytest
import uvloop
from aiohttp import web

from halfway.coordinator.requests import ServiceLimits
from halfway.http.requests.admission import ApiLimits
from halfway.http.responses import SLOW_LOOKS, Unsent
from halfway.http.server.server import HttpServer
from halfway.protocol.errors import ShuttingDownError
from tests.support.ids import named_id
from tests.support.replies import once
from tests.support.rest.client import HOST, RestWorld
from tests.support.rest.raw import BODY, POST
from tests.support.waiting import GENEROUS_S, until_true
from tests.unit.http.conftest import NewWorld


async def test_more_requests_than_may_be_in_flight_are_429(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await new_world(ApiLimits(max_requests=1))
    await world.put_shop()
    began, go_on = delay_appends(world, monkeypatch)
    in_flight = asyncio.create_task(world.prepare())
    await began.wait()
    answer = await world.call("POST", "/v1/transactions", raw=BODY)
    assert (answer.status, answer.error_code) == (429, "overloaded")
    assert int(answer.headers["Retry-After"]) >= 1
    poll = await world.call("GET", "/v1/groups/nobody/checks")
    assert poll.status == 404, "a poll takes no place"
    go_on.set()
    assert (await in_flight).status == 201
    await until_true(lambda: not world.api.in_flight.taken)
    assert (await world.call("POST", "/v1/transactions", raw=BODY)).status == 201


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("turns", range(6))
def test_a_connection_that_comes_while_the_port_is_closed_is_closed_too(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], turns: int
) -> None:
    """At any point of its setup in the event loop."""

    async def story() -> None:
        server = HttpServer(AsyncMock())
        with socket.create_connection((HOST, await server.start(HOST, 0))) as client:
            client.setblocking(False)
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.stop()
            with contextlib.suppress(ConnectionResetError):
                async with asyncio.timeout(GENEROUS_S):
                    assert await asyncio.get_running_loop().sock_recv(client, 1) == b""

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(story())


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("turns", range(8))
def test_a_request_that_arrives_while_the_port_is_closed_is_answered_or_not_begun(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], turns: int, caplog: pytest.LogCaptureFixture
) -> None:
    """At any point of its connection's setup: no answer is written to a closed connection."""

    async def answer(_request: web.BaseRequest) -> web.Response:
        for _ in range(4):
            await asyncio.sleep(0)
        return web.Response(text="here")

    async def story() -> int:
        handler = AsyncMock(side_effect=answer)
        server = HttpServer(handler)
        with socket.create_connection((HOST, await server.start(HOST, 0))) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
            client.setblocking(False)
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.close_port()
            for _ in range(turns + 20):
                await asyncio.sleep(0)
            received = bytearray()
            await server.stop()
            with contextlib.suppress(ConnectionResetError):
                async with asyncio.timeout(GENEROUS_S):
                    while piece := await asyncio.get_running_loop().sock_recv(client, 1024):
                        received += piece
            assert received.endswith(b"here") == bool(handler.call_count)
            return handler.call_count

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(story())
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_connections_that_come_at_once_are_all_served(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Up to the limit of connections: only TLS handshakes have a lower limit."""
    room = 4

    async def story() -> None:
        server = HttpServer(AsyncMock(side_effect=lambda _: web.Response(text="here")), max_connections=room)
        address = (HOST, await server.start(HOST, 0))
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.create_connection(address)) for _ in range(room)]
            for client in clients:
                client.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
                client.setblocking(False)
            try:
                async with asyncio.timeout(GENEROUS_S):
                    for client in clients:
                        assert await asyncio.get_running_loop().sock_recv(client, 1) == b"H"
            finally:
                await server.stop()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(story())


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_connection_too_many_is_ended_and_takes_no_place(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """If no other connection can be closed for it; when a connection ends, its place is free again."""

    async def story() -> None:
        began, go_on = asyncio.Event(), asyncio.Event()

        async def answer(_request: web.BaseRequest) -> web.Response:
            began.set()
            await go_on.wait()
            return web.Response(text="here")

        server = HttpServer(answer, max_connections=1)
        address = (HOST, await server.start(HOST, 0))
        reader, writer = await asyncio.open_connection(*address)
        try:
            writer.write(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
            await began.wait()
            for _ in range(3):
                newcomer, its_writer = await asyncio.open_connection(*address)
                async with asyncio.timeout(GENEROUS_S):
                    with contextlib.suppress(ConnectionResetError):
                        assert await newcomer.read() == b""
                its_writer.close()
            go_on.set()
            assert (await reader.read()).endswith(b"here")
            later, its_writer = await asyncio.open_connection(*address)
            its_writer.write(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
            assert (await later.read()).endswith(b"here")
            its_writer.close()
        finally:
            writer.close()
            await server.stop()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(story())


async def test_a_port_goes_on_when_a_descriptor_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = asyncio.Event()

    def refuse(_: socket.socket) -> None:
        refused.set()
        raise OSError(errno.EMFILE, "Too many open files")

    server = HttpServer(AsyncMock(return_value=web.Response(text="here")))
    monkeypatch.setattr(socket.socket, "accept", refuse)
    reader, writer = await asyncio.open_connection(HOST, await server.start(HOST, 0))
    try:
        await refused.wait()
        monkeypatch.undo()
        writer.write(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).endswith(b"here")
    finally:
        writer.close()
        await server.stop()


async def test_paths_and_methods_that_there_are_not_are_problems(world: RestWorld) -> None:
    for path in (
        "/",
        "/v1",
        "/v1/nothing",
        "/v1/groups/",
        "/v1/transactions/x/y",
        "/v1//x",
        "/v2/groups",
        "/V1/groups",
    ):
        answer = await world.call("GET", path)
        assert (answer.status, answer.error_code) == (404, "unknown_path"), path
    for method, path in (("DELETE", "/v1/transactions/x"), ("POST", "/v1/groups/x"), ("GET", "/v1/batch")):
        answer = await world.call(method, path)
        assert (answer.status, answer.error_code) == (405, "method_not_allowed")
        assert answer.headers["Allow"] == ", ".join(answer.body["allowed"])


async def test_head_is_answered_as_get_without_a_body(world: RestWorld) -> None:
    answer = await world.call("HEAD", "/v1/groups")
    assert (answer.status, answer.body) == (200, None)


async def test_head_takes_no_checks(world: RestWorld) -> None:
    """Nobody would read the checks, and each would count as sent."""
    await world.put_shop(check={"mode": "pull"})
    answer = await world.call("HEAD", "/v1/groups/shop/checks")
    assert (answer.status, answer.headers["Allow"]) == (405, "GET")


async def test_a_request_keeps_its_id_or_gets_one(world: RestWorld) -> None:
    given = await world.call("GET", "/v1/nothing", headers={"X-Request-Id": "abc-1"})
    assert given.headers["X-Request-Id"] == given.body["instance"] == "abc-1"
    made = [(await world.call("GET", "/v1/groups", headers={"X-Request-Id": "a b"})) for _ in range(2)]
    assert len({answer.headers["X-Request-Id"] for answer in made}) == 2
    assert all(re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", answer.headers["X-Request-Id"]) for answer in made)


async def test_an_unforeseen_error_is_500_and_tells_nothing_of_the_inside(
    world: RestWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the inside")

    monkeypatch.setattr(world.memory.half_log, "append", fail)
    answer = await world.prepare()
    assert (answer.status, answer.error_code) == (500, "internal")
    assert "inside" not in json.dumps(answer.body)
    batch = await world.call("POST", "/v1/batch", {"prepare": [json.loads(BODY)]})
    assert batch.body["prepare"][0]["problem"]["error_code"] == "internal"
    assert "inside" not in json.dumps(batch.body)


def delay_appends(world: RestWorld, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Delay appends to half; return an event that is set when a record has arrived, and one that lets it continue."""
    began, go_on = asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(world.memory.half_log, "append", once(go_on, world.memory.half_log.append, began))
    return began, go_on


async def test_a_client_that_goes_away_does_not_stop_its_prepare(
    world: RestWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = delay_appends(world, monkeypatch)
    _, writer = await asyncio.open_connection(HOST, world.port)
    body = BODY[:-1] + b',"id":"%b"}' % named_id("mine").encode()
    writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    async with asyncio.timeout(GENEROUS_S):
        await began.wait()
        writer.close()
        await writer.wait_closed()
        go_on.set()
        while (await world.show(named_id("mine"))).status != 200:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)


async def test_a_stop_takes_nothing_more_and_waits_for_what_is_in_flight(
    world: RestWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = delay_appends(world, monkeypatch)
    in_flight = asyncio.create_task(world.prepare())
    await began.wait()
    draining = asyncio.create_task(world.api.drain(asyncio.get_running_loop().time() + 30))
    await asyncio.sleep(0)
    late = await world.call("GET", "/v1/groups")
    assert (late.status, late.error_code) == (503, ShuttingDownError.code)
    assert late.headers["Connection"] == "close"
    assert int(late.headers["Retry-After"]) >= 1
    assert not draining.done()
    go_on.set()
    assert (await in_flight).status == 201
    async with asyncio.timeout(GENEROUS_S):
        await draining


async def test_a_stop_ends_at_its_deadline_and_answers_what_is_not_done(world: RestWorld) -> None:
    reader, slow = await asyncio.open_connection(HOST, world.port)
    try:
        slow.write(POST + b"Content-Length: 100\r\n\r\n{")
        await slow.drain()
        await until_true(lambda: bool(world.api._open))
        async with asyncio.timeout(GENEROUS_S):
            await world.api.drain(asyncio.get_running_loop().time() + 0.1)
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
    finally:
        slow.transport.abort()
    assert head.startswith("HTTP/1.1 503 ")
    assert "Retry-After: " in head


@pytest.mark.parametrize(
    "operation, code", [("prepare", "outcome_unknown"), ("batch", "outcome_unknown"), ("end", "end_unconfirmed")]
)
async def test_what_a_stop_abandons_is_not_called_refused(
    world: RestWorld, monkeypatch: pytest.MonkeyPatch, operation: str, code: str
) -> None:
    """It is stored or done all the same: a caller that takes it for refused begins the same work under another id."""
    transaction = await world.prepared()
    began, go_on = delay_appends(world, monkeypatch)
    with world.memory.faults.lane_held():
        match operation:
            case "prepare":
                call = world.prepare(id=named_id("mine"))
            case "batch":
                one = {"group": "shop", "messages": [{"topic": "orders", "value": "v"}], "id": named_id("mine")}
                call = world.call("POST", "/v1/batch", {"prepare": [one], "end": []})
            case _:
                began.set()
                call = world.end(transaction, "commit")
        in_flight = asyncio.create_task(call)
        async with asyncio.timeout(GENEROUS_S):
            await began.wait()
            await until_true(lambda: bool(world.api._open))
            await world.api.drain(asyncio.get_running_loop().time() + 0.05)
            answer = await in_flight
    go_on.set()
    assert (answer.status, answer.error_code) == (503, code)


async def test_connections_are_bounded(world: RestWorld, caplog: pytest.LogCaptureFixture) -> None:
    """One more replaces the oldest idle connection, or else a poll; if there is neither, it is closed at once.

    Nothing is logged about this, so that nobody can fill the log.
    """
    gc.collect()  # objects of other tests would log this
    caplog.clear()
    await world.put_shop(check={"mode": "pull"})
    server = HttpServer(world.api, max_connections=2)
    port = await server.start(HOST, 0)
    ask = b"GET /v1/groups HTTP/1.1\r\nHost: h\r\n\r\n"
    poll = b"GET /v1/groups/shop/checks?wait_s=60 HTTP/1.1\r\nHost: h\r\n\r\n"
    opened: list[asyncio.StreamWriter] = []

    async def connected(sent: bytes) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(HOST, port)
        opened.append(writer)
        with contextlib.suppress(ConnectionError):
            writer.write(sent)
        return reader

    async def answer(reader: asyncio.StreamReader) -> bytes:
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(reader.readline(), GENEROUS_S)
        return b""

    try:
        eldest = await connected(ask)
        assert (await answer(eldest)).startswith(b"HTTP/1.1 200")
        await connected(poll)
        await until_true(lambda: bool(world.api._open))
        third = await connected(ask)
        assert (await answer(third)).startswith(b"HTTP/1.1 200")
        assert b"HTTP" not in await asyncio.wait_for(eldest.read(), GENEROUS_S)
        opened[2].write(poll)
        await until_true(lambda: len(world.api._open) == 2)
        queue = world.coordinator._checks.queue("shop")
        for polls in (1, 0):
            await connected(POST + b"Content-Length: 100000\r\n\r\n ")
            await until_true(lambda polls=polls: (queue.polls, len(world.api._open)) == (polls, 2))  # type: ignore[misc]
        assert await answer(await connected(ask)) == b""
        assert [record.getMessage() for record in caplog.records] == []
    finally:
        for writer in opened:
            writer.transport.abort()
        await server.stop()


async def test_a_head_is_bounded_before_it_is_complete() -> None:
    """Nobody knows yet whose request it is, and many connections could fill the memory with theirs."""

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text=f"<{len(await request.read())}>")

    server = HttpServer(handler)
    reader, writer = await asyncio.open_connection(HOST, await server.start(HOST, 0))
    begun = b"POST / HTTP/1.1\r\nHost: h\r\n"
    fields = [b"X-%d: %s\r\n" % (number, b"v" * 7000) for number in range(6)]
    try:
        for _ in range(2):  # a long head and a longer body are allowed, again and again
            writer.write(begun + b"".join(fields[:3]) + b"Content-Length: 90000\r\n\r\n" + b" " * 90_000)
            await asyncio.wait_for(reader.readuntil(b"<90000>"), GENEROUS_S)
        writer.write(begun + b"".join(fields))
        rest = await asyncio.wait_for(reader.read(), GENEROUS_S)
        assert rest.split()[1] == b"400"
        assert b"bad_http" in rest
    finally:
        writer.transport.abort()
        await server.stop()


async def test_an_idle_connection_gives_way_however_many_older_ones_are_busy() -> None:
    """Otherwise a stranger's idle connections would shut everybody out, once many streams are open."""
    go_on = asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/busy":
            await go_on.wait()
        return web.Response()

    server = HttpServer(handler, max_connections=303)
    port = await server.start(HOST, 0)
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        for number in range(303):
            opened.append(await asyncio.open_connection(HOST, port))
            if number < 300:
                opened[-1][1].write(b"GET /busy HTTP/1.1\r\nHost: h\r\n\r\n")
        await until_true(lambda: server._server is not None and len(server._server.idle) == 3)
        opened.append(await asyncio.open_connection(HOST, port))
        opened[-1][1].write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await asyncio.wait_for(opened[-1][0].readline(), GENEROUS_S)).startswith(b"HTTP/1.1 200")
        assert await asyncio.wait_for(opened[300][0].read(), GENEROUS_S) == b"", "the one that was idle longest"
        go_on.set()
        for reader, _ in opened[:300]:
            assert (await asyncio.wait_for(reader.readline(), GENEROUS_S)).startswith(b"HTTP/1.1 200")
    finally:
        for _, writer in opened:
            writer.transport.abort()
        await server.stop()


async def test_polls_whose_clients_have_gone_take_neither_places_nor_checks(world: RestWorld) -> None:
    """As many as the limit come and go; the next poll is served, and gets the first check."""
    policy = {"first_check_after_s": 1, "check_interval_s": 1}
    await world.put_shop(check={"mode": "pull"}, policy=policy)
    poll = b"GET /v1/groups/shop/checks?wait_s=60 HTTP/1.1\r\nHost: h\r\n\r\n"
    most = ServiceLimits().max_waiting_polls
    for _ in range(2):
        opened = [(await asyncio.open_connection(HOST, world.port))[1] for _ in range(most)]
        for writer in opened:
            writer.write(poll)
        await until_true(lambda: len(world.api._open) == most)
        refused = await world.call("GET", "/v1/groups/shop/checks?wait_s=60")
        assert (refused.status, refused.error_code) == (429, "overloaded")
        for writer in opened:
            writer.close()
        await until_true(lambda: not world.api._open)
    name = await world.prepared()
    world.memory.clock.advance(2)
    for shard in world.coordinator.shards.served:
        await world.coordinator.scan(shard, world.memory.clock.now_ms())
    answer = await world.call("GET", "/v1/groups/shop/checks?wait_s=60")
    assert [(check["id"], check["attempt"]) for check in answer.body["checks"]] == [(name, 1)]


async def test_answers_that_are_not_read_are_counted_bounded_and_ended(new_world: NewWorld) -> None:
    """A client that sends requests and does not read loses its connection; then others are answered again."""
    unsent = Unsent(max_bytes=1_000_000, look_every_s=3600)
    world = await new_world(unsent=unsent)
    await world.put_shop()
    name = await world.prepared(*[{"topic": "orders", "value": "v" * 192_000}] * 5)
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect((HOST, world.port))
    try:
        deaf.sendall(b"GET /v1/transactions/%s HTTP/1.1\r\nHost: h\r\n\r\n" % name.encode() * 30)
        await until_true(lambda: unsent.bytes > 0)
        assert unsent.bytes < 1_000_000, "what is pipelined behind it waits"
        refused = await world.show(name)
        assert (refused.status, refused.error_code) == (429, "overloaded")
        assert (await world.call("GET", "/v1/groups")).status == 200, "small answers are always given"
        for _ in range(SLOW_LOOKS):
            unsent._look()
        await until_true(lambda: unsent.bytes == 0)
        assert (await world.show(name)).status == 200
        deaf.settimeout(GENEROUS_S)
        with contextlib.suppress(ConnectionError):
            while await asyncio.to_thread(deaf.recv, 1 << 20):
                pass
    finally:
        deaf.close()


async def test_requests_are_counted_by_operation_and_status(world: RestWorld) -> None:
    await world.prepared()
    await world.call("GET", "/v1/nothing")
    await world.show("nobody")
    assert world.requests.counts == {
        ("putGroup", 201): 1,
        ("prepare", 201): 1,
        ("none", 404): 1,
        ("getTransaction", 404): 1,
    }
