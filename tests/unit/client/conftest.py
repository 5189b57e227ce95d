"""The fixtures for tests of the client: a coordinator on a simulated broker, and a service's database."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from halfway.client.barrier import Barrier, sqlite_transactions
from tests.support.client.patience import patient
from tests.support.rest.client import RestWorld
from tests.unit.client.test_barrier import Shop

__all__ = ["patient"]


@pytest.fixture
async def world() -> AsyncIterator[RestWorld]:
    async with RestWorld() as world:
        await world.put_shop()
        yield world


@pytest.fixture
def barrier(tmp_path: Path) -> Barrier:
    barrier = Barrier("sqlite", sqlite_transactions(tmp_path / "shop.sqlite"))
    barrier.create()
    return barrier


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path / "shop.sqlite")
