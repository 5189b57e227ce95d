"""The network of the chaos harness passes all on, holds it back while it is cut, and loses what it is told to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from halfway.embedded.broker import HOST, pick_port
from tests.chaos.network import Network
from tests.chaos.requests import Api, Fate, Meeting
from tests.support.waiting import GENEROUS_S

NOTHING_COMES_S = 0.3


def request(api: int, text: bytes) -> bytes:
    """Give a request as it stands on the wire, as far as it is looked at."""
    body = api.to_bytes(2) + b"\0\0" + text
    return len(body).to_bytes(4) + body


ONE, TWO, THREE = request(3, b"one"), request(3, b"two"), request(18, b"three")


class Line:
    """A connection through a network to a server that sends back what it gets."""

    def __init__(self, network: Network, port: int, target: int) -> None:
        self.network = network
        self.port = port
        self.target = target

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(HOST, self.port)


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1000):
                writer.write(data)
        await _close(writer)

    server = await asyncio.start_server(echo, HOST, 0)
    port = pick_port()
    target = server.sockets[0].getsockname()[1]
    network = Network({port: target})
    await network.start()
    yield Line(network, port, target)
    await network.stop()
    server.close()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait_for(task, GENEROUS_S)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def test_what_is_sent_during_a_cut_arrives_after_it(line: Line) -> None:
    """On connections from before it and on one that was made meanwhile; nothing arrives earlier."""
    before, writer = await line.connect()
    writer.write(ONE)
    assert await before.readexactly(len(ONE)) == ONE
    line.network.cut()
    writer.write(TWO)
    meanwhile, second = await line.connect()
    second.write(THREE)
    for reader in (before, meanwhile):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(len(ONE)), NOTHING_COMES_S)
    assert line.network.held > 0
    line.network.mend()
    assert await before.readexactly(len(ONE)) == TWO
    assert await meanwhile.readexactly(len(THREE)) == THREE
    await _close(writer)
    await _close(second)


async def test_a_slow_network_keeps_the_order(line: Line) -> None:
    """Also of what is sent right when it becomes quick again."""
    reader, writer = await line.connect()
    line.network.delay_s = 0.1
    expected = b""
    for number in range(20):
        data = request(3, b"%02d" % number)
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
    writer.write(ONE)
    await reader.readexactly(len(ONE))
    line.network.reset()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    await _close(writer)


async def test_a_request_is_passed_on_however_it_arrives(line: Line) -> None:
    """In pieces, or several at once."""
    reader, writer = await line.connect()
    for piece in (ONE[:3], ONE[3:7], ONE[7:] + TWO + THREE[:5], THREE[5:]):
        writer.write(piece)
        await asyncio.sleep(0.01)
    assert await reader.readexactly(len(ONE + TWO + THREE)) == ONE + TWO + THREE
    await _close(writer)


async def test_requests_of_one_kind_hang_with_what_comes_behind_them(line: Line) -> None:
    """On their connection, until they are let go; others pass, and those beyond the number that was named."""
    line.network.meet(Meeting(api=Api.END_TXN, fate=Fate.HANG, times=1, containing=b"owners"))
    reader, writer = await line.connect()
    other, passes = request(Api.END_TXN, b"others"), request(Api.END_TXN, b"the owners")
    writer.write(other + passes + ONE)
    assert await reader.readexactly(len(other)) == other
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readexactly(1), NOTHING_COMES_S)
    elsewhere, second = await line.connect()
    second.write(TWO)
    assert await elsewhere.readexactly(len(TWO)) == TWO
    second.write(passes)
    assert await elsewhere.readexactly(len(passes)) == passes
    assert line.network.met == 1
    line.network.let_go()
    assert await reader.readexactly(len(passes + ONE)) == passes + ONE
    writer.write(passes)
    assert await reader.readexactly(len(passes)) == passes
    await _close(writer)
    await _close(second)


@pytest.mark.parametrize("fate", [Fate.LOSE, Fate.LOSE_ANSWER])
async def test_a_connection_breaks_at_a_request_of_one_kind(line: Line, fate: Fate) -> None:
    """What was answered before it has arrived."""
    line.network.meet(Meeting(api=Api.ADD_PARTITIONS_TO_TXN, fate=fate))
    reader, writer = await line.connect()
    writer.write(ONE)
    assert await reader.readexactly(len(ONE)) == ONE
    writer.write(request(Api.ADD_PARTITIONS_TO_TXN, b"x"))
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    await _close(writer)


async def test_requests_of_one_kind_are_late(line: Line) -> None:
    """And keep their order."""
    line.network.meet(Meeting(api=Api.FETCH, fate=Fate.DELAY, seconds=1))
    reader, writer = await line.connect()
    late = request(Api.FETCH, b"x")
    writer.write(late + ONE)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readexactly(1), 0.1)
    assert await reader.readexactly(len(late + ONE)) == late + ONE
    await _close(writer)


async def test_one_of_several_brokers_is_cut_off(line: Line) -> None:
    """Nothing arrives from and at that one."""
    line.network.cut(line.port + 1 if line.target != line.port + 1 else line.port)
    reader, writer = await line.connect()
    writer.write(ONE)
    assert await reader.readexactly(len(ONE)) == ONE
    line.network.cut(line.target)
    writer.write(TWO)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readexactly(1), NOTHING_COMES_S)
    line.network.mend()
    assert await reader.readexactly(len(TWO)) == TWO
    await _close(writer)


def test_what_is_arranged_is_read_again_from_its_line() -> None:
    """The network is a process of its own."""
    meeting = Meeting(api=Api.JOIN_GROUP, fate=Fate.HANG, seconds=1.5, share=0.25, times=3, containing=b"a b")
    assert Meeting.of_words(*meeting.line().split()) == meeting
    assert Meeting.of_words(*Meeting(api=Api.FETCH, fate=Fate.LOSE).line().split()) == Meeting(
        api=Api.FETCH, fate=Fate.LOSE
    )
