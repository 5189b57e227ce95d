"""The beginning of a stream, the bytes that count while it is open, and how it ends, by either side."""

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from halfway.http.requests.admission import ApiLimits
from halfway.http.stream.frames import FrameOperations
from halfway.http.stream.operations import ArrivingPayload
from tests.support.coordinator.stream_client import SUBPROTOCOL, StreamClient, StreamLostError
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.support.waiting import GENEROUS_S, until_true
from tests.unit.http.conftest import NewWorld
from tests.unit.http.stream.conftest import Connects, Opens

HANDSHAKE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Protocol": SUBPROTOCOL,
}


async def test_the_first_frame_tells_the_limits(new_world: NewWorld, opened: Opens) -> None:
    world = await new_world(ApiLimits(max_body_bytes=9_000, max_batch_items=7, request_timeout_s=3, max_requests=500))
    stream = await opened(world)
    assert stream.hello == {
        "version": 1,
        "max_frame_bytes": 9_000,
        "max_frame_operations": 7,
        "max_in_flight": 500,
        "timeout_s": 3,
        "heartbeat_s": 16,
        "traceparent": True,
    }


@pytest.mark.parametrize(
    "changes, status, code",
    [
        ({"Upgrade": None}, 426, "upgrade_required"),
        ({"Upgrade": "h2c"}, 426, "upgrade_required"),
        ({"Connection": "close"}, 426, "upgrade_required"),
        ({"Sec-WebSocket-Protocol": None}, 426, "upgrade_required"),
        ({"Sec-WebSocket-Protocol": "halfway.stream.v0, mqtt"}, 426, "upgrade_required"),
        ({"Sec-WebSocket-Version": "12"}, 426, "upgrade_required"),
        ({"Sec-WebSocket-Key": "short"}, 426, "upgrade_required"),
        ({"Origin": "https://evil.example"}, 403, "forbidden"),
        ({"Origin": "null"}, 403, "forbidden"),
        ({"Origin": "http://[x"}, 403, "forbidden"),
        ({"Halfway-Cause": "nobody"}, 422, "invalid_request"),
    ],
)
async def test_a_handshake_that_is_refused_is_a_problem(
    world: RestWorld, changes: Mapping[str, str | None], status: int, code: str
) -> None:
    headers = {name: value for name, value in {**HANDSHAKE, **changes}.items() if value is not None}
    answer = await world.call("GET", "/v1/stream", headers=headers)
    assert (answer.status, answer.error_code) == (status, code)
    assert answer.headers["Content-Type"] == "application/problem+json"


async def test_a_page_of_the_same_site_may_open_one(world: RestWorld, opened: Opens) -> None:
    stream = await opened(world, {"Origin": world.url})
    assert (await stream.prepare("shop", {"topic": "orders", "value": "v"})).status == 201


async def test_another_subprotocol_may_be_offered_beside(world: RestWorld) -> None:
    async with world.session.ws_connect(f"{world.url}/v1/stream", protocols=("other", SUBPROTOCOL)) as socket:
        assert socket.protocol == SUBPROTOCOL


async def test_more_streams_than_may_be_open_are_429(new_world: NewWorld, opened: Opens) -> None:
    world = await new_world(ApiLimits(max_streams=1))
    first = await opened(world)
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await opened(world)
    assert refused.value.status == 429
    await first.close()
    await until_true(lambda: not world.api.streams)
    await opened(world)


async def test_the_cause_of_the_connection_is_that_of_its_ends(world: RestWorld, opened: Opens) -> None:
    stream: StreamClient = await opened(world, {"Halfway-Cause": "operator"})
    await stream.prepare("shop", {"topic": "orders", "value": "v"}, id=named_id("t-1"))
    await stream.end(named_id("t-1"), "commit")
    assert (await world.show(named_id("t-1"))).body["cause"] == "operator"


TEXT, PING, CONTINUATION = 0x81, 0x89, 0x00


def frame(first: int, payload: bytes, *, masked: bool) -> bytes:
    size, mask = len(payload), 0x80 if masked else 0
    if size < 126:
        head = bytes([first, mask | size])
    elif size < 65_536:
        head = bytes([first, mask | 126]) + size.to_bytes(2)
    else:
        head = bytes([first, mask | 127]) + size.to_bytes(8)
    return head + (b"\0\0\0\0" if masked else b"") + payload


@pytest.mark.parametrize("seed", range(20))
def test_only_the_payload_of_messages_counts_wherever_the_data_is_cut(seed: int) -> None:
    chosen = random.Random(seed)
    for _ in range(10):
        data, expected = b"", 0
        for _ in range(chosen.randrange(1, 8)):
            first = chosen.choice([TEXT, PING, CONTINUATION])
            sizes = [0, 1, 125] if first == PING else [0, 1, 125, 126, 65_535, 65_536]
            size = chosen.choice(sizes)
            data += frame(first, b" " * size, masked=chosen.random() < 0.5)
            expected += 0 if first == PING else size
        arriving, found, at = ArrivingPayload(), 0, 0
        while at < len(data):
            taken = chosen.choice([1, 2, 3, 7, 1000, 100_000])
            found += arriving.size_in(data[at : at + taken])
            at += taken
        assert found == expected


