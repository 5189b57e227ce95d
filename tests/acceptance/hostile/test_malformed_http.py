"""Paths, parameters, headers and bytes that no client should send: a problem for each, and no other client waits."""

from collections.abc import AsyncIterator

import pytest

from tests.support.coordinator.rest_client import QUIET, Answer, Rest, message
from tests.support.hostile.malformed import JSON, raw, refused


@pytest.fixture
async def ready(rest: Rest, group: str, topic: str) -> str:
    """Prepare a transaction of a registered group."""
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    return await rest.prepared(group, [message(topic)])


LINE = b"POST /v1/transactions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BAD_HTTP = {
    "a long request line": b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a long header": b"GET /v1/groups HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 20_000 + b"\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a chunk without a size": LINE + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a chunk with a negative size": LINE + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}\r\n0\r\n\r\n",
    "two lengths": LINE + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a length that is no number": LINE + b"Content-Length: two\r\n\r\n{}",
    "a negative length": LINE + b"Content-Length: -2\r\n\r\n{}",
    "a length and chunks": LINE + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a header without a colon": b"GET /v1/groups HTTP/1.1\r\nHost h\r\n\r\n",
    "a header with a NUL": b"GET /v1/groups HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
}


async def test_what_is_no_http_is_400(rest: Rest) -> None:
    for name, sent in BAD_HTTP.items():
        status, problem = await raw(rest, sent)
        assert status == 400, (name, problem)
        assert problem["error_code"] in ("bad_http", "malformed_json"), (name, problem)


async def test_a_chunked_body_is_read_like_any_other(rest: Rest, ready: str, group: str, topic: str) -> None:
    """In many small chunks; too many bytes are 413 without a Content-Length."""

    async def chunks(body: bytes, size: int) -> AsyncIterator[bytes]:
        for at in range(0, len(body), size):
            yield body[at : at + size]

    async def post(body: bytes, size: int) -> Answer:
        async with rest.session.post(
            f"{rest.url}/v1/transactions", data=chunks(body, size), headers={"Content-Type": JSON}
        ) as response:
            return Answer(status=response.status, body=await response.json(content_type=None), headers=response.headers)

    good = b'{"group": "%s", "messages": [{"topic": "%s", "value": "v"}]}' % (group.encode(), topic.encode())
    assert (await post(good, 3)).status == 201
    refused(await post(good[:-2], 3), 400, "malformed_json")
    refused(await post(b" " * (8 * 1024 * 1024 + 1), 65_536), 413, "body_too_large")
