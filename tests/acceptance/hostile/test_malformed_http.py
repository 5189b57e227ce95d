"""Paths, parameters, headers and bytes that no client should send: a problem for each, and no other client waits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from yarl import URL

from tests.support.coordinator.by_hand import total
from tests.support.coordinator.process import NewCoordinator
from tests.support.coordinator.rest_client import QUIET, Answer, Connect, Rest, message
from tests.support.hostile.malformed import JSON, raw, refused, send
from tests.support.waiting import eventually


@pytest.fixture
async def ready(rest: Rest, group: str, topic: str) -> str:
    """Prepare a transaction of a registered group."""
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)
    return await rest.prepared(group, [message(topic)])


WRONG_NAMES = [
    *("a%2Fb", "%00", "%FF", "%20", "a%0Ab", "%C3%A4", "a,b", "%E2%80%AE", "'%20OR%201=1", "%252F", "{id}"),
    "x" * 7_000,
]


async def test_an_illegal_id_or_group_in_the_path_is_422(rest: Rest) -> None:
    end = b'{"outcome": "commit"}'
    calls = {"": ("GET", None), "/end": ("POST", end), "/check": ("POST", None), "/resume": ("POST", None)}
    for name in WRONG_NAMES:
        for suffix, (method, body) in calls.items():
            refused(await send(rest, method, f"/v1/transactions/{name}{suffix}", body), 422, "invalid_request", "id")
        for method in ("GET", "DELETE"):
            refused(await send(rest, method, f"/v1/groups/{name}"), 422, "invalid_request", "group")


async def test_an_id_of_10_000_characters_or_with_slashes_in_the_path(rest: Rest) -> None:
    """The first is longer than a request line may be, the second is an unknown path."""
    refused(await send(rest, "GET", "/v1/transactions/a/b"), 404, "unknown_path")
    refused(await send(rest, "GET", "/v1/transactions//"), 404, "unknown_path")
    refused(await send(rest, "GET", "/v1/transactions/../groups"), 404, "unknown_path")
    long = b"GET /v1/transactions/" + b"x" * 10_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert (await raw(rest, long))[0] == 400


WRONG_QUERIES = {
    "limit=-1": "limit",
    "limit=0": "limit",
    "limit=1001": "limit",
    "limit=1" + "0" * 400: "limit",
    "limit=ten": "limit",
    "limit=1.5": "limit",
    "limit=NaN": "limit",
    "limit=": "limit",
    "state=done": "state",
    "state=": "state",
    "group=a%2Fb": "group",
    "topic=a%20b": "topic",
    "key=" + "k" * 4097: "key",
    "cursor=": "cursor",
    "cursor=%25%25": "cursor",
    "cursor=AAAA": "cursor",
    "cursor=W1tbW1tbW1s": "cursor",
    "cursor=WzEsMl0": "cursor",
    "cursor=" + "A" * 1025: "cursor",
    "offset=5": "offset",
    "limit=5&limit=6": "limit",
    "%FF=1": "\ufffd",
}


WRONG_POLLS = [
    "wait_s=-1",
    "wait_s=61",
    "wait_s=NaN",
    "wait_s=inf",
    "wait_s=1e400",
    "max=0",
    "max=-5",
    "max=1001",
    "max=x",
]


async def test_a_wrong_parameter_is_named(rest: Rest, ready: str, group: str) -> None:
    for query, field in WRONG_QUERIES.items():
        refused(await send(rest, "GET", f"/v1/transactions?{query}"), 422, "invalid_request", field)
    for query in WRONG_POLLS:
        answer = await send(rest, "GET", f"/v1/groups/{group}/checks?{query}")
        refused(answer, 422, "invalid_request", query.partition("=")[0])


WRONG_TYPES = [
    {"Content-Type": "text/plain"},
    {"Content-Type": ""},
    {"Content-Type": "application/json-patch+json"},
    {"Content-Type": "application/x-www-form-urlencoded"},
    {"Content-Type": "multipart/form-data; boundary=x"},
    {"Content-Encoding": "gzip"},
    {"Content-Encoding": "br, identity"},
]


async def test_another_type_or_encoding_of_the_body_is_415(rest: Rest, ready: str) -> None:
    for headers in WRONG_TYPES:
        for path in ("/v1/transactions", f"/v1/transactions/{ready}/end", "/v1/batch"):
            answer = await send(rest, "POST", path, b'{"outcome": "commit"}', headers)
            refused(answer, 415, "unsupported_media_type")
    assert (await rest.show(ready))["state"] == "prepared"


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


async def test_a_body_that_comes_too_slowly_is_408_and_holds_up_nobody(
    new_coordinator: NewCoordinator, connect: Connect, topic: str, group: str
) -> None:
    """Fifty clients send single bytes; the others are served in the meantime, and resources are released."""
    coordinator = new_coordinator({"HALFWAY_REQUEST_TIMEOUT_S": "10"})
    coordinator.start()
    rest = connect(coordinator)
    (await rest.put_group(group, topics=[topic], policy=QUIET)).expect(201)

    async def slow() -> int:
        url = URL(rest.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        try:
            writer.write(LINE + b"Content-Length: 100000\r\n\r\n")
            dripping = asyncio.create_task(drip(writer))
            try:
                async with asyncio.timeout(120):
                    return int((await reader.readline()).split()[1])
            finally:
                dripping.cancel()
        finally:
            writer.close()

    slow_ones = asyncio.gather(*(slow() for _ in range(50)))
    await rest.commit(await rest.prepared(group, [message(topic, "meanwhile")]))
    assert set(await slow_ones) == {408}
    await eventually(lambda: total(rest, "halfway_requests_in_flight"), lambda count: count == 0)


async def drip(writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.2)
