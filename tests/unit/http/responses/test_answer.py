"""An answer in one piece, the connection after it, and large payloads that are encoded in slices."""

import asyncio
import random

import msgspec
import pytest
from aiohttp import web

from halfway.http import responses
from halfway.http.responses import ENCODER, Answer, WholeResponse, is_large, with_messages
from halfway.http.server.server import HttpServer
from halfway.protocol.records import Message, ShownMessage, shown_message

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


KINDS = [b"", b"plain", "é\U0001f600".encode(), b'"\\\n\t', b"\x00\x01", b"\xff\xfe", b"a\xc3"]


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    messages: list[ShownMessage]
    type: str


def payload(chosen: random.Random) -> bytes | None:
    kind = chosen.choice([None, *KINDS])
    return None if kind is None else kind * chosen.choice([1, 2, 5, 40])


def messages(chosen: random.Random) -> tuple[Message, ...]:
    return tuple(
        Message(
            topic=chosen.choice(["orders", "coupons"]),
            key=payload(chosen),
            value=payload(chosen),
            headers=tuple((f"h{number}", payload(chosen)) for number in range(chosen.randrange(4))),
            partition=chosen.choice([None, 3]),
        )
        for _ in range(chosen.randrange(1, 6))
    )


@pytest.mark.parametrize("seed", range(5))
async def test_slices_make_the_same_json(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of 6 bytes: they cut characters, escapes and groups of base64."""
    monkeypatch.setattr(responses, "SLICE_BYTES", 6)
    monkeypatch.setattr(responses, "_PART_BYTES", 1)
    chosen = random.Random(seed)

    async def give_way() -> None:
        return

    for _ in range(200):
        given = messages(chosen)
        whole = ENCODER.encode(Shown(id='"messages":[]', messages=[shown_message(one) for one in given], type="t"))
        pieces = await with_messages(Shown(id='"messages":[]', messages=[], type="t"), given, give_way)
        assert b"".join(pieces) == whole


async def test_the_loop_gets_a_turn_for_each_slice_of_a_large_payload() -> None:
    turns = 0

    async def give_way() -> None:
        nonlocal turns
        turns += 1

    given = (Message(topic="orders", value=b"x" * (4 * 1024 * 1024)),)
    assert is_large(given)
    pieces = await with_messages(Shown(id="a", messages=[], type="t"), given, give_way)
    assert turns >= 2 * len(given[0].value or b"") // responses.SLICE_BYTES
    assert max(map(len, pieces)) <= 2 * responses.SLICE_BYTES


def test_many_small_headers_are_large_together() -> None:
    headers = tuple((f"h{number}", b"v") for number in range(30))
    assert is_large([Message(topic="orders", value=b"v", headers=headers)] * 1000)
    assert not is_large([Message(topic="orders", value=b"v", headers=headers)])
    assert not is_large(None)
