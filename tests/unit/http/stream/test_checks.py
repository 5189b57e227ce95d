"""Checks are sent on a stream that subscribes to them, and answered by ends."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from halfway.http.responses import Unsent
from tests.support.coordinator.stream_client import StreamClient
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.support.waiting import GENEROUS_S, until_true
from tests.unit.http.conftest import NewWorld
from tests.unit.http.stream.conftest import Opens

MESSAGE = {"topic": "orders", "key": "k", "value": "v"}
LEASE_S = 30


@pytest.fixture
async def world(new_world: NewWorld) -> RestWorld:
    """Provide an interface with a group that fetches its checks."""
    world = await new_world()
    await world.put_shop(check={"mode": "pull"}, policy={"first_check_after_s": 5, "check_interval_s": 5})
    return world


async def scan(world: RestWorld, after_s: float = 0) -> None:
    world.memory.clock.advance(after_s)
    for shard in world.coordinator.shards.served:
        await world.coordinator.scan(shard, world.memory.clock.now_ms())


async def check(stream: StreamClient) -> dict[str, Any]:
    return await asyncio.wait_for(stream.checks.get(), GENEROUS_S)


async def test_a_check_that_comes_due_is_sent_and_ended_by_its_id(world: RestWorld, stream: StreamClient) -> None:
    answer = await stream.subscribe("shop", 5)
    assert (answer.status, answer.document) == (200, {"group": "shop", "max": 5})
    await stream.prepare("shop", MESSAGE, id=named_id("t-1"))
    await scan(world, 6)
    asked = await check(stream)
    assert (asked["id"], asked["check_id"], asked["type"]) == (
        named_id("t-1"),
        f"{named_id('t-1')}:1",
        "transaction.check",
    )
    assert asked["messages"][0]["value"] == "v"
    ended = await stream.end(named_id("t-1"), "commit", check_id=f"{named_id('t-1').upper()}:1")
    assert ended.document == {"id": named_id("t-1"), "state": "committed", "changed": True}
    assert (await world.show(named_id("t-1"))).body["cause"] == "check"


async def test_no_more_checks_are_with_a_stream_than_it_wants(world: RestWorld, stream: StreamClient) -> None:
    """The next one is sent once one is answered, or once a lease has expired."""
    for number in range(4):
        await stream.prepare("shop", MESSAGE, id=named_id(f"t-{number}"))
    await scan(world, 6)
    await stream.subscribe("shop", 2)
    first, second = await check(stream), await check(stream)
    await asyncio.sleep(0.1)
    assert stream.checks.empty()
    await stream.end(first["id"], "unknown", check_id=first["check_id"])
    third = await check(stream)
    await asyncio.sleep(0.1)
    assert stream.checks.empty()
    assert len({first["id"], second["id"], third["id"]}) == 3
    await stream.subscribe("shop", 3)
    assert (await check(stream))["id"] not in {first["id"], second["id"], third["id"]}


async def test_checks_of_a_connection_that_dies_are_sent_again(world: RestWorld, opened: Opens) -> None:
    """To another stream, once their lease has expired; until then the first worker may answer them anywhere."""
    first, second = await opened(world), await opened(world)
    for number in range(2):
        await first.prepare("shop", MESSAGE, id=named_id(f"t-{number}"))
    await first.subscribe("shop", 5)
    await scan(world, 6)
    held = [await check(first), await check(first)]
    await first.abort()
    await until_true(lambda: len(world.api.streams) == 1)
    await second.subscribe("shop", 5)
    await scan(world, 1)
    await asyncio.sleep(0.1)
    assert second.checks.empty()
    ended = await world.end(held[0]["id"], "commit", check_id=held[0]["check_id"])
    assert ended.status == 200
    await scan(world, LEASE_S + 1)
    again = await check(second)
    assert (again["id"], again["attempt"]) == (held[1]["id"], 2)
    assert (await second.end(again["id"], "rollback", check_id=again["check_id"])).status == 200


async def test_each_check_goes_to_one_of_several_streams(world: RestWorld, opened: Opens) -> None:
    streams = [await opened(world) for _ in range(3)]
    for stream in streams:
        await stream.subscribe("shop", 10)
    for number in range(12):
        await streams[0].prepare("shop", MESSAGE, id=named_id(f"t-{number}"))
    await scan(world, 6)
    await until_true(lambda: sum(stream.checks.qsize() for stream in streams) == 12)
    ids = {stream.checks.get_nowait()["id"] for stream in streams for _ in range(stream.checks.qsize())}
    assert len(ids) == 12


async def test_no_checks_are_sent_while_clients_hold_too_many_unread_answers(
    new_world: NewWorld, opened: Opens
) -> None:
    """A check contains its payload: streams that do not read would each hold some, in addition to other answers."""
    unsent = Unsent(max_bytes=1000, look_every_s=3600)
    world = await new_world(unsent=unsent)
    await world.put_shop(check={"mode": "pull"}, policy={"first_check_after_s": 5, "check_interval_s": 5})
    stream = await opened(world)
    await stream.prepare("shop", MESSAGE, id=named_id("t-1"))
    await scan(world, 6)
    deaf = object()
    unsent.begin(deaf, SimpleNamespace(get_write_buffer_size=lambda: 1001))  # type: ignore[arg-type]  # it needs nothing else
    assert (await stream.subscribe("shop", 5)).status == 200
    (served,) = world.api.streams
    assert not served.reads
    assert (await world.show(named_id("t-1"))).body["checks"] == 0
    unsent.end(deaf)
    assert (await check(stream))["id"] == named_id("t-1")


async def test_a_subscription_ends_by_a_maximum_of_0(world: RestWorld, opened: Opens) -> None:
    first, second = await opened(world), await opened(world)
    await first.subscribe("shop", 5)
    assert (await first.subscribe("shop", 0)).document == {"group": "shop", "max": 0}
    await second.subscribe("shop", 5)
    await second.prepare("shop", MESSAGE, id=named_id("t-1"))
    await scan(world, 6)
    assert (await check(second))["id"] == named_id("t-1")
    assert first.checks.empty()


async def test_only_a_group_that_fetches_its_checks_may_be_subscribed_to(
    world: RestWorld, stream: StreamClient
) -> None:
    assert (await stream.subscribe("nobody", 1)).document["error_code"] == "unknown_group"
    await world.put_shop()
    assert (await stream.subscribe("shop", 1)).document["error_code"] == "invalid_request"


async def test_a_subscription_whose_group_is_deleted_ends_with_a_problem(
    world: RestWorld, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfway.http.stream.stream._WAIT_S", 0.05)
    stream = await opened(world)
    await stream.subscribe("shop", 1)
    assert (await world.call("DELETE", "/v1/groups/shop")).status == 204
    await until_true(lambda: stream.ended)
    assert (stream.ended[0]["group"], stream.ended[0]["problem"]["error_code"]) == ("shop", "unknown_group")
    assert (await stream.end("nobody", "commit")).status == 404


async def test_a_subscription_begins_anew_if_it_ends_while_it_is_asked_for_again(
    world: RestWorld, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its group was deleted; after the end is reported, the new subscription finds the group that exists again."""
    monkeypatch.setattr("halfway.http.stream.stream._WAIT_S", 0.05)
    stream = await opened(world)
    await stream.subscribe("shop", 5)
    lease_checks = world.coordinator.lease_checks

    async def lease_late(group: str, *, wait_s: float, **wanted: Any) -> Any:
        if not wait_s:
            await until_true(lambda: stream.ended)
            world.memory.clock.advance(1)
            await world.put_shop(check={"mode": "pull"}, policy={"first_check_after_s": 5, "check_interval_s": 5})
        return await lease_checks(group, wait_s=wait_s, **wanted)

    monkeypatch.setattr(world.coordinator, "lease_checks", lease_late)
    again = asyncio.create_task(stream.subscribe("shop", 5))
    assert (await world.call("DELETE", "/v1/groups/shop")).status == 204
    assert (await again).status == 200
    assert (await stream.prepare("shop", MESSAGE, id=named_id("t-1"))).status == 201
    await scan(world, 6)
    assert (await check(stream))["id"] == named_id("t-1")
