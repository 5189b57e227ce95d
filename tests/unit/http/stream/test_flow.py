"""Neither side can fill the other's memory: with operations in flight, with arriving data, or with unread data."""

import asyncio
import json
import socket
from functools import partial

import aiohttp
import pytest

from halfway.coordinator.requests import ServiceLimits
from halfway.http.requests.admission import ApiLimits
from halfway.http.responses import Unsent
from halfway.protocol.records import LimitOverrides
from tests.support.coordinator.stream_client import SUBPROTOCOL, StreamClient
from tests.support.ids import named_id
from tests.support.loop_time import LoopTime
from tests.support.rest.client import HOST, RestWorld
from tests.support.waiting import GENEROUS_S, until_true
from tests.unit.http.conftest import NewWorld
from tests.unit.http.stream.conftest import HANDSHAKE, Connects, Opens

MESSAGE = {"topic": "orders", "key": "k", "value": "v"}


async def open_with_prepared(
    new_world: NewWorld, opened: Opens, limits: ApiLimits, count: int
) -> tuple[RestWorld, StreamClient]:
    world = await new_world(limits)
    await world.put_shop()
    stream = await opened(world)
    for number in range(count):
        assert (await stream.prepare("shop", MESSAGE, id=named_id(f"t-{number}"))).status == 201
    return world, stream


async def test_a_connection_with_too_many_operations_in_flight_is_not_read(
    new_world: NewWorld, opened: Opens, connected: Connects
) -> None:
    """A client that ignores the limit is slowed down; all of its operations are answered in the end."""
    world, _ = await open_with_prepared(new_world, opened, ApiLimits(max_stream_operations=4), 20)
    raw = await connected(world)
    with world.memory.faults.lane_held():
        for number in range(20):
            await raw.send(json.dumps({"end": [{"n": number, "id": named_id(f"t-{number}"), "outcome": "commit"}]}))
        await until_true(lambda: world.api.in_flight.taken == 4)
        await asyncio.sleep(0.05)
        assert world.api.in_flight.taken == 4
    answered: set[int] = set()
    while len(answered) < 20:
        answered.update(answer["n"] for answer in (await raw.frame())["answers"] if answer["status"] == 200)


async def test_ends_without_confirmation_count_until_they_are_written(new_world: NewWorld, opened: Opens) -> None:
    world, stream = await open_with_prepared(new_world, opened, ApiLimits(max_stream_operations=2), 4)
    with world.memory.faults.lane_held():
        ending = [asyncio.create_task(stream.end(named_id(f"t-{n}"), "commit", confirm=False)) for n in range(4)]
        await until_true(lambda: world.api.in_flight.taken == 2)
        await asyncio.sleep(0.05)
        assert world.api.in_flight.taken == 2
    assert [(await one).status for one in ending] == [202] * 4
    await until_true(lambda: len(world.memory.records("orders")) == 4)


async def test_operations_above_the_bound_of_all_are_429_and_prepares_first(new_world: NewWorld, opened: Opens) -> None:
    """Streams and requests share the limit, and the problem says when to try again."""
    world, stream = await open_with_prepared(new_world, opened, ApiLimits(max_requests=4), 4)
    other = await opened(world)
    with world.memory.faults.lane_held():
        ending = [asyncio.create_task(stream.end(named_id(f"t-{n}"), "commit")) for n in range(3)]
        await until_true(lambda: world.api.in_flight.taken == 3)
        late, refused = await asyncio.gather(
            *(
                asyncio.wait_for(one, GENEROUS_S)
                for one in (other.end("nobody", "commit"), other.prepare("shop", MESSAGE))
            )
        )
        assert late.status == 404
        assert (refused.status, refused.document["error_code"]) == (429, "overloaded")
        assert refused.document["retry_after_s"] >= 1
        ending.append(asyncio.create_task(stream.end(named_id("t-3"), "commit")))
        await until_true(lambda: world.api.in_flight.taken == 4)
        assert (await world.show(named_id("t-0"))).status == 429
        assert (await other.end(named_id("t-0"), "commit")).status == 429
    assert [(await one).status for one in ending] == [200] * 4
    assert world.api.in_flight.taken == 0


