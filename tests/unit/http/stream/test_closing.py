"""How a stream ends: in order at a stop, and by either side."""

import asyncio
from typing import Any

import pytest

from halfway.http.stream.frames import FrameOperations
from tests.support.coordinator.stream_client import StreamClient, StreamLostError
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.support.waiting import GENEROUS_S, until_true
from tests.unit.http.stream.conftest import Connects, Opens

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
