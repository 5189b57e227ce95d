"""The scan: compares half with op for one shard, and acts on the difference (docs/protocol.md#scan-and-check-back)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import islice

import structlog

from halfway.coordinator.changes import Record
from halfway.coordinator.checkback.dispatcher import CheckDispatcher
from halfway.coordinator.ending import WRITE_LIMIT_S, Ending
from halfway.coordinator.logging import LogSummary
from halfway.coordinator.ports import Clock, Cursors, CursorStore, Observer
from halfway.coordinator.requests import ServiceLimits
from halfway.coordinator.shards.groups import Groups, jitter, look_at
from halfway.coordinator.shards.shard import Shard
from halfway.coordinator.shards.shard_table import ShardTable
from halfway.protocol.entries import Pending, Unresolved
from halfway.protocol.errors import HalfwayError, OvertakenError
from halfway.protocol.policy import (
    Check,
    Decision,
    Park,
    ReAnchor,
    RollBack,
    decide,
    is_of_wrong_clock,
    reanchor_distance,
)
from halfway.protocol.records import CheckMode
from halfway.protocol.transactions import Action

log = structlog.get_logger(__name__)

_FORGOTTEN_AT_ONCE = 10_000
_RETRY_MS = 1000
_YIELD_EVERY = 200


Write = Callable[..., Awaitable[None]]
"""Writes something for one transaction by a deadline, or raises a HalfwayError."""


class Scan:
    """Scans shards. The scheduler calls it, for each shard one scan at a time."""

    def __init__(
        self,
        limits: ServiceLimits,
        shards: ShardTable,
        groups: Groups,
        ending: Ending,
        checks: CheckDispatcher,
        cursors: CursorStore,
        clock: Clock,
        observer: Observer,
    ) -> None:
        self._limits = limits
        self._shards = shards
        self._groups = groups
        self._ending = ending
        self._checks = checks
        self._cursors = cursors
        self._clock = clock
        self._observer = observer
        self._gave_up = LogSummary(log, "warning", "gave_up")
        self._overtaken = LogSummary(log, "info", "policy_overtaken")
        self._failed = LogSummary(log, "info", "scan_step_failed")
        self._writing: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._remember_until = float("-inf")
        self._clock_set_at = 0
        self._scanned_at = 0

    def clock_was_set(self) -> None:
        """Look at every transaction again at the new time; forget no outcome by age for one outcome horizon.

        If the clock was set ahead, or if outcomes were written while it was behind, recent outcomes look old. So do
        the answers of checks: before a rollback each group is asked again, unless a worker has its check just now.
        """
        self._remember_until = asyncio.get_running_loop().time() + self._limits.outcome_horizon_s
        self._clock_set_at = self._clock.now_ms()
        self._checks.clock_was_set(self._clock_set_at)
        for shard in self._shards.all():
            for entry in shard.state.pending():
                if (entry.leased_until or 0) <= self._scanned_at:
                    entry.ask_afresh()
                shard.agenda.put(entry.id, 0)

    async def scan(self, number: int, now: int) -> None:
        """Compare half with op, and act on the difference.

        1. What the log has lost is written again, and strays in half are corrected.
        2. Commit verdicts that could not be written yet are recorded.
        3. Transactions of changed groups are planned again. The policy decides on each transaction that is due: offer a
           check, give up, or re-anchor.
        4. The oldest halves are re-anchored if they hold the cursor back too far.
        5. Old outcomes are forgotten.
        6. The cursors are committed.

        Each write is a task of its own, so a write that waits delays no other transaction.
        """
        shard = self._shards.find(number)
        if shard is None or shard.leaving:
            return
        self._scanned_at = now
        self._write_lost(shard)
        self._correct_strays(shard)
        self._checks.verdicts.record(number)
        await self._plan_changed_groups(shard)
        await self._process_due(shard, now)
        self._reanchor_oldest(shard, now)
        await self._forget(shard, now)
        if self._shards.find(number) is shard:
            await self._commit_cursors(shard)

    def _write_lost(self, shard: Shard) -> None:
        """Step 1: write again what the log has lost."""
        for transaction_id in list(islice(shard.unwritten, self._limits.scan_batch)):
            if shard.state.find(transaction_id) is None:
                del shard.unwritten[transaction_id]
            elif transaction_id not in self._writing:
                self._carry_out(shard, transaction_id, partial(self._write_again, Record.LOST))

    def _correct_strays(self, shard: Shard) -> None:
        """Step 1: correct the stray halves."""
        for transaction_id, _ in shard.state.strays()[: self._limits.scan_batch]:
            self._carry_out(shard, transaction_id, partial(self._write_again, Record.STRAY))

    async def _commit_cursors(self, shard: Shard) -> None:
        """Step 6: commit the cursors. The store skips cursors that have not moved."""
        op = min(shard.state.op_cursor, shard.outcomes.start(asyncio.get_running_loop().time()))
        cursors = Cursors(half=shard.state.half_cursor, op=op, ends=shard.outcomes.ends)
        await self._cursors.commit({shard.number: cursors})

    def _carry_out(self, shard: Shard, transaction_id: str, write: Write) -> None:
        """Start a write for a transaction, unless one is already in progress."""
        if transaction_id in self._writing or len(self._writing) >= self._limits.scan_batch:
            shard.agenda.put(transaction_id, self._clock.now_ms() + _RETRY_MS)
            return
        self._writing.add(transaction_id)
        task = asyncio.create_task(self._run(shard.number, transaction_id, write))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, number: int, transaction_id: str, write: Write) -> None:
        try:
            await write(transaction_id, deadline=asyncio.get_running_loop().time() + WRITE_LIMIT_S)
        except OvertakenError:
            self._overtaken.note({"shard": number}, id=transaction_id)
        except HalfwayError as error:
            self._failed.note({"shard": number, "error": error.code}, id=transaction_id, detail=error.detail)
        except Exception:
            log.exception("scan_step_broken", shard=number, id=transaction_id)
        finally:
            self._writing.discard(transaction_id)
            shard = self._shards.find(number)
            if shard is not None and isinstance(shard.state.unresolved(transaction_id), Pending):
                shard.agenda.put(transaction_id, self._clock.now_ms() + _RETRY_MS)

    async def _write_again(self, record: Record, transaction_id: str, *, deadline: float) -> None:
        await self._ending.write_again(transaction_id, record, deadline=deadline)

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
        """Return until when the last check may be answered. A lease keeps its duration even if the clock was set."""
        if not entry.attempts or entry.checked_at is None or entry.leased_until == 0:  # 0: it was answered
            return 0
        group = self._groups.find(entry.group)
        if group is None or group.mode is not CheckMode.PULL:
            return 0
        leased_at = 0 if is_of_wrong_clock(entry, now) else entry.checked_at
        return max(leased_at, self._clock_set_at) + round(self._limits.lease_s * 1000)

    async def _plan_changed_groups(self, shard: Shard) -> None:
        """Step 3: look sooner at what a changed policy, mode or endpoint makes due sooner."""
        changed = self._changed_groups(shard)
        if not changed:
            return
        now = self._clock.now_ms()
        for count, entry in enumerate(shard.state.pending(), 1):
            if count % _YIELD_EVERY == 0:
                await asyncio.sleep(0)
            has_moved = changed.get(entry.group)
            if has_moved is None:
                continue
            if has_moved:
                entry.attempts = entry.checks  # the back-off of those that could not be sent is over
            at = look_at(self._groups, entry, now)
            if entry.look_at is None or at < entry.look_at:
                shard.agenda.put(entry.id, at)

    def _changed_groups(self, shard: Shard) -> dict[str, bool]:
        """Return the groups of pending transactions that have changed since the last scan of a shard.

        The value is whether the mode or the endpoints have changed.
        """
        planned_by = shard.planned_by
        changed: dict[str, bool] = {}
        for name in shard.state.group_counts:
            group, before = self._groups.find(name), planned_by.get(name)
            if name in planned_by and group == before:
                continue
            changed[name] = False  # if it is new here, it may have changed since the prepare
            if group is not None and before is not None and (group.mode, group.urls) != (before.mode, before.urls):
                changed[name] = True
                self._checks.endpoints_changed(name)
            planned_by[name] = group
        for name in [name for name in planned_by if name not in shard.state.group_counts]:
            if self._groups.find(name) is None:
                del planned_by[name]
        return changed

    async def _process_due(self, shard: Shard, now: int) -> None:
        """Step 3: decide on every transaction that is due."""
        count = 0
        while (name := shard.agenda.pop_up_to(now)) is not None:
            count += 1
            if count % _YIELD_EVERY == 0:
                await asyncio.sleep(0)
                now = min(now, self._clock.now_ms())  # if the clock was set back, what is put off is not due again
            entry = shard.state.unresolved(name)
            if not isinstance(entry, Pending):
                continue
            if name in self._shards.claims or self._checks.verdicts.keeps(name):
                shard.agenda.put(name, now + _RETRY_MS)
                continue
            decision = self._decide(shard, entry, now)
            if isinstance(decision, Check):
                if decision.afresh:
                    entry.ask_afresh()
                self._checks.offer(shard, entry)
            elif isinstance(decision, Park | RollBack):
                self._carry_out(shard, name, partial(self._give_up, entry.group, decision, entry.last_error))
            elif isinstance(decision, ReAnchor):
                self._carry_out(shard, name, partial(self._write_again, Record.HALF))
            else:
                shard.agenda.put(name, decision.until)

    def _reanchor_oldest(self, shard: Shard, now: int) -> None:
        """Step 4: re-anchor the halves that hold the cursor back too far, even if they are not due."""
        oldest = shard.state.oldest()
        if oldest is None or not isinstance(self._decide(shard, oldest, now), ReAnchor):
            return
        for entry in shard.state.oldest_first(self._limits.scan_batch):
            if not isinstance(self._decide(shard, entry, now), ReAnchor):
                return
            self._carry_out(shard, entry.id, partial(self._write_again, Record.HALF))

    async def _give_up(
        self, group: str, decision: Park | RollBack, last_error: str | None, transaction_id: str, *, deadline: float
    ) -> None:
        """Park or roll back a transaction, if the policy still decides so at the time of the write.

        The reason for parking ends with the last error: a parked transaction has no `last_error` of its own.
        """
        action, reason = Action.ROLLBACK, decision.reason
        if isinstance(decision, Park):
            action = Action.PARK
            if last_error is not None:
                reason = f"{reason}; last error: {last_error}"
        result = await self._ending.give_up(
            transaction_id, action, reason, partial(self._still_decides, decision), deadline=deadline
        )
        if result.changed:
            self._gave_up.note({"group": group, "action": action.value}, id=transaction_id, reason=reason)

    def _still_decides(self, decision: Decision, entry: Unresolved) -> bool:
        """Return whether the policy still decides the same: a verdict, a new check or an end may have come first."""
        shard = self._shards.find(self._shards.number_of(entry.id))
        if shard is None or not isinstance(entry, Pending) or self._checks.blocks_policy(entry):
            return False
        return self._decide(shard, entry, self._clock.now_ms()) == decision

    async def _forget_all(self, shard: Shard, before: int, at_most: int | None) -> int:
        """Forget outcomes in slices, and let the event loop run in between; return how many."""
        total = 0
        while forgotten := shard.state.forget(
            before, at_most=at_most, limit=_FORGOTTEN_AT_ONCE, claimed=self._shards.claims
        ):
            total += forgotten
            await asyncio.sleep(0)
        return total

    async def _forget(self, shard: Shard, now: int) -> None:
        """Step 5: forget the outcomes that are older than the horizon, and the oldest if there are too many."""
        before = now - round(self._limits.outcome_horizon_s * 1000)
        _, _, ended = shard.state.counts
        if asyncio.get_running_loop().time() >= self._remember_until:
            await self._forget_all(shard, before, None)
        forgotten = await self._forget_all(shard, 0, self._limits.max_outcomes_per_shard)
        if forgotten:
            self._observer.horizon_shortened(shard.number, forgotten)
            log.warning("outcome_horizon_shortened", shard=shard.number, forgotten=forgotten, remembered=ended)
