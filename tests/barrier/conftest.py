"""What the tests of the barrier share: a coordinator over ports in memory."""

from collections.abc import AsyncIterator

import pytest

from tests.support.rest.client import RestWorld


@pytest.fixture
async def world() -> AsyncIterator[RestWorld]:
    async with RestWorld() as world:
        await world.put_shop()
        yield world
