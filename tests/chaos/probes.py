"""Probes for each shard whether it is served, and records changes in the history."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Final

from checker.history import HistoryWriter, Serving
from halfway.protocol.ids import shard_of
from tests.chaos.caller import Caller
from tests.chaos.coordinators import Instance

_INTERVAL_S: Final = 1.0
_ANSWERED: Final = (404, 410)
"""The owner's answer for an id that was never prepared."""
_AWAY: Final = ("0", "503 shard_unavailable")
"""No answer, or one from an instance that does not find the owner; other answers say nothing about the shard."""


class Probes:
    """One probe after another for each shard; it is unserved if no coordinator gets an answer of its owner."""

    def __init__(self, caller: Caller, instances: Sequence[Instance], history: HistoryWriter, shards: int) -> None:
        self._caller = caller
        self._instances = instances
        self._history = history
        self._shards = shards
        self.away: set[int] = set()
        """The shards that are not served according to the last answers."""

    async def run(self) -> None:
        """Probe until cancelled."""
        async with asyncio.TaskGroup() as group:
            for shard in range(self._shards):
                group.create_task(self._watch(shard))

    async def _watch(self, shard: int) -> None:
        name = next(name for n in count() if shard_of(name := f"probe-{n}", self._shards) == shard)
        turn = shard
        while True:
            await asyncio.sleep(_INTERVAL_S)
            codes = []
            for _ in self._instances:
                turn += 1
                instance = self._instances[turn % len(self._instances)]
                answer = await self._caller.ask(instance, f"/transactions/{name}")
                codes.append(f"{answer.status} {answer.text('error_code') or ''}".strip())
                if answer.status in _ANSWERED:
                    self._note(shard, codes, serving=True)
                    break
            else:
                if all(code in _AWAY for code in codes):
                    self._note(shard, codes, serving=False)

    def _note(self, shard: int, codes: Sequence[str], *, serving: bool) -> None:
        if serving == (shard in self.away):
            self._history.write(Serving(shard=shard, serving=serving, why=", ".join(codes)))
            (self.away.discard if serving else self.away.add)(shard)
