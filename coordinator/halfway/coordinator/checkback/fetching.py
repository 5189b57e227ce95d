"""Pull mode: producers without an endpoint fetch checks by long poll (docs/protocol.md#scan-and-check-back)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from halfway.coordinator.checkback.dispatcher import RETRY_MS, CheckDispatcher, CheckQueue, check_id
from halfway.coordinator.ports import Clock, Observer
from halfway.coordinator.queries.queries import Lookup
from halfway.coordinator.requests import LeasedCheck, Moment, ServiceLimits
from halfway.coordinator.shards.groups import Groups, look_at
from halfway.coordinator.shards.shard import Shard
from halfway.coordinator.shards.shard_table import ShardTable
from halfway.protocol.entries import Pending
from halfway.protocol.errors import HalfwayError, InvalidRequestError, OverloadedError
from halfway.protocol.ids import shard_of
from halfway.protocol.principal import Permission, Principal
from halfway.protocol.records import CheckMode, Group, Half

IsConnected = Callable[[], bool]
"""Returns whether the caller of a poll still waits for the checks."""

LOOK_EVERY_S = 0.5
"""How often a waiting caller's rights are checked: its key may have been revoked or may have expired."""
_HAND_OUT_S = 2.0
"""How long reading payloads may take in addition to the time of the poll."""
_HAND_OUT_BYTES = 4 * 1024 * 1024
"""Bytes of payload in one answer, not counting its last check."""


def always() -> bool:
    """Return True: the caller always waits."""
    return True


