"""The state of an id in the fold of its shard."""

from halfway.protocol.shard import ShardState
from halfway.protocol.transactions import State


def state_of(shard: ShardState, transaction_id: str) -> State | None:
    """Return the state of an id, None if the shard does not know it."""
    entry = shard.find(transaction_id)
    return None if entry is None else entry.state