async def test_prepares_wait_for_a_place_as_in_rest(new_world: NewWorld, opened: Opens) -> None:
    """A quarter of the places may wait; those that wait in vain are 429, and all served ones are answered."""
    world = await new_world(ApiLimits(max_requests=100, prepare_wait_s=0.05))
    await world.put_shop()
    stream = await opened(world)
    answers = await asyncio.gather(*(stream.prepare("shop", MESSAGE) for _ in range(100)))
    assert {answer.status for answer in answers} <= {201, 429}
    assert sum(answer.status == 201 for answer in answers) >= 25
    assert world.api.in_flight.taken == world.api.admission.prepares == world.api.admission.waiting == 0


async def test_prepares_that_wait_are_given_up_with_their_connection(new_world: NewWorld, opened: Opens) -> None:
    world = await new_world(ApiLimits(max_requests=8, prepare_wait_s=60))
    await world.put_shop()
    stream = await opened(world)
    world.api.admission.take(2)
    waiting = asyncio.gather(*(stream.prepare("shop", MESSAGE) for _ in range(4)), return_exceptions=True)
    await until_true(lambda: world.api.admission.waiting == 4)
    await stream.abort()
    await until_true(lambda: world.api.admission.waiting == world.api.in_flight.taken == world.api.in_flight.bytes == 0)
    await waiting


async def test_prepares_that_would_wait_are_given_up_if_their_connection_closes_at_once(new_world: NewWorld) -> None:
    """The client's close arrives together with its prepares: none of them has started to wait."""
    world = await new_world(ApiLimits(max_requests=8, prepare_wait_s=60))
    await world.put_shop()
    world.api.admission.take(2)
    text = json.dumps({"prepare": [{"n": n, "group": "shop", "messages": [MESSAGE]} for n in range(4)]}).encode()
    reader, writer = await asyncio.open_connection(HOST, world.port)
    try:
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        await until_true(lambda: len(world.api.streams) == 1)
        writer.write(b"\x81\xfe" + len(text).to_bytes(2, "big") + b"\0\0\0\0" + text + b"\x88\x80\0\0\0\0")
        await until_true(lambda: len(world.api.streams) == 0)
        await until_true(lambda: world.api.in_flight.taken == world.api.in_flight.bytes == 0)
        assert world.api.admission.waiting == 0
        assert world.api.admission.prepares == 2
    finally:
        writer.transport.abort()


async def test_bytes_of_frames_count_until_they_are_answered(new_world: NewWorld, opened: Opens) -> None:
    """Above the limit for bodies, an operation of a large frame is 429; small frames continue."""
    limits = ApiLimits(max_body_bytes=60_000, max_body_bytes_in_flight=50_000)
    world = await new_world(limits)
    await world.put_shop()
    stream = await opened(world)
    assert (await stream.prepare("shop", {**MESSAGE, "value": "x" * 30_000})).status == 201
    world.api.in_flight.hold(40_000, None)
    answers = await asyncio.gather(
        stream.prepare("shop", {**MESSAGE, "value": "x" * 9_000}),
        stream.prepare("shop", {**MESSAGE, "value": "x" * 9_000}),
    )
    assert [answer.document.get("error_code") for answer in answers] == ["overloaded", "overloaded"]
    assert (await stream.prepare("shop", MESSAGE)).status == 201
    assert world.api.in_flight.bytes == 40_000


def _has_arriving(world: RestWorld, size: int) -> bool:
    return world.api.in_flight.arriving == size


async def test_frames_that_never_end_are_cut_off_above_the_bound_of_all(
    new_world: NewWorld, connected: Connects
) -> None:
    """Each of several connections sends most of a large message, but never its end."""
    world = await new_world(ApiLimits(max_body_bytes=200_000, max_body_bytes_in_flight=300_000))
    raws = [await connected(world) for _ in range(3)]
    for arrived, raw in zip((140_000, 280_000, 280_000), raws, strict=True):
        writer = raw.socket._writer
        writer.transport.write(b"\x81\xff" + (190_000).to_bytes(8, "big") + b"\0\0\0\0" + b" " * 140_000)
        await until_true(partial(_has_arriving, world, arrived))
    await until_true(lambda: len(world.api.streams) == 2)
    for raw in raws:
        raw.socket._writer.transport.abort()
    await until_true(lambda: not world.api.streams)
    assert world.api.in_flight.arriving == 0


