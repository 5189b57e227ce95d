"""Which bodies are accepted: their size, their type, their speed, and their total size."""

import asyncio
import contextlib

import pytest
from structlog.testing import capture_logs

from halfway.http.requests import admission
from halfway.http.requests.admission import ApiLimits
from halfway.http.server.server import HttpServer
from tests.support.loop_time import LoopTime
from tests.support.rest.client import HOST, RestWorld
from tests.support.rest.raw import BODY, POST, problem_of
from tests.support.waiting import GENEROUS_S, until_true
from tests.unit.http.conftest import NewWorld


@pytest.fixture
def short_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server close a connection soon whose request it has not read to its end."""
    monkeypatch.setattr("halfway.http.server.server.LINGER_S", 0.1)


@pytest.mark.usefixtures("short_lingering")
async def test_a_body_over_the_limit_is_413(new_world: NewWorld) -> None:
    """With or without an announced length; a body of exactly the limit is read."""
    world = await new_world(ApiLimits(max_body_bytes=1000))
    await world.put_shop()
    at_the_limit = BODY + b" " * (1000 - len(BODY))
    assert (await world.call("POST", "/v1/transactions", raw=at_the_limit)).status == 201
    answer = await world.call("POST", "/v1/transactions", raw=at_the_limit + b" ")
    assert (answer.status, answer.error_code, answer.body["limit"]) == (413, "body_too_large", 1000)

    chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"200\r\n" + b" " * 512 + b"\r\n200\r\n" + b" " * 512
    status, problem = problem_of(await world.send(chunked))
    assert (status, problem["error_code"]) == (413, "body_too_large")


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
async def test_another_media_type_is_415(world: RestWorld, media_type: str) -> None:
    answer = await world.call("POST", "/v1/transactions", raw=BODY, headers={"Content-Type": media_type})
    assert (answer.status, answer.error_code) == (415, "unsupported_media_type")


async def test_a_body_without_a_media_type_is_415(world: RestWorld) -> None:
    head = b"POST /v1/transactions HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    status, problem = problem_of(await world.send(head % len(BODY) + BODY))
    assert (status, problem["error_code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("media_type", ["application/json; charset=utf-8", "Application/JSON", "application/json"])
async def test_json_is_taken_with_parameters_and_in_any_case(world: RestWorld, media_type: str) -> None:
    answer = await world.call("POST", "/v1/transactions", raw=BODY, headers={"Content-Type": media_type})
    assert answer.status == 201


async def test_a_compressed_body_is_415(world: RestWorld) -> None:
    answer = await world.call("POST", "/v1/transactions", raw=BODY, headers={"Content-Encoding": "gzip"})
    assert (answer.status, answer.error_code) == (415, "unsupported_media_type")


async def test_bodies_that_are_only_announced_hold_up_nobody(new_world: NewWorld) -> None:
    """Neither the announced length nor the start of a body counts."""
    world = await new_world(ApiLimits(max_requests=2, max_body_bytes=100_000, max_body_bytes_in_flight=100_000))
    await world.put_shop()
    silent = [(await asyncio.open_connection(HOST, world.port))[1] for _ in range(40)]
    try:
        for writer in silent:
            writer.write(POST + b"Content-Length: 100000\r\n\r\n")
        await until_true(lambda: len(world.api._open) == len(silent))
        assert world.api.in_flight.bytes == 0
        large = BODY + b" " * (90_000 - len(BODY))
        for body in (BODY, large):
            assert (await world.call("POST", "/v1/transactions", raw=body)).status == 201
        assert (await world.call("GET", "/v1/groups")).status == 200
    finally:
        for writer in silent:
            writer.transport.abort()


async def test_bodies_in_flight_are_bounded_together(new_world: NewWorld) -> None:
    """By the bytes received; small bodies and calls without a body are never refused for it."""
    world = await new_world(ApiLimits(max_body_bytes=100_000, max_body_bytes_in_flight=100_000))
    await world.put_shop()
    slow = [(await asyncio.open_connection(HOST, world.port))[1] for _ in range(2)]
    try:
        for number, writer in enumerate(slow, 1):
            writer.write(POST + b"Content-Length: 60000\r\n\r\n" + b" " * 49_999)
            await until_true(lambda number=number: world.api.in_flight.bytes == number * 49_999)  # type: ignore[misc]
        large = await world.call("POST", "/v1/transactions", raw=BODY + b" " * 20_000)
        assert (large.status, large.error_code) == (429, "overloaded")
        assert (await world.call("POST", "/v1/transactions", raw=BODY)).status == 201
        assert (await world.call("GET", "/v1/groups")).status == 200
    finally:
        for writer in slow:
            writer.transport.abort()
    await until_true(lambda: world.api.in_flight.bytes == 0)


async def test_a_body_that_hardly_comes_is_408_long_before_the_request_has_no_more_time(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MIN_BYTES_IN_S", 0.2)
    world = await new_world(ApiLimits(request_timeout_s=1000))
    reader, writer = await asyncio.open_connection(HOST, world.port)

    async def trickle() -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
            while True:
                writer.write(b"1\r\n \r\n")
                await asyncio.sleep(0.02)

    trickling = asyncio.create_task(trickle())
    try:
        async with asyncio.timeout(GENEROUS_S):
            head = await reader.readuntil(b"\r\n\r\n")
    finally:
        trickling.cancel()
        writer.transport.abort()
    assert head.startswith(b"HTTP/1.1 408 ")
    await until_true(lambda: world.api.in_flight.bytes == 0)


async def test_a_large_body_that_keeps_coming_is_read(new_world: NewWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is slow, but fast enough: it takes longer than the time limit for its first part."""
    monkeypatch.setattr(admission, "MIN_BYTES_IN_S", 100.0)
    world = await new_world(ApiLimits(request_timeout_s=1000))
    await world.put_shop()
    time = LoopTime()
    reader, writer = await asyncio.open_connection(HOST, world.port)
    try:
        whole = BODY + b" " * (4 * admission.MIN_BYTES)
        writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(whole))
        for at in range(0, len(whole), admission.MIN_BYTES):
            await until_true(lambda at=at: world.api.in_flight.bytes == at)  # type: ignore[misc]
            time.advance(50)
            writer.write(whole[at : at + admission.MIN_BYTES])
        async with asyncio.timeout(GENEROUS_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 201 ")
    finally:
        writer.transport.abort()


@pytest.mark.usefixtures("short_lingering")
async def test_a_body_that_does_not_come_is_408(new_world: NewWorld) -> None:
    world = await new_world(ApiLimits(request_timeout_s=0.2))
    status, problem = problem_of(await world.send(POST + b"Connection: close\r\nContent-Length: 100\r\n\r\n{"))
    assert (status, problem["error_code"]) == (408, "body_timeout")


async def test_a_client_that_asks_first_is_told_to_go_on(world: RestWorld) -> None:
    reader, writer = await asyncio.open_connection(HOST, world.port)
    try:
        head = POST + b"Connection: close\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(BODY))
        async with asyncio.timeout(GENEROUS_S):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(BODY)
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 201 ")
    finally:
        writer.transport.abort()


async def test_a_client_that_goes_in_the_middle_of_its_body_is_no_fault(world: RestWorld) -> None:
    """Nothing is logged as an error: there is nobody to answer, and nothing was done."""
    server = HttpServer(world.api)
    port = await server.start(HOST, 0)
    try:
        with capture_logs() as logged:
            _, writer = await asyncio.open_connection(HOST, port)
            writer.write(POST + b"Content-Length: 1000\r\n\r\n" + BODY)
            await until_true(lambda: world.api._open)
            writer.close()
            await until_true(lambda: server._server is None or not server._server.connections)
    finally:
        await server.stop()
    assert [entry for entry in logged if entry["log_level"] == "error"] == []
