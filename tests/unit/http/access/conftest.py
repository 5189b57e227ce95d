"""Two instances with access control."""

from collections.abc import AsyncIterator

import pytest

from tests.support.rest.guarded import Guarded, guarded


@pytest.fixture
async def both() -> AsyncIterator[Guarded]:
    """Provide two instances over one log, with the groups `shop` and `other`."""
    async with guarded() as world:
        yield world
