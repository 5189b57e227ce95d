"""Only a verdict is a verdict: any other answer leaves the transaction pending, within bounds."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from halfway.protocol.records import OpKind
from tests.support.coordinator.endpoints import Endpoints, RawConversation, RawEndpoint, http_response
from tests.support.coordinator.rest_client import Rest, message
from tests.support.coordinator.topics import Cluster, InternalTopics
from tests.support.waiting import until_true

TWENTY_MB = 20_000_000
TRIES = 2
PATIENT = {"first_check_after_s": 0.1, "check_interval_s": 0.2, "max_interval_s": 0.4, "max_checks": 1000}
COMMIT = b'{"outcome": "commit"}'

Ugly = Callable[[RawConversation], Awaitable[None]]


def whole(body: bytes, *, status: str = "200 OK", headers: str = "Content-Type: application/json") -> Ugly:
    """Answer with a complete HTTP response."""

    async def serve(conversation: RawConversation) -> None:
        await conversation.send(http_response(body, status=status, headers=headers))

    return serve


def raw(data: bytes, *, then_wait: bool = False) -> Ugly:
    """Send bytes, and close the connection or leave it open."""

    async def serve(conversation: RawConversation) -> None:
        await conversation.send(data)
        if then_wait:
            await conversation.until_closed()

    return serve


async def twenty_megabytes(conversation: RawConversation) -> None:
    """A verdict at the end of 20 MB, with a Content-Length."""
    body = COMMIT[:-1] + b" " * TWENTY_MB + b"}"
    await in_small_pieces(conversation, http_response(body))


async def twenty_megabytes_in_chunks(conversation: RawConversation) -> None:
    """A verdict and then 20 MB of spaces, without a Content-Length."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    first = b"%x\r\n" % len(COMMIT) + COMMIT + b"\r\n"
    await in_small_pieces(conversation, head + first + chunk * (TWENTY_MB // 65536) + b"0\r\n\r\n")


async def in_small_pieces(conversation: RawConversation, data: bytes) -> None:
    """Send with small buffers, so that almost all sent bytes have been read."""
    connection = conversation.writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    for start in range(0, len(data), 65536):
        await conversation.send(data[start : start + 65536])


async def a_body_that_never_ends(conversation: RawConversation) -> None:
    """Single bytes at intervals, forever."""
    await conversation.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
    await conversation.send(b"%x\r\n" % len(COMMIT) + COMMIT + b"\r\n")
    while True:
        await conversation.send(b"1\r\n \r\n")
        await asyncio.sleep(0.05)


async def a_body_cut_short(conversation: RawConversation) -> None:
    """A complete verdict, but fewer bytes than announced."""
    await conversation.send(http_response(COMMIT).replace(b"Content-Length: 21", b"Content-Length: 40"))


async def headers_that_never_end(conversation: RawConversation) -> None:
    await conversation.send(b"HTTP/1.1 200 OK\r\n")
    while True:
        await conversation.send(b"X-Filler: 1\r\n")
        await asyncio.sleep(0.05)


async def a_reset(conversation: RawConversation) -> None:
    connection = conversation.writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    conversation.writer.transport.abort()


UGLY: dict[str, Ugly] = {
    "200 with HTML": whole(b"<html>commit</html>", headers="Content-Type: text/html"),
    "no content type": whole(COMMIT, headers="X-Other: 1"),
    "two outcomes": whole(b'{"outcome": "rollback", "outcome": "commit"}'),
    "empty": whole(b""),
    "nested too deep": whole(b'{"outcome": "commit", "x": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"),
    "202": whole(COMMIT, status="202 Accepted"),
    "404": whole(COMMIT, status="404 Not Found"),
    "500": whole(COMMIT, status="500 Internal Server Error"),
    "compressed": whole(COMMIT, headers="Content-Type: application/json\r\nContent-Encoding: gzip"),
    "20 MB": twenty_megabytes,
    "20 MB in chunks": twenty_megabytes_in_chunks,
    "a body that never ends": a_body_that_never_ends,
    "a body cut short": a_body_cut_short,
    "headers that never end": headers_that_never_end,
    "a header of 1 MB": raw(b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 1_000_000 + b"\r\n\r\n" + COMMIT),
    "not HTTP": raw(b"commit\r\n"),
    "nothing at all": raw(b""),
    "a connection that hangs": raw(b"", then_wait=True),
    "a hang after the headers": raw(http_response(COMMIT)[: -len(COMMIT)], then_wait=True),
    "a reset": a_reset,
}


@pytest.fixture
async def other_service(endpoints: Endpoints) -> RawEndpoint:
    """Start a service that an answer may point to, and that answers every request with commit."""
    return await endpoints.raw(whole(COMMIT))


async def test_whatever_is_no_verdict_resolves_nothing_and_a_verdict_after_it_does(
    rest: Rest, endpoints: Endpoints, other_service: RawEndpoint, cluster: Cluster, internal: InternalTopics, group: str
) -> None:
    """Each bad answer, twice for each transaction, all at once; then the same endpoints answer correctly."""
    (topic,) = await cluster.make_topics("ugly", partitions=1)
    ugly = dict(UGLY)
    for status in ("301 Moved", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"):
        ugly[status] = whole(COMMIT, status=status, headers=f"Location: {other_service.url}")
    ugly["303"] = whole(b"", status="303 See Other", headers=f"Location: {other_service.url}")

    async def suffer(number: int, name: str, serve: Ugly) -> tuple[str, str, RawEndpoint]:
        async def serve_and_forgive_hang_ups(conversation: RawConversation) -> None:
            with suppress(ConnectionError):
                await serve(conversation)

        endpoint = await endpoints.raw(serve_and_forgive_hang_ups)
        own_group = f"{group}-{number}"
        (await rest.put_group(own_group, topics=[topic], urls=[endpoint.url], policy=PATIENT)).expect(201)
        transaction = await rest.prepared(own_group, [message(topic, name)])
        await until_true(lambda: len(endpoint.conversations) > TRIES, what=f"{name}: asked again")
        shown = await rest.show(transaction)
        assert shown["state"] == "prepared", name
        assert shown["last_error"], name
        # The check has ended: connections that hang or keep sending were closed.
        await until_true(lambda: len(endpoint.finished) >= TRIES, what=f"{name}: the connection is closed")
        return name, transaction, endpoint

    suffered = await asyncio.gather(*(suffer(number, *item) for number, item in enumerate(ugly.items())))

    assert await cluster.read(topic) == []
    assert other_service.conversations == [], "a redirect was followed"
    for name, _, endpoint in suffered:
        for conversation in endpoint.finished:
            assert conversation.sent < TWENTY_MB / 2, f"{name}: {conversation.sent} bytes were taken"

    for number, (_, _, endpoint) in enumerate(suffered):
        endpoint.serve(whole(b'{"outcome": "commit"}' if number % 2 else b'{"outcome": "rollback"}'))
    for number, (name, transaction, _) in enumerate(suffered):
        expected = "committed" if number % 2 else "rolled_back"
        shown = await rest.until(transaction, "committed", "rolled_back")
        assert (shown["state"], shown["cause"]) == (expected, "check"), name
    delivered = sorted(record.value or b"" for record in await cluster.read(topic))
    assert delivered == sorted(name.encode() for number, (name, *_) in enumerate(suffered) if number % 2)
    for _, transaction, _ in suffered[:3]:
        assert all(kind is OpKind.CHECKED for kind, _ in (await internal.kinds(transaction))[:TRIES])
