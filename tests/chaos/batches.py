"""Collects the calls of several producers for one `POST /v1/batch`; each gets the answer to its own item."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Literal

from tests.chaos.answer import NOTHING, Answer

Kind = Literal["prepare", "end"]
Post = Callable[[str, Mapping[str, list[object]]], Awaitable[Answer]]
"""Sends a batch of one group."""

MOST: Final = 300
GATHERED_S: Final = (0.02, 0.6)
BROKEN_OFF: Final = 0.02
"""How many batches lose their connection in flight."""
_OK: Final = 200


class Batches:
    """One batch of each group is open at a time; calls join it until it is full or its time is over."""

    def __init__(self, post: Post, chance: random.Random) -> None:
        self._post = post
        self._chance = chance
        self._open: dict[str, _Batch] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self.sent = 0

    async def send(self, group: str, kind: Kind, item: object) -> Answer:
        """Send an item with others of its group; return its own answer, or that of the whole batch."""
        batch = self._open.get(group)
        if batch is None:
            batch = self._open[group] = _Batch()
            task = asyncio.create_task(self._gather(group, batch))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        answer = batch.add(kind, item)
        if batch.size >= MOST:
            batch.full.set()
            del self._open[group]
        return await answer

    async def _gather(self, group: str, batch: _Batch) -> None:
        try:
            await asyncio.wait_for(batch.full.wait(), self._chance.uniform(*GATHERED_S))
        except TimeoutError:
            if self._open.get(group) is batch:
                del self._open[group]
        self.sent += 1
        posting = asyncio.ensure_future(self._post(group, batch.body))
        if self._chance.random() < BROKEN_OFF:
            await asyncio.wait([posting], timeout=self._chance.uniform(0, 0.1))
            posting.cancel()
        try:
            batch.answer(await posting)
        except asyncio.CancelledError:
            if not posting.cancelled():
                raise
            batch.answer(NOTHING)


class _Batch:
    def __init__(self) -> None:
        self.body: dict[str, list[object]] = {"prepare": [], "end": []}
        self.full = asyncio.Event()
        self._waiting: dict[Kind, list[asyncio.Future[Answer]]] = {"prepare": [], "end": []}

    @property
    def size(self) -> int:
        return sum(map(len, self.body.values()))

    def add(self, kind: Kind, item: object) -> asyncio.Future[Answer]:
        self.body[kind].append(item)
        self._waiting[kind].append(waiting := asyncio.get_running_loop().create_future())
        return waiting

    def answer(self, answer: Answer) -> None:
        """Give each item its own answer, or that of the whole batch if it has none."""
        for kind, waiting in self._waiting.items():
            items = answer.body[kind] if answer.status == _OK else [None] * len(waiting)
            for waiter, item in zip(waiting, items, strict=True):
                if not waiter.done():
                    waiter.set_result(answer if item is None else _of(item))


def _of(item: Mapping[str, Any]) -> Answer:
    return Answer(status=item["status"], body=item.get("body") or item.get("problem") or {})