async def test_a_client_that_does_not_read_is_cut_off(new_world: NewWorld) -> None:
    """Its operations wait unread in the meantime, and no more are started than may be in flight."""
    unsent = Unsent(look_every_s=0.05)
    world = await new_world(ApiLimits(max_stream_operations=100), unsent=unsent)
    await world.put_shop()
    transaction_id = await world.prepared(id=named_id("x"))
    assert (await world.end(transaction_id, "commit")).status == 200
    listening = socket.create_connection((HOST, world.port))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    listening.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=listening, limit=1024)
    try:
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        await until_true(lambda: len(world.api.streams) == 1)
        (served,) = world.api.streams
        served.socket.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

        async def flood() -> None:
            number = 0
            while True:
                ends = [{"n": number + i, "id": transaction_id, "outcome": "commit"} for i in range(100)]
                number += 100
                text = json.dumps({"end": ends}).encode()
                writer.write(b"\x81\xfe" + len(text).to_bytes(2, "big") + b"\0\0\0\0" + text)
                await writer.drain()

        flooding = asyncio.create_task(flood())
        await until_true(lambda: len(world.api.streams) == 0)
        flooding.cancel()
        await asyncio.wait([flooding])
        await until_true(lambda: world.api.in_flight.taken == world.api.in_flight.bytes == 0)
    finally:
        writer.transport.abort()


async def test_a_silent_client_is_pinged_and_cut_off(new_world: NewWorld) -> None:
    """A client that answers pings stays connected."""
    world = await new_world(ApiLimits(stream_heartbeat_s=100))
    url = f"{world.url}/v1/stream"
    async with (
        world.session.ws_connect(url, protocols=(SUBPROTOCOL,), autoping=False) as silent,
        world.session.ws_connect(url, protocols=(SUBPROTOCOL,), autoping=False) as lively,
    ):
        await silent.receive_json()
        await lively.receive_json()
        time = LoopTime()
        for others in (1, 0, 0):
            time.advance(102)
            ping = await lively.receive(GENEROUS_S)
            assert ping.type is aiohttp.WSMsgType.PING
            await lively.pong(ping.data)
            await until_true(lambda others=others: _unanswered_pings(world) == others)  # type: ignore[misc]
            time.advance(52)
            await until_true(lambda: len(world.api.streams) == 1)
        assert (await silent.receive(GENEROUS_S)).type is aiohttp.WSMsgType.PING


def _unanswered_pings(world: RestWorld) -> int:
    return sum(served.socket._pong_response_cb is not None for served in world.api.streams)


async def test_a_ping_of_the_client_is_answered(world: RestWorld) -> None:
    url = f"{world.url}/v1/stream"
    async with world.session.ws_connect(url, protocols=(SUBPROTOCOL,), autoping=False) as raw:
        await raw.receive_json()
        await raw.ping(b"there?")
        message = await raw.receive(GENEROUS_S)
        assert (message.type, message.data) == (aiohttp.WSMsgType.PONG, b"there?")


async def test_a_group_at_its_limit_is_refused_late_and_disturbs_nobody(
    new_world: NewWorld, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that sends the next prepare at once is slowed down; other operations of its connection continue."""
    limited = partial(ServiceLimits, default_limits=LimitOverrides(prepares_per_s=0.0001))
    monkeypatch.setattr("tests.support.rest.client.ServiceLimits", limited)
    world = await new_world(ApiLimits(prepare_wait_s=200))
    await world.put_shop()
    stream = await opened(world)
    assert (await stream.prepare("shop", MESSAGE)).status == 201
    time = LoopTime()
    refused = asyncio.create_task(stream.prepare("shop", MESSAGE))
    assert (await stream.end("nobody", "commit")).status == 404
    assert not refused.done()
    time.advance(50)  # it is delayed for at least 100 s
    assert (await stream.end("nobody", "commit")).status == 404
    assert not refused.done()
    time.advance(150)
    answer = await refused
    assert (answer.status, answer.document["error_code"]) == (429, "group_limited")
