"""A coordinator on a simulated broker for each test."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest

from tests.support.service.machines import new_loop
from tests.support.service.world import World


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run what is on a simulated broker in virtual time."""
    assert isinstance(item, pytest.Function)
    names = vars(item.module)
    return {"virtual": new_loop} if {"World", "Memory"} & names.keys() else {"real": asyncio.new_event_loop}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """One instance with the group `shop`; stopped after the test."""
    world = await World.start()
    await world.group()
    yield world
    await world.stop()
