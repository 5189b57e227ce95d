"""What TLS itself allows a client, stalled and many handshakes and messages without content, is bounded."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import uvloop
from aiohttp import web

from halfway.coordinator import tls
from halfway.http.server.server import HttpServer, ServerTls
from tests.support.certificates import Authority
from tests.support.hostile.key_updates import key_updates, shaken_hands

HOST = "127.0.0.1"
ENOUGH_S = 60.0


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=request.param) as made:
        yield made


class Port:
    """A TLS port that answers every request, with clients that never start their handshake."""

    def __init__(self, server: HttpServer, context: ssl.SSLContext) -> None:
        self.server = server
        self.context = context
        self.url = f"https://{HOST}:{server.port}"
        self.silent: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def stall(self, count: int = 1) -> None:
        for _ in range(count):
            self.silent.append(await asyncio.open_connection(HOST, self.server.port))

    async def answer(self) -> str:
        """Send a request over a new connection."""
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ENOUGH_S)) as session,
            session.get(self.url, ssl=self.context) as answer,
        ):
            return await answer.text()

    async def until_closed(self, number: int) -> bytes:
        """Wait until the connection of a silent client is closed, and return what it received."""
        with contextlib.suppress(ConnectionResetError):
            return await asyncio.wait_for(self.silent[number][0].read(), ENOUGH_S)
        return b""

    def is_open(self, number: int) -> bool:
        """Return whether the connection of a silent client is still open."""
        return not self.silent[number][0].at_eof()


async def answer_here(request: web.BaseRequest) -> web.StreamResponse:
    while await request.content.readany():
        pass
    return web.Response(text="here")


@asynccontextmanager
async def start_port(folder: Path, **bounds: float) -> AsyncIterator[Port]:
    authority = Authority(folder, "one")
    certificate, key = authority.sign("own", "CN=localhost", f"IP:{HOST}")
    server = HttpServer(answer_here, **bounds)  # type: ignore[arg-type]
    await server.start(HOST, 0, ServerTls(certificate=certificate, key=key))
    port = Port(server, authority.trusted())
    try:
        yield port
    finally:
        for _, writer in port.silent:
            writer.close()
        await server.stop()


def test_a_handshake_that_stalls_ends_soon(runner: asyncio.Runner, tmp_path: Path) -> None:
    """With no data, or with a part of the handshake."""

    async def story() -> None:
        async with start_port(tmp_path, handshake_s=0.2) as port:
            await port.stall(2)
            port.silent[1][1].write(b"\x16\x03\x01\x02\x00\x01")
            for number in range(2):
                await port.until_closed(number)
            server = port.server._server
            assert server is not None
            server.acceptor._within_s = ENOUGH_S  # a good handshake may take longer on a busy machine
            assert await port.answer() == "here"

    runner.run(story())


def test_handshakes_under_way_count_as_connections(runner: asyncio.Runner, tmp_path: Path) -> None:
    """A quarter of the connections may be in a handshake; the oldest one is ended, and an active client is served."""

    async def story() -> None:
        async with start_port(tmp_path, max_connections=8, handshake_s=ENOUGH_S) as port:
            await port.stall(2)
            assert await port.answer() == "here"
            await port.until_closed(0)
            await port.stall(8)
            for number in range(1, 8):
                await port.until_closed(number)
            assert port.is_open(9)
            assert await port.answer() == "here"

    runner.run(story())


def test_an_idle_connection_gives_way_at_once_though_its_client_says_nothing(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    """TLS would wait for the client's close notification, with the descriptor still open."""

    async def story() -> None:
        async with start_port(tmp_path, max_connections=2) as port:
            mute = [await asyncio.to_thread(connect_silently, port) for _ in range(2)]
            assert await port.answer() == "here"
            assert await asyncio.to_thread(is_closed, mute[0])
            mute[1].close()

    runner.run(story())


def test_a_connection_that_sends_only_messages_of_tls_is_cut_off(
    runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL takes any number of KeyUpdates, 8 us each, and asks nobody. One that sends content goes on."""
    monkeypatch.setattr(tls, "LOOK_EVERY_S", 0.02)

    async def story() -> None:
        async with start_port(tmp_path) as port:
            reader, writer = await asyncio.open_connection(HOST, port.server.port, ssl=port.context)
            writer.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 6400000\r\n\r\n")
            for _ in range(100):
                writer.write(b" " * 64_000)
                await writer.drain()
            assert await asyncio.wait_for(reader.readline(), ENOUGH_S) == b"HTTP/1.1 200 OK\r\n"
            writer.close()
            assert await asyncio.to_thread(is_cut_off, port, tmp_path / "keys")

    runner.run(story())


def test_a_port_that_is_closed_ends_what_is_under_way(runner: asyncio.Runner, tmp_path: Path) -> None:
    async def story() -> None:
        async with start_port(tmp_path, handshake_s=ENOUGH_S) as port:
            await port.stall()
            assert await port.answer() == "here"
            await port.server.stop()
            await port.until_closed(0)
            with pytest.raises(OSError, match=r"."):
                await asyncio.open_connection(HOST, port.server.port)

    runner.run(story())


def test_a_taken_port_is_told(runner: asyncio.Runner, tmp_path: Path) -> None:
    async def story() -> None:
        async with start_port(tmp_path) as port:
            other = HttpServer(answer_here)
            authority = Authority(tmp_path, "two")
            certificate, key = authority.sign("own", "CN=localhost", f"IP:{HOST}")
            with pytest.raises(OSError, match="in use"):
                await other.start(HOST, port.server.port, ServerTls(certificate=certificate, key=key))

    runner.run(story())


def is_cut_off(port: Port, keys: Path) -> bool:
    """Send KeyUpdates on a new connection, and return whether it is closed then."""
    raw = socket.create_connection((HOST, port.server.port), timeout=ENOUGH_S)
    secret = shaken_hands(raw, port.context, keys)
    with contextlib.suppress(ConnectionError):
        raw.sendall(key_updates(secret, 1000))
    return is_closed(raw)


def connect_silently(port: Port) -> socket.socket:
    """Return a TCP connection whose handshake is done, and whose client sends nothing more."""
    raw = socket.create_connection((HOST, port.server.port), timeout=ENOUGH_S)
    made = port.context.wrap_socket(raw, server_hostname=HOST)
    mute = socket.socket(fileno=made.detach())
    mute.settimeout(ENOUGH_S)
    return mute


def is_closed(mute: socket.socket) -> bool:
    """Wait for the end of a TCP connection, and return whether it came."""
    with mute:
        try:
            while mute.recv(4096):
                pass
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
    return True
