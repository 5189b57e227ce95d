"""Transactions: their ids, states and outcomes, and the one table of legal transitions.

See docs/protocol.md#topics and docs/protocol.md#state-is-a-fold-over-the-log.
"""

from __future__ import annotations

import re
from enum import StrEnum
from struct import unpack_from
from uuid import UUID

from halfway.protocol.errors import AlreadyEndedError, NotPendingError


class State(StrEnum):
    """The state of a transaction."""

    PREPARED = "prepared"
    PARKED = "parked"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"

    def __init__(self, state: str) -> None:
        """Set `ended`: whether it is one of the two final outcomes."""
        self.ended = state in {"committed", "rolled_back"}


class Outcome(StrEnum):
    """The result of a local transaction, as the producer service reports it."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"


class Cause(StrEnum):
    """The originator of a change, as recorded in its op marker."""

    PRODUCER = "producer"
    CHECK = "check"
    OPERATOR = "operator"
    POLICY = "policy"


class Action(StrEnum):
    """An action on a transaction."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"
    CHECK = "check"
    PARK = "park"
    RESUME = "resume"


TRANSITIONS: dict[tuple[State, Action], State] = {
    (State.PREPARED, Action.COMMIT): State.COMMITTED,
    (State.PREPARED, Action.ROLLBACK): State.ROLLED_BACK,
    (State.PREPARED, Action.UNKNOWN): State.PREPARED,
    (State.PREPARED, Action.CHECK): State.PREPARED,
    (State.PREPARED, Action.PARK): State.PARKED,
    (State.PREPARED, Action.RESUME): State.PREPARED,
    (State.PARKED, Action.COMMIT): State.COMMITTED,
    (State.PARKED, Action.ROLLBACK): State.ROLLED_BACK,
    (State.PARKED, Action.UNKNOWN): State.PARKED,
    (State.PARKED, Action.PARK): State.PARKED,
    (State.PARKED, Action.RESUME): State.PREPARED,
    (State.COMMITTED, Action.COMMIT): State.COMMITTED,
    (State.ROLLED_BACK, Action.ROLLBACK): State.ROLLED_BACK,
}
"""Every legal (state, action) and the resulting state. A pair that is not here is a conflict (409)."""


def conflict(transaction_id: str, state: State) -> AlreadyEndedError | NotPendingError:
    """Return the error for an action that a state does not allow.

    An outcome is never changed. A parked transaction must be resumed or ended first.
    """
    if state.ended:
        return AlreadyEndedError(transaction_id, state=state.value)
    return NotPendingError(transaction_id, state=state.value)


CLIENT_ID = re.compile(r"[A-Za-z0-9._~-]{1,128}\Z")
SERVER_ID = re.compile(r"(0|[1-9][0-9]{0,4})-([0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12})\Z")


def server_id(shard: int, uuid7: UUID | str) -> str:
    """Return the id `<shard>-<uuid7>` of a transaction whose id the server chooses."""
    return f"{shard}-{uuid7}"


def parse_server_id(transaction_id: str) -> tuple[int, int] | None:
    """Return (shard, creation time in ms since the epoch) of a server-made id, None for any other."""
    match = SERVER_ID.match(transaction_id)
    if match is None:
        return None
    made = match[2]
    return int(match[1]), int(made[:8] + made[9:13], 16)


def shard_of(transaction_id: str, shards: int) -> int | None:
    """Return the shard that an id belongs to, None for a server-made id of a shard that does not exist."""
    match = SERVER_ID.match(transaction_id)
    if match is None:
        return partition_for_key(transaction_id.encode(), shards)
    shard = int(match[1])
    return shard if shard < shards else None


def partition_for_key(key: bytes, partitions: int) -> int:
    """Return the partition that Kafka's Java client chooses for a keyed record: positive murmur2 modulo partitions."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def murmur2(data: bytes) -> int:
    """Return the 32-bit murmur2 hash of `org.apache.kafka.common.utils.Utils.murmur2`, as an unsigned int."""
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    words = len(data) // 4
    h = 0x9747B28C ^ len(data)
    for word in unpack_from(f"<{words}I", data):
        k = word * m & mask
        h = (h * m ^ (k ^ k >> 24) * m) & mask
    tail = data[4 * words :]
    if tail:
        h = (h ^ int.from_bytes(tail, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15
