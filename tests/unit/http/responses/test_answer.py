"""An answer that is written in one piece: its content, and the connection after it."""

import asyncio

import pytest
from aiohttp import web

from halfway.http.responses import Answer, WholeResponse
from halfway.http.server.server import HttpServer

HOST = "127.0.0.1"


async def exchange(request: str, response: WholeResponse) -> tuple[list[str], bytes, bool]:
    """Send a request; return the header lines of the answer, its body, and whether the connection stays open."""

    async def handle(_: web.BaseRequest) -> web.StreamResponse:
        return response

    server = HttpServer(handle)
    reader, writer = await asyncio.open_connection(HOST, await server.start(HOST, 0))
    try:
        writer.write(request.encode())
        async with asyncio.timeout(30):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
            length = next((int(line.split()[1]) for line in head if line.startswith("Content-Length")), 0)
            body = b"" if request.startswith("HEAD") else await reader.readexactly(length)
            writer.write(request.encode())  # there would be a second answer if the connection were open
            stays = "Connection: close" not in head
            assert stays or await reader.read() == b""
    finally:
        writer.transport.abort()
        await server.stop()
    return head, body, stays


async def test_an_answer_has_its_status_its_headers_and_its_body() -> None:
    head, body, stays = await exchange(
        "POST / HTTP/1.1\r\nHost: h\r\n\r\n", WholeResponse(Answer(status=201, body=b"{}"), ("X-Request-Id", "a-1"))
    )
    assert head[0] == "HTTP/1.1 201 Created"
    assert {"X-Request-Id: a-1", "Content-Length: 2"} < set(head)
    assert (body, stays) == (b"{}", True)


async def test_no_content_has_no_length_and_head_has_no_body() -> None:
    head, _, stays = await exchange(
        "DELETE / HTTP/1.1\r\nHost: h\r\n\r\n", WholeResponse(Answer(status=204, body=None))
    )
    assert stays
    assert not [line for line in head if line.startswith("Content-Length")]
    head, _, stays = await exchange(
        "HEAD / HTTP/1.1\r\nHost: h\r\n\r\n", WholeResponse(Answer(status=200, body=b"12345"))
    )
    assert "Content-Length: 5" in head
    assert stays


@pytest.mark.parametrize(
    "request_head", ["GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", "GET / HTTP/1.0\r\n\r\n"]
)
async def test_the_connection_is_closed_if_the_client_or_the_server_wants_it(request_head: str) -> None:
    assert not (await exchange(request_head, WholeResponse(Answer(status=200, body=b"1"))))[2]
    closing = WholeResponse(Answer(status=200, body=b"1"))
    closing.force_close()
    assert not (await exchange("GET / HTTP/1.1\r\nHost: h\r\n\r\n", closing))[2]


async def test_a_client_of_http_1_0_may_keep_its_connection() -> None:
    head, _, _ = await exchange(
        "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", WholeResponse(Answer(status=200, body=b"1"))
    )
    assert "Connection: keep-alive" in head
