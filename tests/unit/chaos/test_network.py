"""The network of the chaos harness passes everything on, holds it back while it is cut, and loses nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from halfway.embedded.ports import HOST, pick_port
from tests.chaos.network import Network

NOTHING_COMES_S = 0.3


class Line:
    """A connection through a network to a server that sends back what it gets."""

    def __init__(self, network: Network, port: int) -> None:
        self.network = network
        self._port = port

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(HOST, self._port)


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1000):
                writer.write(data)
        await _close(writer)

    server = await asyncio.start_server(echo, HOST, 0)
    port = pick_port()
    network = Network({port: server.sockets[0].getsockname()[1]})
    await network.start()
    yield Line(network, port)
    await network.stop()
    server.close()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait_for(task, 5)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def test_what_is_sent_during_a_cut_arrives_after_it(line: Line) -> None:
    """On connections from before it and on one that was made meanwhile; nothing arrives earlier."""
    before, writer = await line.connect()
    writer.write(b"one")
    assert await before.readexactly(3) == b"one"
    line.network.cut()
    writer.write(b"two")
    meanwhile, second = await line.connect()
    second.write(b"three")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(before.readexactly(3), NOTHING_COMES_S)
    assert line.network.held > 0
    line.network.mend()
    assert await before.readexactly(3) == b"two"
    assert await meanwhile.readexactly(5) == b"three"
    await _close(writer)
    await _close(second)


async def test_a_slow_network_keeps_the_order(line: Line) -> None:
    """Also of what is sent right when it becomes quick again."""
    reader, writer = await line.connect()
    line.network.delay_s = 0.1
    expected = b""
    for number in range(20):
        data = b"%02d" % number
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(0.01)
        expected += data
        if number == 10:
            line.network.delay_s = 0.0
    assert await reader.readexactly(len(expected)) == expected
    await _close(writer)


async def test_a_reset_breaks_every_connection(line: Line) -> None:
    reader, writer = await line.connect()
    writer.write(b"one")
    await reader.readexactly(3)
    line.network.reset()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    await _close(writer)
