"""The ports that answer by replies, asked with a future for each."""

import asyncio
from collections.abc import Callable
from functools import partial
from weakref import WeakKeyDictionary

from halfway.coordinator.ports import HalfLog, Lane, LaneAnswers, LaneWrite, Written
from halfway.kafka.clients.threads import answer_all
from halfway.protocol.records import Half

_LISTENED: WeakKeyDictionary[Lane, dict[int, tuple[LaneWrite, asyncio.Future[Written]]]] = WeakKeyDictionary()


def submitted(lane: Lane, write: LaneWrite) -> asyncio.Future[Written]:
    """Submit one write to a lane whose answers nobody else takes."""
    waiting = _LISTENED.get(lane)
    if waiting is None:
        waiting = _LISTENED[lane] = {}
        lane.listen(partial(_take_answers, waiting))
    future: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
    waiting[id(write)] = write, future
    lane.submit([write])
    return future


def _take_answers(waiting: dict[int, tuple[LaneWrite, asyncio.Future[Written]]], answers: LaneAnswers) -> None:
    answer_all((waiting[id(write)][1], result) for write, result in answers)


def appended(half_log: HalfLog, shard: int, half: Half, *, deadline: float) -> asyncio.Future[int]:
    """Append one half."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    half_log.append(shard, [(half, future)], answer_all, deadline=deadline)
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
