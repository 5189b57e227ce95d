"""Check-back: asks producer groups what became of their transactions (DESIGN section 6).

Groups are isolated: each has its own places for checks in flight, its own bounded queue and its own circuit breaker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

import structlog

from halfway.domain.errors import AlreadyEndedError, HalfwayError, InvalidRequestError, NotPendingError, OverloadedError
from halfway.domain.records import CheckMode, Group
from halfway.domain.shard import Ended, Entry, ParkedEntry, Pending
from halfway.domain.transaction import Action, Cause, Outcome, State, transition
from halfway.service.breaker import Breaker
from halfway.service.ending import WRITE_LIMIT_S, Act
from halfway.service.ports import CheckReply, CheckRequest
from halfway.service.requests import End, EndResult, LeasedCheck, TransactionView
from halfway.service.timing import look_at
from halfway.service.views import view

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from halfway.service.ending import Ending
    from halfway.service.groups import Groups
    from halfway.service.ports import CheckCaller, Clock, Observer
    from halfway.service.requests import ServiceLimits
    from halfway.service.shards import Shard, ShardTable

log = structlog.get_logger(__name__)

_ACTIONS = {Outcome.COMMIT: Action.COMMIT, Outcome.ROLLBACK: Action.ROLLBACK, Outcome.UNKNOWN: Action.UNKNOWN}
_RETRY_MS = 1000
_LOST_MS = 60_000
"""A check of which nothing is heard for this long, longer than any call may take, is looked at again."""
_HAND_OUT_S = 2.0
_ATTEMPT_DIGITS = 6


class _Desk:
    """The checks of one group: due, in flight, and (in pull mode) who waits for them."""

    def __init__(self, limits: ServiceLimits) -> None:
        self.due: deque[tuple[int, str]] = deque()
        self.queued: set[str] = set()
        self.asked: set[str] = set()
        """Ids with a check in flight: never two at once for one of them."""
        self.running = 0
        self.turn = 0
        self.polls = 0
        self.arrival = asyncio.Event()
        self.slot_at = 0
        self.slot_taken = 0
        self.slot_size = limits.check_queue
        self.breaker = Breaker(
            failures=limits.breaker_failures, open_s=limits.breaker_open_s, max_open_s=limits.breaker_max_open_s
        )

    def add(self, number: int, transaction_id: str, *, first: bool = False) -> None:
        if transaction_id in self.queued or transaction_id in self.asked:
            return
        self.queued.add(transaction_id)
        if first:
            self.due.appendleft((number, transaction_id))
        else:
            self.due.append((number, transaction_id))
        self.arrival.set()

    def defer(self, earliest: int) -> int:
        """Return when to offer a check again: as many a second as may be queued, so that a backlog costs little."""
        if self.slot_at < earliest:
            self.slot_at, self.slot_taken = earliest, 0
        self.slot_taken += 1
        if self.slot_taken > self.slot_size:
            self.slot_at, self.slot_taken = self.slot_at + _RETRY_MS, 1
        return self.slot_at

    def take(self) -> tuple[int, str]:
        number, transaction_id = self.due.popleft()
        self.queued.discard(transaction_id)
        return number, transaction_id


class CheckDesk:
    """Sends checks and takes their verdicts, which go the way of any end."""

    def __init__(
        self,
        limits: ServiceLimits,
        shards: ShardTable,
        groups: Groups,
        ending: Ending,
        caller: CheckCaller,
        clock: Clock,
        observer: Observer,
    ) -> None:
        """Keep the parts; nothing is started."""
        self._limits = limits
        self._shards = shards
        self._groups = groups
        self._ending = ending
        self._caller = caller
        self._clock = clock
        self._observer = observer
        self._desks: dict[str, _Desk] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unrecorded: dict[str, int] = {}
        self._recording: set[str] = set()
        self._closed = False

    def _desk(self, group: str) -> _Desk:
        desk = self._desks.get(group)
        if desk is None:
            desk = self._desks[group] = _Desk(self._limits)
        return desk

    # --- push

    def offer(self, shard: Shard, entry: Pending, *, first: bool = False) -> None:
        """Take a check that is due: send it as soon as its group has a free place, or look at it again later."""
        desk = self._desk(entry.group)
        now = self._clock.now_ms()
        group = self._groups.find(entry.group)
        if self._closed or (len(desk.due) >= self._limits.check_queue and not first):
            shard.agenda.put(entry.id, desk.defer(now + _RETRY_MS))
        elif group is not None and group.mode is CheckMode.PULL:
            # It is looked at again whatever becomes of the queue: its age may end, or its group change its mode.
            self._look_later(shard, entry, now)
            desk.add(shard.number, entry.id, first=first)
        elif desk.breaker.open and now < (again := desk.breaker.retry_at(now)) and not first:
            shard.agenda.put(entry.id, desk.defer(again))
        else:
            self._look_later(shard, entry, now)
            desk.add(shard.number, entry.id, first=first)
            self._run(entry.group, desk)

    def _look_later(self, shard: Shard, entry: Pending, now: int) -> None:
        """Have the scan look at a transaction again even if nothing more is heard of its check."""
        policy = self._groups.policy(entry.group)
        shard.agenda.put(entry.id, min(now + _LOST_MS, max(now + 1, entry.since + round(policy.max_age_s * 1000))))

    def _run(self, name: str, desk: _Desk) -> None:
        """Start checks while the group has both free places and checks that are due."""
        while desk.due and desk.running < self._limits.check_concurrency and not self._closed:
            number, transaction_id = desk.take()
            shard = self._shards.find(number)
            entry = None if shard is None else shard.state.find(transaction_id)
            if shard is None or not isinstance(entry, Pending) or transaction_id in self._shards.claims:
                continue
            now = self._clock.now_ms()
            if not desk.breaker.admits(now):
                shard.agenda.put(transaction_id, desk.defer(desk.breaker.retry_at(now)))
                continue
            desk.running += 1
            desk.asked.add(transaction_id)
            self._spawn(self._check(name, desk, shard, entry))

    async def _check(self, name: str, desk: _Desk, shard: Shard, entry: Pending) -> None:
        reply: CheckReply | None = None
        try:
            reply = await self._ask(desk, shard, entry)
        except HalfwayError as error:
            entry.last_error = f"{error.code}: {error.detail}"
        finally:
            now = self._clock.now_ms()
            desk.running -= 1
            if reply is None:
                desk.breaker.not_tried()
            elif reply.reachable:
                desk.breaker.reached()
            else:
                desk.breaker.failed(now)
            try:
                self._run(name, desk)
                if reply is not None:
                    await self._judge(shard.number, entry.id, reply, now)
            finally:
                desk.asked.discard(entry.id)
                self._again(shard.number, entry.id)

    async def _ask(self, desk: _Desk, shard: Shard, entry: Pending) -> CheckReply | None:
        """Send one check, to the group's endpoints in turn; None where it was overtaken before it could be sent."""
        loop = asyncio.get_running_loop()
        half = await self._ending.payload(shard, entry, deadline=loop.time() + WRITE_LIMIT_S)
        if not self._is_open(shard.number, entry.id):
            return None
        group = self._groups.find(entry.group)
        urls = () if group is None else group.urls
        desk.turn += 1
        start = desk.turn % len(urls) if urls else 0
        attempt = entry.checks + 1
        request = CheckRequest(
            check_id=check_id(entry.id, attempt),
            id=entry.id,
            group=entry.group,
            prepared_at=entry.prepared_at,
            attempt=attempt,
            messages=half.messages,
        )
        began = loop.time()
        if group is None or not urls:
            reply = CheckReply(
                outcome=Outcome.UNKNOWN,
                sent=False,
                answered=False,
                reachable=True,
                detail=f"group {entry.group!r} has no endpoint to ask: PUT it with check.urls",
            )
        else:
            reply = await self._caller.call(group, urls[start:] + urls[:start], request)
        verdict = reply.outcome.value if reply.answered else "none"
        self._observer.checked(entry.group, verdict, sent=reply.sent, seconds=loop.time() - began)
        return reply

    def _is_open(self, number: int, transaction_id: str) -> bool:
        """Whether a transaction is prepared and nobody resolves it at this moment."""
        return self._pending(number, transaction_id) is not None and transaction_id not in self._shards.claims

    def _pending(self, number: int, transaction_id: str) -> Pending | None:
        """Return a transaction that is prepared in the shard as it is served now, None otherwise."""
        shard = self._shards.find(number)
        entry = None if shard is None else shard.state.find(transaction_id)
        return entry if isinstance(entry, Pending) else None

    async def _judge(self, number: int, transaction_id: str, reply: CheckReply, now: int) -> None:
        """Take what came back: a verdict goes through the lane, anything else is counted where it was sent.

        The shard may have been recovered while the check was under way: what counts is how it is served now.
        """
        try:
            await self._shards.serving(number, deadline=_limit())
        except HalfwayError:
            return  # whoever serves the shard next asks again
        entry = self._pending(number, transaction_id)
        if entry is None:
            return
        entry.attempts += 1
        entry.checked_at = now
        entry.last_error = None if reply.answered else reply.detail
        if not reply.sent:
            return
        checks = entry.checks + 1
        if reply.outcome is Outcome.UNKNOWN:
            await self._note(entry, checks, now, reply.remark)
            return
        act = Act(action=_ACTIONS[reply.outcome], cause=Cause.CHECK, remark=reply.remark, checks=checks, checked_at=now)
        try:
            await self._ending.act(transaction_id, act, deadline=_limit())
        except (AlreadyEndedError, NotPendingError):
            log.info("check_overtaken", id=transaction_id, verdict=reply.outcome)
        except HalfwayError as error:
            log.warning("verdict_not_written", id=transaction_id, verdict=reply.outcome, error=error.code)
            if reply.outcome is Outcome.COMMIT:
                self._unrecorded[transaction_id] = number
                await self._record_verdict(transaction_id, number)

    async def _note(self, entry: Pending, checks: int, now: int, remark: str | None) -> None:
        act = Act(action=Action.CHECK, cause=Cause.CHECK, remark=remark, checks=checks, checked_at=now)
        try:
            await self._ending.act(entry.id, act, deadline=_limit())
        except HalfwayError as error:
            log.info("check_not_noted", id=entry.id, error=error.code)

    def holds_commit(self, transaction_id: str) -> bool:
        """Whether a check said commit, which is not written down yet: policy must not decide meanwhile."""
        return transaction_id in self._unrecorded

    def record_verdicts(self, number: int) -> None:
        """Try once more to write down the commit verdicts of a shard that could not be written."""
        for transaction_id in [name for name, shard in self._unrecorded.items() if shard == number]:
            if transaction_id not in self._recording:
                self._spawn(self._record_verdict(transaction_id, number))

    async def _record_verdict(self, transaction_id: str, number: int) -> None:
        """Write the op VERDICT of a commit that could not be written: policy never rolls it back from then on."""
        self._recording.add(transaction_id)
        try:
            await self._shards.serving(number, deadline=_limit())
            entry = self._pending(number, transaction_id)
            if entry is not None and not entry.commit_verdict:
                act = Act(
                    action=Action.CHECK,
                    cause=Cause.CHECK,
                    checks=entry.checks + 1,
                    checked_at=entry.checked_at,
                    commit_verdict=True,
                )
                await self._ending.act(transaction_id, act, deadline=_limit())
        except (AlreadyEndedError, NotPendingError):
            self._unrecorded.pop(transaction_id, None)
        except HalfwayError as error:
            log.warning("verdict_not_recorded", id=transaction_id, error=error.code)
        else:
            self._unrecorded.pop(transaction_id, None)
        finally:
            self._recording.discard(transaction_id)

    def _again(self, number: int, transaction_id: str) -> None:
        """Put a transaction that is still pending back on the agenda of its shard as it is served now."""
        shard, entry = self._shards.find(number), self._pending(number, transaction_id)
        if shard is not None and entry is not None:
            shard.agenda.put(transaction_id, look_at(self._groups, entry))

    # --- pull

    async def lease(self, name: str, *, at_most: int, wait_s: float, credential: str | None) -> list[LeasedCheck]:
        """Hand out up to `at_most` due checks of a group in pull mode, waiting up to `wait_s` for the first.

        A check that is handed out counts as sent, and is not handed out again before its lease has passed.
        """
        group = self._groups.require(name, credential=credential, action="lease_checks")
        if group.mode is not CheckMode.PULL:
            raise InvalidRequestError(
                f'group {name!r} is asked over HTTP: PUT it with "check": {{"mode": "pull"}} to fetch its checks',
                field="group",
            )
        desk = self._desk(name)
        if desk.polls >= self._limits.max_waiting_polls:
            raise OverloadedError(f"{desk.polls} polls of group {name!r} wait already")
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        desk.polls += 1
        try:
            while True:
                desk.arrival.clear()
                leased = await self._hand_out(group, desk, at_most, until=max(until, loop.time()) + _HAND_OUT_S)
                if leased or self._closed or loop.time() >= until:
                    return leased
                try:
                    async with asyncio.timeout_at(until):
                        await desk.arrival.wait()
                except TimeoutError:
                    continue
        finally:
            desk.polls -= 1

    async def _hand_out(self, group: Group, desk: _Desk, at_most: int, *, until: float) -> list[LeasedCheck]:
        taken: list[tuple[Shard, Pending]] = []
        while desk.due and len(taken) < at_most:
            number, transaction_id = desk.take()
            shard, entry = self._shards.find(number), self._pending(number, transaction_id)
            if shard is None or entry is None:
                continue
            # Whatever comes between now and the note of the lease, the next scan looks at it again.
            shard.agenda.put(transaction_id, self._clock.now_ms() + _RETRY_MS)
            if transaction_id not in self._shards.claims:
                taken.append((shard, entry))
        leased = await asyncio.gather(*(self._lease_one(group, shard, entry, until=until) for shard, entry in taken))
        return [check for check in leased if check is not None]

    async def _lease_one(self, group: Group, shard: Shard, entry: Pending, *, until: float) -> LeasedCheck | None:
        try:
            half = await self._ending.payload(shard, entry, deadline=until)
        except HalfwayError as error:
            entry.last_error = f"{error.code}: {error.detail}"
            return None
        if not self._is_open(shard.number, entry.id):
            return None
        now = self._clock.now_ms()
        lease_until = now + round(self._limits.lease_s * 1000)
        attempt = entry.checks + 1
        entry.attempts += 1
        entry.checked_at = now
        shard.agenda.put(entry.id, lease_until)
        self._observer.checked(group.name, "leased", sent=True, seconds=0.0)
        self._spawn(self._noted_lease(shard.number, entry, attempt, now, lease_until))
        return LeasedCheck(
            check_id=check_id(entry.id, attempt),
            id=entry.id,
            group=entry.group,
            prepared_at=entry.prepared_at,
            attempt=attempt,
            messages=half.messages,
            lease_until=lease_until,
        )

    async def _noted_lease(self, number: int, entry: Pending, attempt: int, now: int, lease_until: int) -> None:
        await self._note(entry, attempt, now, None)
        shard, still = self._shards.find(number), self._pending(number, entry.id)
        if shard is not None and still is not None:
            shard.agenda.put(entry.id, max(lease_until, look_at(self._groups, still)))

    # --- what callers ask for

    async def end(self, request: End, *, deadline: float, credential: str | None) -> EndResult:
        """End a transaction for a caller; one that brings the id of a check it was sent has the cause `check`."""
        loop = asyncio.get_running_loop()
        began, result, group, cause = loop.time(), "changed", "", request.cause
        try:
            shard, entry = await self._ending.locate(request.id, deadline=deadline)
            group = entry.group
            self._groups.allow(group, credential=credential, action="end")
            if request.check_id is not None and self._was_sent(request.check_id, entry):
                cause = Cause.CHECK
            act = Act(action=_ACTIONS[request.outcome], cause=cause, remark=request.remark)
            ended = await self._ending.act(request.id, act, deadline=deadline)
            if request.remark and isinstance(still := shard.state.find(request.id), Pending):
                still.remark = request.remark
            result = "changed" if ended.changed else "unchanged"
        except HalfwayError as error:
            result = error.code
            raise
        else:
            if request.outcome is Outcome.UNKNOWN:
                return EndResult(id=ended.id, state=ended.state, changed=False)
            return ended
        finally:
            self._observer.ended(group, request.outcome.value, cause.value, result, loop.time() - began)

    def _was_sent(self, given: str, entry: Entry) -> bool:
        """Whether a check id is one that was sent for this transaction; the last one's count may not be noted yet."""
        name, _, attempt = given.rpartition(":")
        under_way = isinstance(entry, Pending) and (
            entry.attempts > entry.checks or entry.id in self._desk(entry.group).asked
        )
        number = int(attempt) if attempt.isascii() and attempt.isdigit() and len(attempt) <= _ATTEMPT_DIGITS else 0
        return name == entry.id and 1 <= number <= entry.checks + under_way

    async def check_now(self, transaction_id: str, *, deadline: float, credential: str | None) -> TransactionView:
        """Ask about a prepared transaction now, before its time; a conflict for any other state."""
        shard, entry = await self._ending.locate(transaction_id, deadline=deadline)
        self._groups.allow(entry.group, credential=credential, action="check")
        if isinstance(entry, Ended):
            transition(transaction_id, entry.state, Action.CHECK)
        elif isinstance(entry, ParkedEntry):
            transition(transaction_id, State.PARKED, Action.CHECK)
        else:
            shard.agenda.discard(transaction_id)
            self.offer(shard, entry, first=True)
        return view(self._groups, entry)

    async def resume(self, transaction_id: str, *, deadline: float, credential: str | None) -> TransactionView:
        """Take a parked transaction back among the prepared; one that is prepared is unchanged."""
        shard, entry = await self._ending.locate(transaction_id, deadline=deadline)
        self._groups.allow(entry.group, credential=credential, action="resume")
        await self._ending.act(transaction_id, Act(action=Action.RESUME, cause=Cause.OPERATOR), deadline=deadline)
        now = shard.state.find(transaction_id)
        return view(self._groups, entry if now is None else now)

    async def close(self) -> None:
        """Send no more checks, answer waiting polls, and let those in flight go."""
        self._closed = True
        for desk in self._desks.values():
            desk.arrival.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("check_failed", exc_info=error)


def check_id(transaction_id: str, attempt: int) -> str:
    """Return the id of a check: the same for every try to send the same one."""
    return f"{transaction_id}:{attempt}"


def _limit() -> float:
    return asyncio.get_running_loop().time() + WRITE_LIMIT_S
