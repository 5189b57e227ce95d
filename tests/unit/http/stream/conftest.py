"""Streams over a coordinator with its ports in memory."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any, Protocol

import aiohttp
import pytest

from tests.support.coordinator.stream_client import SUBPROTOCOL, StreamClient
from tests.support.rest.client import RestWorld
from tests.support.waiting import GENEROUS_S

HANDSHAKE = (
    b"GET /v1/stream HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: halfway.stream.v1\r\n\r\n"
)


class Opens(Protocol):
    """Opens a stream, which is closed at the end of the test."""

    async def __call__(self, world: RestWorld, headers: Mapping[str, str] | None = None) -> StreamClient: ...


@pytest.fixture
async def opened() -> AsyncIterator[Opens]:
    async with AsyncExitStack() as stack:

        async def open_stream(world: RestWorld, headers: Mapping[str, str] | None = None) -> StreamClient:
            client = await StreamClient.connect(world.session, world.url, headers)
            stack.push_async_callback(client.close)
            return client

        yield open_stream


@pytest.fixture
async def stream(world: RestWorld, opened: Opens) -> StreamClient:
    """Provide a stream of a coordinator with the group `shop`."""
    return await opened(world)


class Raw:
    """A WebSocket that can send any frame, and the received frames."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse[Any]) -> None:
        self.socket = socket

    async def frame(self) -> dict[str, Any]:
        async with asyncio.timeout(GENEROUS_S):
            found: dict[str, Any] = await self.socket.receive_json()
            return found

    async def send(self, text: str) -> None:
        await self.socket.send_str(text)

    async def end(self) -> tuple[dict[str, Any] | None, int | None]:
        """Read to the end, and return the server's problem and its close code."""
        problem = None
        async with asyncio.timeout(GENEROUS_S):
            while (message := await self.socket.receive()).type is aiohttp.WSMsgType.TEXT:
                problem = message.json().get("problem", problem)
        return problem, self.socket.close_code


class Connects(Protocol):
    """Opens a WebSocket and reads its first frame."""

    async def __call__(self, world: RestWorld, **options: Any) -> Raw: ...


@pytest.fixture
async def connected() -> AsyncIterator[Connects]:
    async with AsyncExitStack() as stack:

        async def connect(world: RestWorld, **options: Any) -> Raw:
            url = f"{world.url}/v1/stream"
            socket = await stack.enter_async_context(
                world.session.ws_connect(url, protocols=(SUBPROTOCOL,), max_msg_size=0, **options)
            )
            raw = Raw(socket)
            assert set(await raw.frame()) == {"hello", "shards"}
            return raw

        yield connect


@pytest.fixture
async def raw(world: RestWorld, connected: Connects) -> Raw:
    return await connected(world)
