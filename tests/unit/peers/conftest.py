"""Real connections between instances."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from halfway.coordinator.ports import OwnerHint
from halfway.http.server.server import HttpServer
from halfway.peers import HttpPeers
from tests.support.peers.owner import HOST, SECRET, Serve
from tests.support.waiting import GENEROUS_S


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect in time on any machine."""
    monkeypatch.setattr("halfway.peers._CONNECT_S", GENEROUS_S)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def serve(stack: AsyncExitStack) -> Serve:
    """Make a handler listen on a free port, as the owner `one`."""

    async def started(handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> OwnerHint:
        server = HttpServer(handler)
        stack.push_async_callback(server.stop)
        port = await server.start(HOST, 0)
        return OwnerHint(incarnation="one", url=f"http://{HOST}:{port}")

    return started


@pytest.fixture
async def peers(stack: AsyncExitStack) -> HttpPeers:
    return await stack.enter_async_context(HttpPeers(SECRET))
