"""The REST interface on a real socket, over a coordinator on a simulated broker."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Protocol

import pytest

from halfway.http.requests.admission import ApiLimits
from halfway.http.responses import Unsent
from tests.support.rest.client import RestWorld
from tests.support.service.broker import Memory


class NewWorld(Protocol):
    """Creates interfaces with given limits, which are closed at the end of the test."""

    async def __call__(self, limits: ApiLimits | None = None, *, unsent: Unsent | None = None) -> RestWorld: ...


@pytest.fixture
async def new_world() -> AsyncIterator[NewWorld]:
    async with AsyncExitStack() as stack:

        async def make(limits: ApiLimits | None = None, *, unsent: Unsent | None = None) -> RestWorld:
            return await stack.enter_async_context(RestWorld(limits, unsent=unsent))

        yield make


@pytest.fixture
async def world(new_world: NewWorld) -> RestWorld:
    """Provide an interface with the group `shop`, which may write to `orders` and `coupons`."""
    world = await new_world()
    await world.put_shop()
    return world


@pytest.fixture
async def instances() -> AsyncIterator[tuple[RestWorld, RestWorld]]:
    """Provide two instances, each with one shard."""
    first = Memory(shards=2, topics={"orders": 3, "coupons": 1}, owns={0})
    second = Memory(shards=2, owns={1}, beside=first)
    async with RestWorld(memory=first) as here, RestWorld(memory=second) as there:
        yield here, there
