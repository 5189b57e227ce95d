"""The scan: compares half with op for one shard and does what is due (DESIGN section 6)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from halfway.domain.errors import HalfwayError
from halfway.domain.policy import Check, Park, ReAnchor, RollBack, decide
from halfway.domain.shard import Pending
from halfway.domain.transaction import Action, Cause
from halfway.service.ending import WRITE_LIMIT_S, Act
from halfway.service.ports import Cursors
from halfway.service.timing import jitter

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from halfway.domain.policy import Decision
    from halfway.service.checks import CheckDesk
    from halfway.service.ending import Ending
    from halfway.service.groups import Groups
    from halfway.service.ports import Clock, CursorStore, Observer
    from halfway.service.requests import ServiceLimits
    from halfway.service.shards import Shard, ShardTable

log = structlog.get_logger(__name__)

_RETRY_MS = 1000
_YIELD_EVERY = 200


class Scanning:
    """One scan at a time for each shard; the scheduler calls it."""

    def __init__(
        self,
        limits: ServiceLimits,
        shards: ShardTable,
        groups: Groups,
        ending: Ending,
        checks: CheckDesk,
        cursors: CursorStore,
        clock: Clock,
        observer: Observer,
    ) -> None:
        """Keep the parts; nothing is started."""
        self._limits = limits
        self._shards = shards
        self._groups = groups
        self._ending = ending
        self._checks = checks
        self._cursors = cursors
        self._clock = clock
        self._observer = observer

    async def scan(self, number: int, now: int) -> None:
        """Correct strays, do what is due, write old halves again, forget old outcomes, commit the cursors."""
        shard = self._shards.find(number)
        if shard is None or shard.leaving:
            return
        deadline = asyncio.get_running_loop().time() + WRITE_LIMIT_S
        work: list[Coroutine[object, object, object]] = [
            self._ending.correct(transaction_id, deadline=deadline)
            for transaction_id, _ in shard.state.strays()[: self._limits.scan_batch]
        ]
        work += [self._checks.record_verdict(shard, name) for name in list(shard.unrecorded_verdicts)]
        work += await self._due(shard, now, deadline)
        work += self._behind(shard, now, deadline)
        for result in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(result, HalfwayError):
                log.info("scan_step_failed", shard=number, error=result.code, detail=result.detail)
            elif isinstance(result, BaseException):
                log.error("scan_step_broken", shard=number, exc_info=result)
        self._forget(shard, now)
        if self._shards.find(number) is shard:
            await self._cursors.commit({number: Cursors(half=shard.state.half_cursor, op=shard.state.op_cursor)})

    def _decide(self, shard: Shard, entry: Pending, now: int) -> Decision:
        return decide(
            self._groups.policy(entry.group),
            entry,
            now=now,
            end_offset=shard.state.half_tail,
            reanchor_after=self._limits.reanchor_after,
            jitter=jitter(entry),
        )

    async def _due(self, shard: Shard, now: int, deadline: float) -> list[Coroutine[object, object, object]]:
        """Look at everything that is due now; return what has to be written."""
        work: list[Coroutine[object, object, object]] = []
        looked = 0
        while len(work) < self._limits.scan_batch and (name := shard.agenda.pop_up_to(now)) is not None:
            looked += 1
            if looked % _YIELD_EVERY == 0:
                await asyncio.sleep(0)
            entry = shard.state.find(name)
            if not isinstance(entry, Pending):
                continue
            if name in self._shards.claims:
                shard.agenda.put(name, now + _RETRY_MS)
                continue
            decision = self._decide(shard, entry, now)
            if isinstance(decision, Check):
                self._checks.offer(shard, entry)
            elif isinstance(decision, Park | RollBack):
                work.append(self._give_up(shard, entry, decision, deadline))
            elif isinstance(decision, ReAnchor):
                work.append(self._write_again(shard, entry, deadline))
            else:
                shard.agenda.put(name, decision.until)
        return work

    def _behind(self, shard: Shard, now: int, deadline: float) -> list[Coroutine[object, object, object]]:
        """Find the halves that hold the cursor back by more than `reanchor_after` records, whatever is due."""
        found: list[Coroutine[object, object, object]] = []
        oldest = shard.state.oldest()
        if oldest is None or not isinstance(self._decide(shard, oldest, now), ReAnchor):
            return found
        for entry in shard.state.oldest_first(self._limits.scan_batch):
            if not isinstance(self._decide(shard, entry, now), ReAnchor):
                break
            found.append(self._write_again(shard, entry, deadline))
        return found

    async def _write_again(self, shard: Shard, entry: Pending, deadline: float) -> None:
        try:
            await self._ending.write_again(entry.id, deadline=deadline)
        finally:
            if isinstance(shard.state.find(entry.id), Pending):
                shard.agenda.put(entry.id, self._clock.now_ms() + _RETRY_MS)

    async def _give_up(self, shard: Shard, entry: Pending, decision: Park | RollBack, deadline: float) -> None:
        action = Action.PARK if isinstance(decision, Park) else Action.ROLLBACK
        act = Act(action=action, cause=Cause.POLICY, remark=decision.reason)
        try:
            await self._ending.act(entry.id, act, deadline=deadline)
            log.warning("gave_up", id=entry.id, group=entry.group, action=action, reason=decision.reason)
        finally:
            if isinstance(shard.state.find(entry.id), Pending):
                shard.agenda.put(entry.id, self._clock.now_ms() + _RETRY_MS)

    def _forget(self, shard: Shard, now: int) -> None:
        before = now - round(self._limits.outcome_horizon_s * 1000)
        _, _, ended = shard.state.counts
        shard.state.forget(before)
        gone = shard.state.forget(0, at_most=self._limits.max_outcomes_per_shard)
        if gone:
            self._observer.horizon_shortened(shard.number, gone)
            log.warning("outcome_horizon_shortened", shard=shard.number, forgotten=gone, remembered=ended)
