"""The handshake of a stream: which requests are accepted, and the answers to others."""

from collections.abc import Mapping

import aiohttp
import pytest

from halfway.http.requests.admission import ApiLimits
from tests.support.coordinator.stream_client import SUBPROTOCOL, StreamClient
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.support.waiting import until_true
from tests.unit.http.conftest import NewWorld
from tests.unit.http.stream.conftest import Opens

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