class FetchedChecks:
    """Hands out due checks."""

    def __init__(
        self,
        limits: ServiceLimits,
        shards: ShardTable,
        groups: Groups,
        lookup: Lookup,
        checks: CheckDispatcher,
        clock: Clock,
        observer: Observer,
    ) -> None:
        self._limits = limits
        self._shards = shards
        self._groups = groups
        self._lookup = lookup
        self._checks = checks
        self._clock = clock
        self._observer = observer

    async def lease(
        self,
        name: str,
        *,
        at_most: int,
        principal: Principal,
        is_connected: IsConnected = always,
    ) -> list[LeasedCheck]:
        """Hand out up to `at_most` checks of a group in pull mode that are due here now.

        A check counts as sent once `settle` says so, and is not handed out again before its lease ends. No check is
        handed out after `is_connected` has returned False. Raises HalfwayError: the group does not fetch checks, or the
        caller may not fetch them.
        """
        until = asyncio.get_running_loop().time()
        await self.require_pull_group(name, principal, until=until)
        queue = self._checks.queue(name)
        return await self._hand_out(queue, at_most, until=until + _HAND_OUT_S, is_connected=is_connected)

    async def require_pull_group(self, name: str, principal: Principal, *, until: float) -> Group:
        """Return a group in pull mode whose checks the caller may fetch; HalfwayError otherwise.

        `until` is the end of the poll, on the loop's clock.
        """
        deadline = until + _HAND_OUT_S
        group = await self._groups.get_permitted(name, Permission.FETCH_CHECKS, principal=principal, deadline=deadline)
        if group.mode is not CheckMode.PULL:
            raise InvalidRequestError(
                f'group {name!r} gets checks over HTTP: PATCH it with "check": {{"mode": "pull"}} to fetch its checks',
                field="group",
            )
        return group

    @contextmanager
    def count_poll(self, name: str) -> Iterator[None]:
        """Count a poll while it waits; raise OverloadedError if too many polls wait."""
        queue = self._checks.queue(name)
        if queue.polls >= self._limits.max_waiting_polls:
            raise OverloadedError(f"{queue.polls} polls of group {name!r} are already waiting")
        queue.polls += 1
        try:
            yield
        finally:
            queue.polls -= 1

    @property
    def closed(self) -> bool:
        """Return whether no more checks are handed out."""
        return self._checks.closed

    async def wait_until_due(self, name: str, *, until: float) -> bool:
        """Wait until a group has due checks here, or until a time on the loop's clock; return whether it has any."""
        queue = self._checks.queue(name)
        while not queue.due and not self._checks.closed:
            queue.arrival.clear()
            try:
                async with asyncio.timeout_at(until):
                    await queue.arrival.wait()
            except TimeoutError:
                break
        return bool(queue.due)

    async def _hand_out(
        self, queue: CheckQueue, at_most: int, *, until: float, is_connected: IsConnected
    ) -> list[LeasedCheck]:
        taken: list[tuple[Shard, Pending]] = []
        size = 0
        while queue.due and len(taken) < at_most and size < _HAND_OUT_BYTES and is_connected():
            number, transaction_id = queue.take()
            shard, entry = self._shards.find(number), self._checks.pending(number, transaction_id)
            if shard is None or entry is None:
                continue
            # If anything fails before the lease is recorded, the next scan looks at it again.
            shard.agenda.put(transaction_id, self._clock.now_ms() + RETRY_MS)
            if transaction_id not in self._shards.claims:
                taken.append((shard, entry))
                size += entry.size
        halves = await asyncio.gather(*(self._read_half(shard, entry, until=until) for shard, entry in taken))
        if not is_connected():
            for shard, entry in taken:
                queue.add(shard.number, entry.id, first=True)
            return []
        return [
            self._lease(shard, entry, half)
            for (shard, entry), half in zip(taken, halves, strict=True)
            if half is not None and self._checks.is_open(shard.number, entry.id)
        ]

    async def _read_half(self, shard: Shard, entry: Pending, *, until: float) -> Half | None:
        try:
            return await self._lookup.payload(shard, entry, deadline=until)
        except HalfwayError as error:
            entry.last_error = f"{error.code}: {error.detail}"
            return None

    def _lease(self, shard: Shard, entry: Pending, half: Half) -> LeasedCheck:
        lease_until = self._clock.now_ms() + round(self._limits.lease_s * 1000)
        attempt = entry.checks + 1
        entry.leased_check, entry.leased_until = attempt, lease_until
        shard.agenda.put(entry.id, lease_until)
        return LeasedCheck(
            check_id=check_id(entry.id, attempt),
            id=entry.id,
            group=entry.group,
            prepared_at=Moment(entry.prepared_at),
            attempt=attempt,
            messages=half.messages,
            lease_until=Moment(lease_until),
        )

    def settle(self, name: str, check_ids: Sequence[str], *, is_taken: bool) -> None:
        """Count leased checks that a poll has taken, or take back those of a poll that was lost."""
        for given in check_ids:
            transaction_id = given.rpartition(":")[0]
            number = shard_of(transaction_id, self._shards.count)
            shard = None if number is None else self._shards.find(number)
            entry = None if shard is None else self._checks.pending(shard.number, transaction_id)
            if shard is None or entry is None or entry.group != name or entry.leased_check <= entry.checks:
                continue
            if given != check_id(entry.id, entry.leased_check):
                continue
            if is_taken:
                self._count(shard, entry)
            elif entry.leased_until:
                entry.leased_until = None
                shard.agenda.put(entry.id, self._clock.now_ms() + RETRY_MS)
                self._checks.queue(name).add(shard.number, entry.id, first=True)

    def _count(self, shard: Shard, entry: Pending) -> None:
        """Count the leased check as sent, and record it."""
        now = self._clock.now_ms()
        entry.attempts += 1
        entry.checked_at = now
        entry.checked_here = True
        self._observer.checked(entry.group, "leased", sent=True, seconds=0.0)
        lease_until = entry.leased_until or now
        self._checks.spawn(self._record_lease(shard.number, entry, entry.leased_check, now, lease_until))

    async def _record_lease(self, number: int, entry: Pending, attempt: int, now: int, lease_until: int) -> None:
        await self._checks.record_check(entry, attempt, now, None)
        shard, current = self._shards.find(number), self._checks.pending(number, entry.id)
        if shard is not None and current is not None:
            now = self._clock.now_ms()
            if current.leased_until is not None:
                lease_until = current.leased_until  # 0 if it has been answered in the meantime
            lease_until = min(lease_until, now + round(self._limits.lease_s * 1000))  # the clock may have been set back
            shard.agenda.put(entry.id, max(lease_until, look_at(self._groups, current, now)))
