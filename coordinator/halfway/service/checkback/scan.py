"""The scan: compares half with op for one shard and does what is due (docs/protocol.md#scan-and-check-back)."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Protocol

import structlog

from halfway.domain.errors import HalfwayError, OvertakenError
from halfway.domain.policy import Check, Park, ReAnchor, RollBack, decide, is_of_wrong_clock, reanchor_distance
from halfway.domain.records import CheckMode
from halfway.domain.shard import Pending, Unresolved
from halfway.domain.transaction import Action, Cause
from halfway.service.ports import Cursors
from halfway.service.resolve.changes import Act
from halfway.service.resolve.resolver import WRITE_LIMIT_S
from halfway.service.shards.check_schedule import jitter

if TYPE_CHECKING:
    from halfway.domain.policy import Decision
    from halfway.service.checkback.dispatcher import CheckDispatcher
    from halfway.service.ports import Clock, CursorStore, Observer
    from halfway.service.requests import ServiceLimits
    from halfway.service.resolve.resolver import Resolver
    from halfway.service.shards.groups import Groups
    from halfway.service.shards.shard_table import Shard, ShardTable

log = structlog.get_logger(__name__)

_FORGOTTEN_AT_ONCE = 10_000
_RETRY_MS = 1000
_YIELD_EVERY = 200


class Step(Protocol):
    """A write for a transaction."""

    async def __call__(self, transaction_id: str, *, deadline: float) -> None:
        """Write it, or raise."""


class Scan:
    """One scan at a time for each shard; the scheduler calls it."""

    def __init__(
        self,
        limits: ServiceLimits,
        shards: ShardTable,
        groups: Groups,
        resolver: Resolver,
        checks: CheckDispatcher,
        cursors: CursorStore,
        clock: Clock,
        observer: Observer,
    ) -> None:
        """Keep the parts; nothing is started."""
        self._limits = limits
        self._shards = shards
        self._groups = groups
        self._resolver = resolver
        self._checks = checks
        self._cursors = cursors
        self._clock = clock
        self._observer = observer
        self._writing: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._remember_until = float("-inf")
        self._clock_set_at = 0

    def clock_was_set(self) -> None:
        """Look at everything again by the new time; forget nothing by age for one outcome horizon.

        If the clock was set ahead, or if outcomes were written while it was behind, recent outcomes seem old.
        """
        self._remember_until = asyncio.get_running_loop().time() + self._limits.outcome_horizon_s
        self._clock_set_at = self._clock.now_ms()
        self._checks.clock_was_set(self._clock_set_at)
        for shard in self._shards.all():
            for entry in shard.state.pending():
                shard.agenda.put(entry.id, 0)

    async def scan(self, number: int, now: int) -> None:
        """Compare half with op, and act on the difference.

        1. Strays in half are corrected.
        2. Commit verdicts that could not be written yet are recorded.
        3. The policy decides on each transaction that is due: offer a check, give up, or re-anchor.
        4. The oldest halves are re-anchored if they hold the cursor back too far.
        5. Old outcomes are forgotten.
        6. The cursors are committed.

        Each write is a task of its own: a write that waits holds up no other transaction.
        """
        shard = self._shards.find(number)
        if shard is None or shard.leaving:
            return
        self._correct_strays(shard)
        self._checks.verdicts.record(number)
        await self._due(shard, now)
        self._behind(shard, now)
        await self._forget(shard, now)
        if self._shards.find(number) is shard:
            await self._commit_cursors(shard)

    def _correct_strays(self, shard: Shard) -> None:
        """Step 1: correct the stray halves."""
        for transaction_id, _ in shard.state.strays()[: self._limits.scan_batch]:
            self._carry_out(shard, transaction_id, self._resolver.correct)

    async def _commit_cursors(self, shard: Shard) -> None:
        """Step 6: commit the cursors; the store leaves alone what has not moved."""
        await self._cursors.commit({shard.number: Cursors(half=shard.state.half_cursor, op=shard.state.op_cursor)})

    def _carry_out(self, shard: Shard, transaction_id: str, step: Step) -> None:
        """Start a write for a transaction, unless one is under way already."""
        if transaction_id in self._writing or len(self._writing) >= self._limits.scan_batch:
            shard.agenda.put(transaction_id, self._clock.now_ms() + _RETRY_MS)
            return
        self._writing.add(transaction_id)
        task = asyncio.create_task(self._step(shard.number, transaction_id, step))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _step(self, number: int, transaction_id: str, step: Step) -> None:
        try:
            await step(transaction_id, deadline=asyncio.get_running_loop().time() + WRITE_LIMIT_S)
        except OvertakenError:
            log.info("policy_overtaken", shard=number, id=transaction_id)
        except HalfwayError as error:
            log.info("scan_step_failed", shard=number, id=transaction_id, error=error.code, detail=error.detail)
        except Exception:
            log.exception("scan_step_broken", shard=number, id=transaction_id)
        finally:
            self._writing.discard(transaction_id)
            shard = self._shards.find(number)
            if shard is not None and isinstance(shard.state.unresolved(transaction_id), Pending):
                shard.agenda.put(transaction_id, self._clock.now_ms() + _RETRY_MS)

    def _decide(self, shard: Shard, entry: Pending, now: int) -> Decision:
        return decide(
            self._groups.policy(entry.group),
            entry,
            now=now,
            end_offset=shard.state.half_tail,
            reanchor_after=reanchor_distance(self._limits.reanchor_after, len(shard.state.halves)),
            jitter=jitter(entry),
            answer_by=self._answer_by(entry, now),
        )

    def _answer_by(self, entry: Pending, now: int) -> int:
        """Return until when the last check may be answered: a lease keeps its time even if the clock was set."""
        if not entry.attempts or entry.checked_at is None or entry.leased_until == 0:  # 0: it was answered
            return 0
        group = self._groups.find(entry.group)
        if group is None or group.mode is not CheckMode.PULL:
            return 0
        leased_at = 0 if is_of_wrong_clock(entry, now) else entry.checked_at
        return max(leased_at, self._clock_set_at) + round(self._limits.lease_s * 1000)

    async def _due(self, shard: Shard, now: int) -> None:
        """Step 3: look at everything that is due now."""
        looked = 0
        while (name := shard.agenda.pop_up_to(now)) is not None:
            looked += 1
            if looked % _YIELD_EVERY == 0:
                await asyncio.sleep(0)
                now = min(now, self._clock.now_ms())  # what a clock that was set back puts off is not due again
            entry = shard.state.unresolved(name)
            if not isinstance(entry, Pending):
                continue
            if name in self._shards.claims or self._checks.verdicts.keeps(name):
                shard.agenda.put(name, now + _RETRY_MS)
                continue
            decision = self._decide(shard, entry, now)
            if isinstance(decision, Check):
                self._checks.offer(shard, entry)
            elif isinstance(decision, Park | RollBack):
                self._carry_out(shard, name, partial(self._give_up, entry.group, decision))
            elif isinstance(decision, ReAnchor):
                self._carry_out(shard, name, self._resolver.reanchor)
            else:
                shard.agenda.put(name, decision.until)

    def _behind(self, shard: Shard, now: int) -> None:
        """Step 4: re-anchor the halves that hold the cursor back by more than `reanchor_after`, due or not."""
        oldest = shard.state.oldest()
        if oldest is None or not isinstance(self._decide(shard, oldest, now), ReAnchor):
            return
        for entry in shard.state.oldest_first(self._limits.scan_batch):
            if not isinstance(self._decide(shard, entry, now), ReAnchor):
                return
            self._carry_out(shard, entry.id, self._resolver.reanchor)

    async def _give_up(self, group: str, decision: Park | RollBack, transaction_id: str, *, deadline: float) -> None:
        """Park or roll back, if the policy still decides so when it is written."""
        action = Action.PARK if isinstance(decision, Park) else Action.ROLLBACK
        still = partial(self._still, decision)
        act = Act(action=action, cause=Cause.POLICY, remark=decision.reason, still=still)
        ended = await self._resolver.resolve(transaction_id, act, deadline=deadline)
        if ended.changed:
            log.warning("gave_up", id=transaction_id, group=group, action=action, reason=decision.reason)

    def _still(self, decision: Decision, entry: Unresolved) -> bool:
        """Whether the policy decides the same as before: a verdict, a check under way or an end may have come first."""
        shard = self._shards.find(self._shards.number_of(entry.id))
        if shard is None or not isinstance(entry, Pending) or self._checks.awaits(entry):
            return False
        return self._decide(shard, entry, self._clock.now_ms()) == decision

    async def _forget_all(self, shard: Shard, before: int, at_most: int | None) -> int:
        """Forget a slice at a time, yielding to the event loop in between."""
        total = 0
        while gone := shard.state.forget(before, at_most=at_most, limit=_FORGOTTEN_AT_ONCE):
            total += gone
            await asyncio.sleep(0)
        return total

    async def _forget(self, shard: Shard, now: int) -> None:
        """Step 5: forget the outcomes that are older than the horizon, or too many."""
        before = now - round(self._limits.outcome_horizon_s * 1000)
        _, _, ended = shard.state.counts
        if asyncio.get_running_loop().time() >= self._remember_until:
            await self._forget_all(shard, before, None)
        gone = await self._forget_all(shard, 0, self._limits.max_outcomes_per_shard)
        if gone:
            self._observer.horizon_shortened(shard.number, gone)
            log.warning("outcome_horizon_shortened", shard=shard.number, forgotten=gone, remembered=ended)
