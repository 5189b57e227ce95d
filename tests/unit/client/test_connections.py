"""Connections that die silently, and calls that wait on one when the client is closed."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from halfway.client import ClientClosedError, Halfway, Message
from tests.support.certificates import Authority
from tests.support.client.silent import firewall_before
from tests.support.hostile.key_updates import arriving_below_tls
from tests.support.ids import named_id
from tests.support.loop_time import LoopTime
from tests.support.rest.client import RestWorld
from tests.support.waiting import GENEROUS_S, until_true

ORDER = Message(topic="orders", key="42", value="paid")
KEPT = 5


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("call", ["prepare", "end", "show"])
async def test_a_call_is_repeated_on_a_new_connection(
    world: RestWorld, call: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of the other connections of that time is tried either."""
    monkeypatch.setattr("halfway.client.calls.group.ATTEMPT_S", 1.0)
    name = await world.prepared(id=named_id("before"))
    async with (
        firewall_before(world.url) as firewall,
        Halfway(firewall.url, "shop", prepare_timeout_s=GENEROUS_S, end_timeout_s=GENEROUS_S, stream=stream) as client,
    ):
        if stream:
            await client.prepare([ORDER], id=named_id("first"))
        await asyncio.gather(*(client.show(name) for _ in range(KEPT)))
        assert firewall.accepted >= KEPT
        firewall.forget()
        match call:
            case "prepare":
                await client.prepare([ORDER], id=named_id("after"))
            case "end":
                await client.end(name, "commit")
            case _:
                await client.show(name)
        assert firewall.used_after == 1


async def test_a_stream_that_nobody_uses_is_asked_whether_it_lives(world: RestWorld) -> None:
    """A ping finds the death of the connection, so that the next call does not have to."""
    async with firewall_before(world.url) as firewall, Halfway(firewall.url, "shop", stream=True) as client:
        await client.prepare([ORDER], id=named_id("first"))
        time = LoopTime()
        for _ in range(10):  # every answer to a ping keeps it
            answers = firewall.answers
            time.advance(2.1)
            await until_true(lambda answers=answers: firewall.answers > answers, what="an answer")  # type: ignore[misc]
            await asyncio.sleep(0.05)  # it is passed on, and is read in the next turn of the loop
        assert len(client._shared._streams) == 1
        firewall.forget()

        def is_over() -> bool:
            time.advance(0.5)
            return not client._shared._streams

        await until_true(is_over, what="the stream is given up")
        await client.prepare([ORDER], id=named_id("second"))
        assert firewall.accepted == 2


ORDER_ID = named_id("order-42")
BUSY = b"HTTP/1.1 503 Busy\r\nRetry-After: 1000\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


Call = Callable[[Halfway], Awaitable[object]]


class Silent:
    """A server that reads requests, and answers each with `answer` if that is set."""

    def __init__(self) -> None:
        self.port = 0
        self.answer = b""
        self.asked = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(1 << 16):
                self.asked.set()
                writer.write(self.answer)
        finally:
            writer.close()


@pytest.fixture
async def silent() -> AsyncIterator[Silent]:
    found = Silent()
    async with await asyncio.start_server(found.serve, "127.0.0.1", 0) as server:
        found.port = server.sockets[0].getsockname()[1]
        yield found


async def prepare(client: Halfway) -> None:
    await client.prepare([ORDER], id=ORDER_ID)


async def end(client: Halfway) -> None:
    await client.end(ORDER_ID, "commit")


async def show(client: Halfway) -> None:
    await client.show(ORDER_ID)


@asynccontextmanager
async def closing(url: str, *calls: Call, connections: int = 16) -> AsyncIterator[None]:
    """Start calls with a long deadline; at the end of the block, close the client and expect the calls to end."""
    client = Halfway(
        url, "shop", prepare_timeout_s=2 * GENEROUS_S, end_timeout_s=2 * GENEROUS_S, connections=connections
    )
    async with client:
        waiting = asyncio.gather(*(call(client) for call in calls), return_exceptions=True)
        yield
    async with asyncio.timeout(GENEROUS_S):
        errors = await waiting
    assert [type(error) for error in errors] == [ClientClosedError] * len(calls)


@pytest.mark.parametrize("turns", range(4))
async def test_a_call_that_has_just_begun_ends(silent: Silent, turns: int) -> None:
    async with closing(f"http://127.0.0.1:{silent.port}", prepare, end, show):
        for _ in range(turns):
            await asyncio.sleep(0)


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_call_without_an_answer_ends(silent: Silent, scheme: str) -> None:
    """Over TLS, no call has a connection: the server never finishes a handshake."""
    async with closing(f"{scheme}://127.0.0.1:{silent.port}", prepare, end, show):
        await silent.asked.wait()


async def test_a_call_that_waits_for_a_connection_ends(silent: Silent) -> None:
    async with closing(f"http://127.0.0.1:{silent.port}", show, show, prepare, connections=1):
        await silent.asked.wait()


async def test_a_call_that_is_to_be_tried_again_later_ends(silent: Silent) -> None:
    silent.answer = BUSY
    async with closing(f"http://127.0.0.1:{silent.port}", show, prepare, connections=1):
        await silent.asked.wait()


async def test_a_coordinator_that_hangs_keeps_no_connection_open(tmp_path: Path) -> None:
    """TLS would wait 30 s for its close: a busy service would soon have no descriptors left."""
    authority = Authority(tmp_path, "one")
    served = authority.server("IP:127.0.0.1")
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"https://127.0.0.1:{listener.getsockname()[1]}"
    asked = threading.Event()
    hanging = asyncio.create_task(asyncio.to_thread(arriving_below_tls, listener, served, b"", asked))
    async with Halfway(url, "shop", tls=authority.trusted(), prepare_timeout_s=GENEROUS_S) as client:
        preparing = asyncio.create_task(prepare(client))
        await until_true(asked.is_set)
        preparing.cancel()
        assert await asyncio.wait_for(hanging, GENEROUS_S) == b""
