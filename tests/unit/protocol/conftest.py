"""An empty shard."""

import pytest

from halfway.protocol.shard import ShardState


@pytest.fixture
def state() -> ShardState:
    return ShardState(0)
