"""Pull mode: producers that cannot be called fetch their checks by long poll (docs/protocol.md#scan-and-check-back)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from halfway.domain.errors import HalfwayError, InvalidRequestError, OverloadedError
from halfway.domain.principal import Permission, Principal
from halfway.domain.records import CheckMode, Group
from halfway.service.checkback.dispatcher import check_id
from halfway.service.checkback.queue import RETRY_MS, CheckQueue
from halfway.service.requests import LeasedCheck
from halfway.service.shards.check_schedule import look_at

if TYPE_CHECKING:
    from halfway.domain.records import Half
    from halfway.domain.shard import Pending
    from halfway.service.checkback.dispatcher import CheckDispatcher
    from halfway.service.ports import Clock, Observer
    from halfway.service.query.lookup import Lookup
    from halfway.service.requests import ServiceLimits
    from halfway.service.shards.groups import Groups
    from halfway.service.shards.shard_table import Shard, ShardTable

IsConnected = Callable[[], bool]
"""Whether the caller of a poll is still there to take the checks."""

LOOK_EVERY_S = 0.5
"""How often whoever waits is looked at: its key may have been revoked, or has expired, and nothing tells it."""
_HAND_OUT_S = 2.0
"""How long reading payloads back may take beyond the time of the poll."""
_HAND_OUT_BYTES = 4 * 1024 * 1024
"""How much payload one answer may carry, beyond that of its last check."""


def always() -> bool:
    """Return True: the caller is always there."""
    return True


class FetchedChecks:
    """Hands out checks that are due."""

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
        """Keep the parts."""
        self._limits = limits
        self._shards = shards
        self._groups = groups
        self._lookup = lookup
        self._checks = checks
        self._clock = clock
        self._observer = observer

    async def lease(
        self, name: str, *, at_most: int, wait_s: float, principal: Principal, is_connected: IsConnected = always
    ) -> list[LeasedCheck]:
        """Hand out up to `at_most` due checks of a group in pull mode, waiting up to `wait_s` for the first.

        A check that is handed out counts as sent, and is not handed out again before its lease has passed. None is
        handed out once `is_connected` returns False.

        Raises:
            HalfwayError: the group has no checks to fetch, or the caller may not fetch them, or no longer.

        """
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        group = await self.fetching(name, principal, until=until)
        queue = self._checks.queue(name)
        if not wait_s:
            return await self._hand_out(group, queue, at_most, until=until + _HAND_OUT_S, is_connected=is_connected)
        with self.polling(name):
            while True:
                hand_out_until = max(until, loop.time()) + _HAND_OUT_S
                leased = await self._hand_out(group, queue, at_most, until=hand_out_until, is_connected=is_connected)
                if leased or self._checks.closed or not is_connected() or loop.time() >= until:
                    return leased
                await self.due(name, until=min(until, loop.time() + LOOK_EVERY_S))
                group = await self.fetching(name, principal, until=until)

    async def fetching(self, name: str, principal: Principal, *, until: float) -> Group:
        """Return a group that fetches its checks, and whose checks the caller may fetch; HalfwayError if it may not.

        `until` is when its poll ends, on the loop's clock.
        """
        deadline = until + _HAND_OUT_S
        group = await self._groups.allowed(name, Permission.FETCH_CHECKS, principal=principal, deadline=deadline)
        if group.mode is not CheckMode.PULL:
            raise InvalidRequestError(
                f'group {name!r} is asked over HTTP: PUT it with "check": {{"mode": "pull"}} to fetch its checks',
                field="group",
            )
        return group

    @contextmanager
    def polling(self, name: str) -> Iterator[None]:
        """Count a poll while it waits; OverloadedError if too many do."""
        queue = self._checks.queue(name)
        if queue.polls >= self._limits.max_waiting_polls:
            raise OverloadedError(f"{queue.polls} polls of group {name!r} wait already")
        queue.polls += 1
        try:
            yield
        finally:
            queue.polls -= 1

    @property
    def closed(self) -> bool:
        """Whether no more checks are handed out."""
        return self._checks.closed

    async def due(self, name: str, *, until: float) -> bool:
        """Wait until checks of a group are due here, or until a time on the loop's clock; return whether they are."""
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
        self, group: Group, queue: CheckQueue, at_most: int, *, until: float, is_connected: IsConnected
    ) -> list[LeasedCheck]:
        taken: list[tuple[Shard, Pending]] = []
        size = 0
        while queue.due and len(taken) < at_most and size < _HAND_OUT_BYTES and is_connected():
            number, transaction_id = queue.take()
            shard, entry = self._shards.find(number), self._checks.pending(number, transaction_id)
            if shard is None or entry is None:
                continue
            # If anything fails before the lease is noted, the next scan looks at it again.
            shard.agenda.put(transaction_id, self._clock.now_ms() + RETRY_MS)
            if transaction_id not in self._shards.claims:
                taken.append((shard, entry))
                size += entry.size
        halves = await asyncio.gather(*(self._half(shard, entry, until=until) for shard, entry in taken))
        if not is_connected():
            for shard, entry in taken:
                queue.add(shard.number, entry.id, first=True)
            return []
        return [
            self._leased(group, shard, entry, half)
            for (shard, entry), half in zip(taken, halves, strict=True)
            if half is not None and self._checks.is_open(shard.number, entry.id)
        ]

    async def _half(self, shard: Shard, entry: Pending, *, until: float) -> Half | None:
        try:
            return await self._lookup.payload(shard, entry, deadline=until)
        except HalfwayError as error:
            entry.last_error = f"{error.code}: {error.detail}"
            return None

    def _leased(self, group: Group, shard: Shard, entry: Pending, half: Half) -> LeasedCheck:
        now = self._clock.now_ms()
        lease_until = now + round(self._limits.lease_s * 1000)
        attempt = entry.checks + 1
        entry.attempts += 1
        entry.checked_at = now
        entry.leased_check, entry.leased_until = attempt, lease_until
        entry.asked_here = True
        shard.agenda.put(entry.id, lease_until)
        self._observer.checked(group.name, "leased", sent=True, seconds=0.0)
        self._checks.spawn(self._noted_lease(shard.number, entry, attempt, now, lease_until))
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
        await self._checks.note(entry, attempt, now, None)
        shard, still = self._shards.find(number), self._checks.pending(number, entry.id)
        if shard is not None and still is not None:
            if still.leased_until is not None:
                lease_until = still.leased_until  # 0 if it has been answered meanwhile
            shard.agenda.put(entry.id, max(lease_until, look_at(self._groups, still, self._clock.now_ms())))
