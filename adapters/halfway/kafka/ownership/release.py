"""Gives shards back: finishes what is in flight for them, then releases them.

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

Lost = Callable[[Collection[int]], None]
"""Called with shards that are dropped with something in flight."""

_AFTERWARDS_S: Final = 2.0


def leaving_time(deadline: float) -> float:
    """Return a deadline, on the loop's clock, that leaves some of the time for what comes afterwards."""
    return deadline - min(_AFTERWARDS_S, (deadline - asyncio.get_running_loop().time()) / 4)


class Left(Enum):
    """How a shard has left an incarnation."""

    FINISHED = auto()
    LATE = auto()
    WITH_ANOTHER = auto()
    """Another caller is giving it back and releases it, such as a revocation when a stop comes."""


async def give_back(
    incarnation: Incarnation, shards: Collection[int], listener: ShardListener, lost: Lost, deadline: float
) -> None:
    """Finish what is in flight for those of the shards that an incarnation owns, then release them.

    All of it by `deadline`, on the loop's clock. If anything is not finished in good time before it, nothing is
    released and the incarnation ends: a shard leaves it by a confirmed release, or with the incarnation.
    """
    owned = sorted(incarnation.shards.intersection(shards))
    finish_by = leaving_time(deadline)
    left = await asyncio.gather(*(finish(incarnation, shard, listener, lost, finish_by) for shard in owned))
    if incarnation.failed:
        return
    late = [shard for shard, how in zip(owned, left, strict=True) if how is Left.LATE]
    finished = [shard for shard, how in zip(owned, left, strict=True) if how is Left.FINISHED]
    if late:
        incarnation.fail(ProducerFailedError("release", f"shards {late} were not finished in time"))
    released = bool(finished) and await incarnation.release(finished, deadline)
    log.info("shards_given_back", shards=finished, unfinished=late, released=released)


async def finish(incarnation: Incarnation, shard: int, listener: ShardListener, lost: Lost, deadline: float) -> Left:
    """Let the service finish what is in flight for a shard, then drop it.

    It is dropped in the same step in which the service is done: nothing more must be appended to it.
    """
    try:
        async with asyncio.timeout_at(deadline):
            await listener.revoked(shard)
    except TimeoutError:
        log.warning("revoke_out_of_time", shard=shard)
    except Exception:
        log.exception("revoke_failed", shard=shard)
    else:
        return Left.FINISHED if incarnation.drop(shard) else Left.WITH_ANOTHER
    if not incarnation.drop(shard):
        return Left.WITH_ANOTHER
    if not incarnation.failed:  # else it has been told already
        lost([shard])
    return Left.LATE
