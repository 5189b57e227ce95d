"""Releases shards, after the work in flight for them is finished.

See docs/protocol.md#ownership-and-fencing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Final

import structlog

from halfway.kafka.clients.transactional_producer import ProducerFailedError
from halfway.kafka.ownership.incarnation import Incarnation
from halfway.service.ports import ShardListener

log = structlog.get_logger()

OnLost = Callable[[Collection[int]], None]
"""Called with shards that are dropped although work for them is in flight."""

_RESERVE_S: Final = 2.0


def reserve_time(deadline: float) -> float:
    """Return an earlier deadline, on the loop's clock, that leaves some time for the steps afterwards."""
    return deadline - min(_RESERVE_S, (deadline - asyncio.get_running_loop().time()) / 4)


class Drop(Enum):
    """How `finish` has dropped a shard from an incarnation."""

    FINISHED = auto()
    LATE = auto()
    BY_ANOTHER_CALLER = auto()
    """Another caller has dropped it and releases it, for example a revocation during a stop."""


async def give_back(
    incarnation: Incarnation, shards: Collection[int], listener: ShardListener, on_lost: OnLost, deadline: float
) -> None:
    """Finish the work in flight for the shards that an incarnation owns, then release them by `deadline`.

    `deadline` is on the loop's clock. If a shard is not finished early enough, nothing is released and the incarnation
    ends: a shard leaves an incarnation by a confirmed release, or with the incarnation.
    """
    owned = sorted(incarnation.shards.intersection(shards))
    finish_by = reserve_time(deadline)
    drops = await asyncio.gather(*(finish(incarnation, shard, listener, on_lost, finish_by) for shard in owned))
    if incarnation.failed:
        return
    late = [shard for shard, drop in zip(owned, drops, strict=True) if drop is Drop.LATE]
    finished = [shard for shard, drop in zip(owned, drops, strict=True) if drop is Drop.FINISHED]
    if late:
        incarnation.fail(ProducerFailedError("release", f"shards {late} were not finished in time"))
    released = bool(finished) and await incarnation.release(finished, deadline)
    log.info("shards_given_back", shards=finished, unfinished=late, released=released)


async def finish(
    incarnation: Incarnation, shard: int, listener: ShardListener, on_lost: OnLost, deadline: float
) -> Drop:
    """Wait until the service has finished the work in flight for a shard, then drop it.

    The shard is dropped in the same turn of the loop, so that nothing more is appended to it.
    """
    try:
        async with asyncio.timeout_at(deadline):
            await listener.revoked(shard)
    except TimeoutError:
        log.warning("revoke_out_of_time", shard=shard)
    except Exception:
        log.exception("revoke_failed", shard=shard)
    else:
        return Drop.FINISHED if incarnation.drop(shard) else Drop.BY_ANOTHER_CALLER
    if not incarnation.drop(shard):
        return Drop.BY_ANOTHER_CALLER
    if not incarnation.failed:  # else the failure has reported it already
        on_lost([shard])
    return Drop.LATE
