"""A coordinator with the ports in memory for each test."""

from collections.abc import AsyncIterator

import pytest

from tests.support.service.world import World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """One instance with the group `shop`; stopped after the test."""
    world = await World.start()
    await world.group()
    yield world
    await world.stop()
