"""Sends checks to producer groups and applies their verdicts (docs/protocol.md#scan-and-check-back).

Groups are isolated: each has its own limit of checks in flight, its own bounded queue and its own circuit breaker. A
host has a limit of checks per second, from all groups. What decides is pure: time is a parameter, in ms since the
epoch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import lru_cache, partial
from urllib.parse import urlsplit

import structlog

from halfway.coordinator import tracing
from halfway.coordinator.ending import WRITE_LIMIT_S, Ending, background_deadline
from halfway.coordinator.logging import LogSummary
from halfway.coordinator.ports import CheckCaller, CheckReply, CheckRequest, Clock
from halfway.coordinator.queries.activity import Activity
from halfway.coordinator.queries.queries import Lookup, view
from halfway.coordinator.requests import ServiceLimits, TransactionView
from halfway.coordinator.shards.groups import Groups, look_at
from halfway.coordinator.shards.shard import Shard
from halfway.coordinator.shards.shard_table import ShardTable
from halfway.protocol.entries import Entry, Pending
from halfway.protocol.errors import AlreadyEndedError, HalfwayError, InvalidRequestError
from halfway.protocol.principal import Permission, Principal
from halfway.protocol.records import CheckMode
from halfway.protocol.transactions import TRANSITIONS, Action, Cause, Outcome, conflict

_OPEN_MS = 1000
_MAX_OPEN_MS = 30_000


class Breaker:
    """Closed until `failures` calls in a row reach no endpoint; then open, longer each time, with one probe."""

    def __init__(self, *, failures: int) -> None:
        self._limit = failures
        self._open_ms = _OPEN_MS
        self._failures = 0
        self._until: int | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Return whether calls are held back."""
        return self._until is not None

    @property
    def until(self) -> int | None:
        """The time until which calls are held back; None if they are not."""
        return self._until

    def admits(self, now: int) -> bool:
        """Return whether a call may be made now. An open breaker admits one probe at a time."""
        if self._until is None:
            return True
        if self._probing or now < self._until:
            return False
        self._probing = True
        return True

    def retry_at(self, now: int) -> int:
        """Return the time of the next try."""
        if self._until is None or (now >= self._until and not self._probing):
            return now
        return max(self._until, now + _OPEN_MS // 2)

    def clock_was_set(self, now: int) -> None:
        """Adapt to a wall clock that was set: hold calls back for at most one open period from `now`."""
        if self._until is not None:
            self._until = min(self._until, now + self._open_ms)

    def record_success(self) -> None:
        """Close, because a call reached an endpoint; its answer does not matter."""
        self._failures, self._until, self._probing = 0, None, False
        self._open_ms = _OPEN_MS

    def cancel(self) -> None:
        """Withdraw an admitted call that was not made."""
        self._probing = False

    def record_failure(self, now: int) -> None:
        """Record that a call reached no endpoint."""
        self._failures += 1
        if self._probing:
            self._open_ms = min(self._open_ms * 2, _MAX_OPEN_MS)
        if self._probing or (self._until is None and self._failures >= self._limit):
            self._until = now + self._open_ms
        self._probing = False


_WINDOW_MS = 1000


class HostRateLimits:
    """Admits `limit` checks per second to a host, and always the first check of each group."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._window_start = 0
        self._sent: dict[str, int] = {}
        self._groups: set[tuple[str, str]] = set()

    def admits(self, group: str, urls: Sequence[str], now: int) -> bool:
        """Return whether a check may be sent to the hosts of these URLs now. If so, it counts for each host."""
        if not 0 <= now - self._window_start < _WINDOW_MS:
            self._window_start = now
            self._sent.clear()
            self._groups.clear()
        hosts = {_host(url) for url in urls}
        for host in hosts:
            if self._sent.get(host, 0) >= self._limit and (group, host) in self._groups:
                return False
        for host in hosts:
            self._sent[host] = self._sent.get(host, 0) + 1
            self._groups.add((group, host))
        return True


@lru_cache(maxsize=4096)
def _host(url: str) -> str:
    try:
        return (urlsplit(url).hostname or url).removesuffix(".")
    except ValueError:
        return url


RETRY_MS = 1000


class CheckQueue:
    """The checks of one group: due, in flight, and (in pull mode) the polls that wait for them."""

    def __init__(self, limits: ServiceLimits) -> None:
        self.due: deque[tuple[int, str]] = deque()
        self.queued: set[str] = set()
        self.in_flight: set[str] = set()
        """Ids with a check in flight: at most one for each id."""
        self.running = 0
        """The number of places for checks that are taken."""
        self.next_url = 0
        self.polls = 0
        """The number of waiting polls."""
        self.arrival = asyncio.Event()
        self.slot_at = 0
        self.slot_taken = 0
        self.slot_size = limits.check_queue
        self.swept_at = 0
        self.breaker = Breaker(failures=limits.breaker_failures)
        self.overdue: str | None = None
        """The id whose check was offered first, of those that wait for a verdict, as far as offers have shown it."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is due or in flight, and nobody waits."""
        return not (self.due or self.in_flight or self.running or self.polls)

    def add(self, number: int, transaction_id: str, *, first: bool = False) -> None:
        """Queue a check, unless it is queued or in flight already; `first` puts it before all others."""
        if transaction_id in self.queued or transaction_id in self.in_flight:
            return
        self.queued.add(transaction_id)
        if first:
            self.due.appendleft((number, transaction_id))
        else:
            self.due.append((number, transaction_id))
        self.arrival.set()

    def sweep(self, is_pending: Callable[[int, str], bool], now: int) -> None:
        """Drop the checks of what is resolved, at most once a second: if nobody polls, nobody takes them out."""
        if 0 <= now - self.swept_at < RETRY_MS:
            return
        self.swept_at = now
        self.queued.difference_update(one for number, one in self.due if not is_pending(number, one))
        self.due = deque(each for each in self.due if each[1] in self.queued)

    def defer(self, earliest: int) -> int:
        """Return when to offer a check again: as many per second as the queue holds, so that a backlog is cheap."""
        if self.slot_at < earliest:
            self.slot_at, self.slot_taken = earliest, 0
        self.slot_taken += 1
        if self.slot_taken > self.slot_size:
            self.slot_at, self.slot_taken = self.slot_at + RETRY_MS, 1
        return self.slot_at

    def endpoints_changed(self) -> None:
        """Drop the times that the failures of the former endpoints have set."""
        self.slot_at = 0
        self.breaker.record_success()

    def clock_was_set(self, now: int) -> None:
        """Drop the times of the former clock."""
        self.slot_at = 0
        self.breaker.clock_was_set(now)

    def take(self) -> tuple[int, str]:
        """Remove and return (shard, id) of the next due check."""
        number, transaction_id = self.due.popleft()
        self.queued.discard(transaction_id)
        return number, transaction_id


log = structlog.get_logger(__name__)

_LOST_MS = 60_000
"""After this long without a reply, longer than any call may take, the scan looks at a transaction again."""


class CheckDispatcher:
    """Sends checks and resolves transactions by their verdicts."""

    def __init__(
        self,
        limits: ServiceLimits,
        shards: ShardTable,
        groups: Groups,
        lookup: Lookup,
        ending: Ending,
        caller: CheckCaller,
        clock: Clock,
        observer: Activity,
    ) -> None:
        self._limits = limits
        self._shards = shards
        self._groups = groups
        self._lookup = lookup
        self._ending = ending
        ending.is_checking = self.is_checking
        self._caller = caller
        self._clock = clock
        self._observer = observer
        self._queues: dict[str, CheckQueue] = {}
        self._in_flight = 0
        """Checks in flight of all groups."""
        self._bytes_in_flight = 0
        """Their bytes of payload."""
        self._overtaken = LogSummary(log, "info", "check_overtaken")
        self._not_written = LogSummary(log, "warning", "verdict_not_written")
        self._not_noted = LogSummary(log, "info", "check_not_noted")
        self._rates = HostRateLimits(limits.check_host_rate)
        self._floor_ms = round(limits.min_check_interval_s * 1000)
        self._tasks: set[asyncio.Task[None]] = set()
        self.verdicts = ending.verdicts
        self.closed = False

    def queue(self, group: str) -> CheckQueue:
        queue = self._queues.get(group)
        if queue is None:
            self._forget_deleted()
            queue = self._queues[group] = CheckQueue(self._limits)
        return queue

    def _forget_deleted(self) -> None:
        """Drop the queues of deleted groups: they take memory, and their breaker is not one of a later group."""
        idle = [name for name, queue in self._queues.items() if queue.is_idle]
        for name in idle:
            if not self._groups.is_registered(name):
                del self._queues[name]

    def endpoints_changed(self, group: str) -> None:
        """Call the changed endpoints of a group at once, even if the former ones could not be reached."""
        if group in self._queues:
            self._queues[group].endpoints_changed()

    def clock_was_set(self, now: int) -> None:
        """Drop the retry times of the former clock."""
        for queue in self._queues.values():
            queue.clock_was_set(now)

    # --- push

    def offer(self, shard: Shard, entry: Pending, *, first: bool = False) -> None:
        """Queue a check that is due. If it cannot be queued, let a later scan look at the transaction again."""
        queue = self.queue(entry.group)
        now = self._clock.now_ms()
        group = self._groups.find(entry.group)
        if len(queue.due) >= self._limits.check_queue:
            queue.sweep(lambda number, one: self.pending(number, one) is not None, now)
        if self.closed or (len(queue.due) >= self._limits.check_queue and not first):
            shard.agenda.put(entry.id, queue.defer(now + RETRY_MS))
        elif now < (leased_until := entry.leased_until or 0) <= now + round(self._limits.lease_s * 1000):
            shard.agenda.put(entry.id, leased_until)  # a worker holds a lease of its check
        elif group is not None and group.mode is CheckMode.PULL:
            # The scan looks at it again in any case: it may reach `max_age_s`, or its group may change its mode.
            self._queue(queue, shard, entry, now, first=first)
        elif first and entry.checked_at is not None and 0 <= now - entry.checked_at < self._floor_ms:
            shard.agenda.put(entry.id, look_at(self._groups, entry, now))  # it was checked just now
        elif queue.breaker.is_open and now < (again := queue.breaker.retry_at(now)) and not first:
            self._note_offer(queue, entry, now)
            shard.agenda.put(entry.id, queue.defer(again))
        else:
            self._queue(queue, shard, entry, now, first=first)
            self._start_due(entry.group, queue)

    async def check_now(self, transaction_id: str, *, deadline: float, principal: Principal) -> TransactionView:
        """Check a prepared transaction now, before its next check is due.

        Raises:
            AlreadyEndedError, NotPendingError: the transaction is in another state.
            InvalidRequestError: the operator allows none of the group's endpoints.
        """
        shard, entry = await self._lookup.locate(
            transaction_id, Permission.CHECK, principal=principal, deadline=deadline
        )
        if (entry.state, Action.CHECK) not in TRANSITIONS:
            raise conflict(transaction_id, entry.state)
        self._require_allowed_endpoint(entry.group)
        if isinstance(entry, Pending):
            shard.agenda.discard(transaction_id)
            self.offer(shard, entry, first=True)
        return view(self._groups, entry)

    def _require_allowed_endpoint(self, name: str) -> None:
        group = self._groups.find(name)
        refusals = [self._caller.refusal(url) for url in (() if group is None else group.urls)]
        if refusals and all(refusals):
            raise InvalidRequestError(
                f"no endpoint of group {name!r} may be called: {refusals[0]}", field="check.urls[0]"
            )

    def _queue(self, queue: CheckQueue, shard: Shard, entry: Pending, now: int, *, first: bool) -> None:
        """Queue a check, and plan a look at its transaction in case no reply comes."""
        self._note_offer(queue, entry, now)
        queue.add(shard.number, entry.id, first=first)
        policy = self._groups.policy(entry.group)
        shard.agenda.put(entry.id, min(now + _LOST_MS, max(now + 1, entry.since + round(policy.max_age_s * 1000))))

    def _note_offer(self, queue: CheckQueue, entry: Pending, now: int) -> None:
        entry.offered_at, entry.offered_since = now, min(now, entry.offered_since or now)
        before = self._offered_since(queue)
        if before is None or entry.offered_since < before:
            queue.overdue = entry.id

    def _offered_since(self, queue: CheckQueue) -> int | None:
        """Return when the check that waits longest for a verdict was offered first; None if none waits."""
        if queue.overdue is None:
            return None
        entry = self.pending(self._shards.number_of(queue.overdue), queue.overdue)
        return None if entry is None else entry.offered_since

    def _start_due(self, name: str, queue: CheckQueue) -> None:
        """Start due checks up to the group's limit of checks in flight.

        All checks in flight are at most `checks_in_flight` and have at most `check_bytes` of payload, but each group
        may always have one check.
        """
        while queue.due and queue.running < self._limits.check_concurrency and not self.closed:
            number, transaction_id = queue.take()
            shard = self._shards.find(number)
            entry = self.pending(number, transaction_id)
            if shard is None or entry is None:
                continue
            claim = self._shards.claims.get(transaction_id)
            if claim is not None:  # if the change leaves it prepared, the check is still due
                queue.queued.add(transaction_id)
                claim.released().add_done_callback(partial(self._offer_again, queue, number, transaction_id))
                continue
            now = self._clock.now_ms()
            limits, size = self._limits, self._bytes_in_flight + entry.size
            if queue.running and (size > limits.check_bytes or self._in_flight >= limits.checks_in_flight):
                shard.agenda.put(transaction_id, queue.defer(now + RETRY_MS))
                continue
            group = self._groups.find(name)
            if group is not None and not self._rates.admits(name, group.urls, now):
                shard.agenda.put(transaction_id, queue.defer(now + RETRY_MS))
                continue
            if not queue.breaker.admits(now):
                shard.agenda.put(transaction_id, queue.defer(queue.breaker.retry_at(now)))
                continue
            queue.running += 1
            self._in_flight += 1
            self._bytes_in_flight += entry.size
            queue.in_flight.add(transaction_id)
            self.spawn(self._check(name, queue, shard, entry))

    def _offer_again(self, queue: CheckQueue, number: int, transaction_id: str, _: asyncio.Future[None]) -> None:
        queue.queued.discard(transaction_id)
        shard, entry = self._shards.find(number), self.pending(number, transaction_id)
        if shard is not None and entry is not None:
            self.offer(shard, entry, first=True)

    async def _check(self, name: str, queue: CheckQueue, shard: Shard, entry: Pending) -> None:
        reply: CheckReply | None = None
        try:
            reply = await self._send(queue, shard, entry)
        except HalfwayError as error:
            entry.last_error = f"{error.code}: {error.detail}"
        finally:
            now = self._clock.now_ms()
            queue.running -= 1
            self._in_flight -= 1
            self._bytes_in_flight -= entry.size
            if reply is None:
                queue.breaker.cancel()
            elif reply.reachable:
                queue.breaker.record_success()
            else:
                queue.breaker.record_failure(now)
            try:
                self._start_due(name, queue)
                if reply is not None:
                    await self._apply_reply(shard.number, entry, reply, now)
            finally:
                queue.in_flight.discard(entry.id)
                self._plan_next_look(shard.number, entry.id)

    async def _send(self, queue: CheckQueue, shard: Shard, entry: Pending) -> CheckReply | None:
        """Send one check to the group's endpoints in turn; return None if the transaction was resolved before that."""
        loop = asyncio.get_running_loop()
        half = await self._lookup.payload(shard, entry, deadline=loop.time() + WRITE_LIMIT_S)
        if not self.is_open(shard.number, entry.id):
            return None
        group = self._groups.find(entry.group)
        urls = () if group is None else group.urls
        queue.next_url += 1
        start = queue.next_url % len(urls) if urls else 0
        attempt = entry.checks + 1
        request = CheckRequest(
            check_id=check_id(entry.id, attempt),
            id=entry.id,
            group=entry.group,
            prepared_at=entry.prepared_at,
            attempt=attempt,
            messages=half.messages,
        )
        started = loop.time()
        if group is None or not urls:
            reply = CheckReply(
                outcome=Outcome.UNKNOWN,
                sent=False,
                answered=False,
                reachable=True,
                detail=f"group {entry.group!r} has no endpoint to call: PATCH it with check.urls",
            )
        else:
            reply = await tracing.checked(request, partial(self._caller.call, group, urls[start:] + urls[:start]))
        if reply.outcome is Outcome.COMMIT:
            self.verdicts.keep(entry, attempt, Cause.CHECK)
        verdict = reply.outcome.value if reply.answered else "none"
        self._observer.checked(entry.group, verdict, sent=reply.sent, seconds=loop.time() - started)
        self._observer.note_check_reply(entry.group, reply)
        return reply

    def figures(self, group: str) -> tuple[int, int, int | None, float]:
        """Return a group's checks in flight, its due checks, and until when its breaker is open (None if closed).

        The last figure is for how many seconds the check that waits longest for a verdict has been due.
        """
        queue = self._queues.get(group)
        if queue is None:
            return 0, 0, None, 0.0
        since = self._offered_since(queue)
        overdue_s = 0.0 if since is None else max(0, self._clock.now_ms() - since) / 1000
        return queue.running, len(queue.due), queue.breaker.until, overdue_s

    def is_open(self, number: int, transaction_id: str) -> bool:
        """Return whether a transaction is prepared and not being resolved."""
        return self.pending(number, transaction_id) is not None and transaction_id not in self._shards.claims

    def pending(self, number: int, transaction_id: str) -> Pending | None:
        """Return the entry of a transaction that is prepared in a shard served here, None otherwise."""
        shard = self._shards.find(number)
        entry = None if shard is None else shard.state.unresolved(transaction_id)
        return entry if isinstance(entry, Pending) else None

    async def _apply_reply(self, number: int, checked: Pending, reply: CheckReply, now: int) -> None:
        """Apply a reply: a verdict goes through the lane; any other reply is counted if the check was sent.

        The shard may have been recovered during the check, so its current state counts.
        """
        transaction_id = checked.id
        try:
            await self._shards.wait_until_served(number, deadline=background_deadline())
        except HalfwayError:
            return  # the next owner of the shard checks again
        entry = self.pending(number, transaction_id)
        if entry is not None:
            entry.attempts += 1
            entry.checked_at = now
            entry.checked_here = entry.checked_here or reply.sent
            entry.last_error = None if reply.answered else reply.detail
            if reply.sent and reply.outcome is Outcome.UNKNOWN:
                await self.record_check(entry, entry.checks + 1, now, reply.remark)
        if reply.outcome is Outcome.UNKNOWN:
            return
        checks = None if entry is None else entry.checks + 1
        try:
            await self._ending.answer_check(
                transaction_id, reply.outcome, remark=reply.remark, checks=checks, checked_at=now
            )
        except AlreadyEndedError:
            self._overtaken.note({"group": checked.group, "verdict": reply.outcome.value}, id=transaction_id)
        except HalfwayError as error:
            kind = {"group": checked.group, "verdict": reply.outcome.value, "error": error.code}
            self._not_written.note(kind, id=transaction_id)

    async def record_check(self, entry: Pending, checks: int, now: int, remark: str | None) -> None:
        """Write the op CHECKED of a check that was sent. If it cannot be written, the check is not counted."""
        try:
            await self._ending.note_check(entry.id, remark=remark, checks=checks, checked_at=now)
        except HalfwayError as error:
            self._not_noted.note({"group": entry.group, "error": error.code}, id=entry.id)

    def blocks_policy(self, entry: Pending) -> bool:
        """Return whether the policy must not decide: a check is in flight, or a commit verdict is not written yet."""
        return self.verdicts.keeps(entry.id) or self.is_checking(entry)

    def is_checking(self, entry: Entry) -> bool:
        return entry.id in self.queue(entry.group).in_flight

    def _plan_next_look(self, number: int, transaction_id: str) -> None:
        """Plan the next look at a transaction if it is still pending."""
        shard, entry = self._shards.find(number), self.pending(number, transaction_id)
        if shard is not None and entry is not None:
            shard.agenda.put(transaction_id, look_at(self._groups, entry, self._clock.now_ms()))

    async def close(self) -> None:
        """Send no more checks, answer waiting polls, and cancel the checks in flight."""
        self.closed = True
        for queue in self._queues.values():
            queue.arrival.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("check_failed", exc_info=error)


def check_id(transaction_id: str, attempt: int) -> str:
    """Return the id of a check, the same for every attempt to send it."""
    return f"{transaction_id}:{attempt}"
