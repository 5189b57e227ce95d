"""The ports that answer by replies, asked with a future for each."""

import asyncio
from collections.abc import Callable

from halfway.domain.records import Half
from halfway.service.ports import HalfLog, Lane, LaneWrite, Written


def submitted(lane: Lane, write: LaneWrite) -> asyncio.Future[Written]:
    """Submit one write."""
    future: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
    lane.submit([(write, future)])
    return future


def appended(half_log: HalfLog, shard: int, half: Half, *, deadline: float) -> asyncio.Future[int]:
    """Append one half."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    half_log.append(shard, [(half, future)], deadline=deadline)
    return future


def once(go_on: asyncio.Event, call: Callable[..., None], began: asyncio.Event | None = None) -> Callable[..., None]:
    """Return a call that is made once `go_on` is set; it sets `began` first."""

    async def wait(*args: object, **named: object) -> None:
        await go_on.wait()
        call(*args, **named)

    waiting: set[asyncio.Task[None]] = set()

    def begin(*args: object, **named: object) -> None:
        if began is not None:
            began.set()
        waiting.add(asyncio.ensure_future(wait(*args, **named)))

    return begin
