"""Ids for tests: UUIDv7 that are born in the time of the coordinator under test."""

from datetime import UTC, datetime
from itertools import count
from uuid import uuid4

from halfway.client import transaction_id
from halfway.protocol.ids import shard_of
from tests.support.surroundings import ManualClock


def named_id(name: str) -> str:
    """Return the id for a name that is born when a manual clock starts: a test may write it in two places."""
    return transaction_id(name, ManualClock().now_ms())


def named_id_in(shard: int, name: str, *, shards: int) -> str:
    """Return an id for a name, as `named_id` does, that belongs to a shard."""
    return next(own for own in (named_id(f"{name}-{turn}") for turn in count()) if shard_of(own, shards) == shard)


def new_id() -> str:
    """Return another id at each call, born now."""
    return transaction_id(uuid4().hex, datetime.now(UTC))
