"""The figures of a shard for metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from halfway.service.shards.shard_table import Shard


class ShardStats(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one shard for metrics; ages in seconds, lags in records."""

    shard: int
    pending: int
    parked: int
    ended: int
    oldest_pending_s: float
    half_lag: int
    op_lag: int
    due: int
    """The number of transactions that a scan will look at some time: all pending ones."""
    strays: int


def stats_of(shard: Shard, now: int) -> ShardStats:
    """Return the figures of a shard; `now` is in ms since the epoch."""
    state = shard.state
    pending, parked, ended = state.counts
    oldest = state.oldest()
    return ShardStats(
        shard=shard.number,
        pending=pending,
        parked=parked,
        ended=ended,
        oldest_pending_s=0.0 if oldest is None else max(0, now - min(oldest.prepared_at, oldest.since)) / 1000,
        half_lag=state.half_tail - state.half_cursor,
        op_lag=state.op_tail - state.op_cursor,
        due=pending,
        strays=len(state.strays()),
    )
