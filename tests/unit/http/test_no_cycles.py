"""A refusal leaves no reference cycles: Python's collector would block all requests while it searches for them."""

import gc
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import halfway.http
from halfway.coordinator.requests import ServiceLimits
from halfway.http.requests.admission import ApiLimits
from halfway.protocol.records import LimitOverrides
from tests.support.coordinator.stream_client import StreamClient
from tests.support.ids import named_id
from tests.support.rest.client import RestWorld
from tests.unit.http.conftest import NewWorld

Calls = Callable[[RestWorld], Awaitable[object]]
COORDINATOR = str(Path(halfway.http.__path__[0]).parent)
TIMES = 5
ORDER: dict[str, Any] = {"group": "shop", "messages": [{"topic": "orders", "value": "v"}]}
STRANGE = {**ORDER, "group": "nobody"}
MISPLACED = {**ORDER, "messages": [{"topic": "elsewhere", "value": "v"}]}
COMMIT = {"outcome": "commit"}
REFUSED: dict[str, Calls] = {
    "a group at its limit": lambda world: world.call("POST", "/v1/transactions", ORDER),
    "a group at its limit, in a batch": lambda world: world.call("POST", "/v1/batch", {"prepare": [ORDER, ORDER]}),
    "an unknown group": lambda world: world.call("POST", "/v1/transactions", STRANGE),
    "an unknown group, in a batch": lambda world: world.call("POST", "/v1/batch", {"prepare": [STRANGE, MISPLACED]}),
    "another topic": lambda world: world.call("POST", "/v1/transactions", MISPLACED),
    "an end of an unknown id": lambda world: world.call("POST", "/v1/transactions/unknown/end", COMMIT),
    "ends of unknown ids": lambda world: world.call("POST", "/v1/batch", {"end": [{"id": "a", **COMMIT}] * 2}),
    "an end that contradicts": lambda world: world.call(
        "POST", f"/v1/transactions/{named_id('rolled-back')}/end", COMMIT
    ),
    "an unknown id": lambda world: world.call("GET", "/v1/transactions/unknown"),
    "no JSON": lambda world: world.call("POST", "/v1/transactions", raw=b"{"),
}


@pytest.fixture
def cycles() -> Iterator[Callable[[], list[object]]]:
    """Count the objects of the coordinator's code that are left in cycles, with automatic collection switched off."""
    gc.disable()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)

    def frames_in_cycles() -> list[object]:
        gc.collect()
        return [
            one for one in gc.garbage if isinstance(one, FrameType) and one.f_code.co_filename.startswith(COORDINATOR)
        ]

    yield frames_in_cycles
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.fixture
async def limited(new_world: NewWorld, monkeypatch: pytest.MonkeyPatch) -> RestWorld:
    """Provide an interface whose group `shop` has reached its limit."""
    limited = partial(ServiceLimits, default_limits=LimitOverrides(prepares_per_s=0.0001))
    monkeypatch.setattr("tests.support.rest.client.ServiceLimits", limited)
    world = await new_world(ApiLimits(prepare_wait_s=0.01))
    await world.put_shop()
    assert (await world.prepare(id=named_id("rolled-back"))).status == 201
    assert (
        await world.call("POST", f"/v1/transactions/{named_id('rolled-back')}/end", {"outcome": "rollback"})
    ).status == 200
    return world


@pytest.mark.parametrize("refused", REFUSED)
async def test_a_refusal_leaves_no_cycle(limited: RestWorld, cycles: Callable[[], list[object]], refused: str) -> None:
    for _ in range(TIMES):
        await REFUSED[refused](limited)
    assert cycles() == []


async def test_a_refusal_on_a_stream_leaves_no_cycle(limited: RestWorld, cycles: Callable[[], list[object]]) -> None:
    stream = await StreamClient.connect(limited.session, limited.url)
    for _ in range(TIMES):
        assert (await stream.prepare("shop", *ORDER["messages"])).status == 429
        assert (await stream.end("unknown", "commit")).status == 404
    assert cycles() == []
    await stream.close()
