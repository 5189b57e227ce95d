"""Lookup a transaction by its id, and its payload; nothing here changes a transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfway.domain.errors import OutcomeExpiredError, UnknownTransactionError
from halfway.domain.ids import server_made
from halfway.domain.shard import ParkedEntry

if TYPE_CHECKING:
    from halfway.domain.principal import Permission, Principal
    from halfway.domain.records import Half
    from halfway.domain.shard import Entry, Unresolved
    from halfway.service.ports import Authority, Clock, HalfLog
    from halfway.service.requests import ServiceLimits
    from halfway.service.shards.shard_table import Shard, ShardTable


class Lookup:
    """Looks an id up in the shard that owns it, after a read barrier if need be."""

    def __init__(
        self, limits: ServiceLimits, authority: Authority, shards: ShardTable, half_log: HalfLog, clock: Clock
    ) -> None:
        """Keep the parts."""
        self._authority = authority
        self._limits = limits
        self._shards = shards
        self._half_log = half_log
        self._clock = clock

    async def locate(
        self, transaction_id: str, permission: Permission, *, principal: Principal, deadline: float
    ) -> tuple[Shard, Entry]:
        """Find an id for a caller in the shard that owns it.

        A transaction of another group is not there for a group's principal: the answer and its cost are those for
        an id that nobody uses.

        Raises:
            ForbiddenError: the caller may do this to no transaction; whether this one exists is not told.
            HalfwayError: as for `locate_any`.

        """
        self._authority.require(principal, permission)
        return await self._locate(transaction_id, principal.group, deadline=deadline)

    async def locate_any(self, transaction_id: str, *, deadline: float) -> tuple[Shard, Entry]:
        """Find an id in the shard that owns it.

        An id that is not known is looked for once more after a read barrier: the tail has then reached the end of
        half[s] as it was when this was called (docs/protocol.md#ownership-and-fencing).

        Raises:
            UnknownTransactionError, OutcomeExpiredError: it is certainly not pending; neither means "rolled back".
            ShardUnavailableError: its shard is not served here now.

        """
        return await self._locate(transaction_id, None, deadline=deadline)

    async def _locate(self, transaction_id: str, group: str | None, *, deadline: float) -> tuple[Shard, Entry]:
        shard = self._shards.of(transaction_id)
        entry = _seen(shard, transaction_id, group)
        if entry is not None:
            return shard, entry
        end = await self._half_log.half_end(shard.number, deadline=deadline)
        await self._shards.get(shard.number).tailed(end, deadline=deadline)
        shard = self._shards.get(shard.number)
        entry = _seen(shard, transaction_id, group)
        if entry is not None:
            return shard, entry
        made = server_made(transaction_id)
        horizon_s = self._limits.outcome_horizon_s
        if made is not None and made[1] < self._clock.now_ms() - horizon_s * 1000:
            raise OutcomeExpiredError(transaction_id, horizon_s=horizon_s)
        raise UnknownTransactionError(transaction_id)

    async def payload(self, shard: Shard, entry: Unresolved, *, deadline: float) -> Half:
        """Return the half of a prepared or parked transaction, read back by offset if it is not in memory."""
        payloads = self._shards.payloads
        half = payloads.get(entry.id)
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


def _seen(shard: Shard, transaction_id: str, group: str | None) -> Entry | None:
    """Return what a caller that is bound to a group, if any, sees of an id."""
    entry = shard.state.find(transaction_id)
    return None if entry is None or group not in (None, entry.group) else entry
