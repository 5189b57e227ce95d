"""Looks up transactions by id, and their payloads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfway.domain.entries import ParkedEntry
from halfway.domain.errors import NotServedError, OutcomeExpiredError, UnknownTransactionError
from halfway.domain.ids import parse_server_id

if TYPE_CHECKING:
    from halfway.domain.entries import Entry, Unresolved
    from halfway.domain.principal import Permission, Principal
    from halfway.domain.records import Half
    from halfway.service.ports import Authority, Clock, HalfLog
    from halfway.service.requests import ServiceLimits
    from halfway.service.shards.shard_table import Shard, ShardTable


class Lookup:
    """Looks up ids in their shards, after a read barrier if necessary."""

    def __init__(
        self, limits: ServiceLimits, authority: Authority, shards: ShardTable, half_log: HalfLog, clock: Clock
    ) -> None:
        """Store the parts."""
        self._authority = authority
        self._limits = limits
        self._shards = shards
        self._half_log = half_log
        self._clock = clock

    def group_here(self, transaction_id: str) -> str | None:
        """Return the group of a transaction, None if this instance does not serve or does not know it."""
        try:
            entry = self._shards.of(transaction_id).state.find(transaction_id)
        except (NotServedError, UnknownTransactionError):
            return None
        return None if entry is None else entry.group

    async def locate(
        self, transaction_id: str, permission: Permission, *, principal: Principal, deadline: float
    ) -> tuple[Shard, Entry]:
        """Find the entry of an id in its shard, for a caller.

        For a group's principal a transaction of another group does not exist: the answer and its cost are those of an
        unused id.

        Raises:
            ForbiddenError: the caller may do this to no transaction. It does not reveal whether this one exists.
            HalfwayError: as for `locate_any`.

        """
        self._authority.require(principal, permission)
        return await self._locate(transaction_id, principal.group, deadline=deadline)

    async def locate_any(self, transaction_id: str, *, deadline: float) -> tuple[Shard, Entry]:
        """Find the entry of an id in its shard.

        An unknown id is looked up again after a read barrier: by then the tail has reached the end of half[s] as of
        this call (docs/protocol.md#ownership-and-fencing).

        Raises:
            UnknownTransactionError, OutcomeExpiredError: it is certainly not pending. Neither means "rolled back".
            ShardUnavailableError: its shard is not served here now.

        """
        return await self._locate(transaction_id, None, deadline=deadline)

    async def _locate(self, transaction_id: str, group: str | None, *, deadline: float) -> tuple[Shard, Entry]:
        shard = self._shards.of(transaction_id)
        entry = _visible_entry(shard, transaction_id, group)
        if entry is not None:
            return shard, entry
        end = await self._half_log.half_end(shard.number, deadline=deadline)
        await self._shards.get(shard.number).wait_for_tail(end, deadline=deadline)
        shard = self._shards.get(shard.number)
        entry = _visible_entry(shard, transaction_id, group)
        if entry is not None:
            return shard, entry
        made = parse_server_id(transaction_id)
        horizon_s = self._limits.outcome_horizon_s
        if made is not None and made[1] < self._clock.now_ms() - horizon_s * 1000:
            raise OutcomeExpiredError(transaction_id, horizon_s=horizon_s)
        raise UnknownTransactionError(transaction_id)

    async def payload(self, shard: Shard, entry: Unresolved, *, deadline: float) -> Half:
        """Return the half of a prepared or parked transaction. It is read by offset if it is not in memory."""
        payloads = self._shards.payloads
        half = payloads.get(entry.id) or shard.unwritten.get(entry.id)
        if half is not None and half.fingerprint == entry.fingerprint:
            return half
        if isinstance(entry, ParkedEntry):
            record = await self._half_log.read_parked(shard.number, entry.offset, entry.id, deadline=deadline)
            half = record.half
        else:
            half = await self._half_log.read_half(shard.number, entry.offset, entry.id, deadline=deadline)
        payloads.misses += 1
        payloads.put(half, entry.size)
        return half


def _visible_entry(shard: Shard, transaction_id: str, group: str | None) -> Entry | None:
    """Return the entry of an id; None if there is none, or if it belongs to another group than `group`."""
    entry = shard.state.find(transaction_id)
    return None if entry is None or group not in (None, entry.group) else entry
