"""An empty shard."""

import pytest

from halfway.domain.shard import ShardState


@pytest.fixture
def state() -> ShardState:
    return ShardState(0)