MESSAGE = {"topic": "orders", "key": "k", "value": "v"}


def deadline_in(seconds: float = 20) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_a_stop_answers_what_is_in_flight_and_closes(world: RestWorld, opened: Opens) -> None:
    """New operations are 503 in the meantime; a stream with nothing in flight is closed at once."""
    busy, idle = await opened(world), await opened(world)
    await busy.prepare("shop", MESSAGE, id=named_id("t-1"))
    with world.memory.faults.lane_held():
        ending = asyncio.create_task(busy.end(named_id("t-1"), "commit"))
        await until_true(lambda: world.api.in_flight.taken == 1)
        stopping = asyncio.create_task(world.api.drain(deadline_in()))
        for stream in (busy, idle):
            await asyncio.wait_for(stream.closing.wait(), GENEROUS_S)
        await asyncio.wait_for(idle.closed.wait(), GENEROUS_S)
        assert idle.close_code == 1001
        refused = await busy.prepare("shop", MESSAGE)
        assert (refused.status, refused.document["error_code"]) == (503, "shutting_down")
        assert (await world.call("GET", "/v1/stream", headers={"Upgrade": "websocket"})).status == 503
        assert not stopping.done()
    assert (await ending).document == {"id": named_id("t-1"), "state": "committed", "changed": True}
    await asyncio.wait_for(busy.closed.wait(), GENEROUS_S)
    assert busy.close_code == 1001
    await asyncio.wait_for(stopping, GENEROUS_S)
    assert not world.api.streams


async def test_a_stop_waits_no_longer_than_its_deadline(world: RestWorld, stream: StreamClient) -> None:
    await stream.prepare("shop", MESSAGE, id=named_id("t-1"))
    with world.memory.faults.lane_held():
        ending = asyncio.create_task(stream.end(named_id("t-1"), "commit"))
        await until_true(lambda: world.api.in_flight.taken == 1)
        await asyncio.wait_for(world.api.drain(deadline_in(0.1)), GENEROUS_S)
        assert not world.api.streams
        with pytest.raises(StreamLostError):
            await ending
    await until_true(lambda: world.memory.records("orders"))


async def test_a_stop_does_not_wait_for_a_client_that_ignores_it(world: RestWorld, connected: Connects) -> None:
    """It reads nothing, and sends no close frame."""
    await connected(world)
    await asyncio.wait_for(world.api.drain(deadline_in(600)), GENEROUS_S)
    assert not world.api.streams


async def test_checks_are_no_longer_sent_at_a_stop(world: RestWorld, stream: StreamClient) -> None:
    await world.put_shop(check={"mode": "pull"}, policy={"first_check_after_s": 5})
    await stream.subscribe("shop", 5)
    await world.coordinator.drain()
    await asyncio.wait_for(world.api.drain(deadline_in()), GENEROUS_S)
    assert stream.checks.empty()


async def test_a_close_by_the_client_ends_its_stream(world: RestWorld, stream: StreamClient) -> None:
    """Operations in flight are finished."""
    await stream.prepare("shop", MESSAGE, id=named_id("t-1"))
    with world.memory.faults.lane_held():
        ending = asyncio.create_task(stream.end(named_id("t-1"), "commit"))
        await until_true(lambda: world.api.in_flight.taken == 1)
        await stream.close()
        assert stream.close_code == 1000
        with pytest.raises(StreamLostError):
            await ending
    await until_true(lambda: world.memory.records("orders"))
    await until_true(lambda: not world.api.streams and not world.api.in_flight.taken)


async def test_a_client_leaves_no_task_behind_if_its_connection_is_lost(world: RestWorld, opened: Opens) -> None:
    """Neither a task that waits for work nor an open connection, however the connection is lost."""
    before = asyncio.all_tasks()
    cut, left = await opened(world), await StreamClient.connect(world.session, world.url)
    await cut.abort()
    await world.api.drain(deadline_in())
    await asyncio.wait_for(left.closed.wait(), GENEROUS_S)
    await until_true(lambda: not {task for task in asyncio.all_tasks() - before if "StreamClient" in repr(task)})


async def test_prepares_whose_turn_has_not_come_when_their_connection_is_lost_are_not_stored(
    world: RestWorld, stream: StreamClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would end them. A turn of the event loop begins some of many."""
    operations = world.api.streams._operations
    add = operations.add

    def add_and_lose(connection: Any, requested: FrameOperations, size: int) -> None:
        add(connection, requested, size)
        asyncio.get_running_loop().call_soon(operations.forget, connection)

    monkeypatch.setattr(operations, "add", add_and_lose)
    prepares = asyncio.gather(*(stream.prepare("shop", MESSAGE) for _ in range(1000)), return_exceptions=True)
    await until_true(lambda: world.coordinator.shards.unresolved > 0 and world.api.in_flight.taken == 0)
    assert world.coordinator.shards.unresolved < 1000
    assert not operations._begun
    prepares.cancel()


async def test_a_client_is_told_when_other_shards_are_served_here(world: RestWorld, connected: Connects) -> None:
    raw = await connected(world)
    world.coordinator.shards.lost(1)
    assert await raw.frame() == {"shards": {"count": 2, "here": [0]}}
