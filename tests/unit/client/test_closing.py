"""After a client is closed, no call waits any longer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from halfway.client import ClientClosedError, Halfway, Message
from tests.support.ids import named_id
from tests.support.waiting import GENEROUS_S

ORDER = Message(topic="orders", key="42", value="paid")
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
