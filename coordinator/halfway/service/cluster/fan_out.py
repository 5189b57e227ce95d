"""Calls that need every shard: lists, the deletion of a group, fetching checks; a part never counts as all."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Any

from halfway.domain.errors import HalfwayError
from halfway.service.checkback.pull import LOOK_EVERY_S, always
from halfway.service.cluster.forward import together
from halfway.service.peer_calls import (
    CountCall,
    Counted,
    Due,
    DueCall,
    FindCall,
    Found,
    LeaseCall,
    ListCall,
    SearchCall,
)
from halfway.service.query.get_and_list import encode_cursor, order_of
from halfway.service.requests import LeasedCheck, ListQuery, Page

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from halfway.domain.principal import Principal
    from halfway.service.checkback.pull import FetchedChecks, Wanted
    from halfway.service.cluster.forward import Forwarder
    from halfway.service.ports import OwnerHint
    from halfway.service.query.get_and_list import Queries
    from halfway.service.requests import TransactionView
    from halfway.service.shards.groups import Groups

_ASK_S = 2.0
"""How long another owner may wait for a check to come due before it is asked again."""
_PAUSE_S = 0.05
_COUNT_S = 5.0
_PAGE_TOPICS = 20_000
"""On one page of a list, beyond those of its last transaction."""


class FanOut:
    """Asks this instance's shards and every other owner, and merges their answers."""

    def __init__(self, forwarding: Forwarder, queries: Queries, groups: Groups, leases: FetchedChecks) -> None:
        """Keep the parts."""
        self._forwarder = forwarding
        self._queries = queries
        self._groups = groups
        self._leases = leases
        self._waiting: dict[tuple[str, str], asyncio.Task[bool]] = {}

    async def list(self, query: ListQuery, *, deadline: float, principal: Principal) -> Page:
        """List transactions of all shards in one order; an error if a shard cannot be asked.

        The cursor is the last transaction's place in that order, which is the same for all shards: it stays valid while
        shards move.
        """
        query = self._queries.narrowed(query, principal)
        here, elsewhere = self._forwarder.parts()
        call = SearchCall if query.is_search else ListCall
        calls = [_task(self._queries.list(query, here, deadline=deadline, principal=principal))]
        calls += [
            self._asked(owner, call(query=query, shards=tuple(shards)), deadline, principal)
            for owner, shards in elsewhere.items()
        ]
        parts = await together(calls)
        ordered = list(islice(merge(*(part.transactions for part in parts), key=order_of), query.limit + 1))
        shown = _page(ordered, query.limit)
        more = len(ordered) > len(shown) or any(part.more for part in parts)
        return Page(transactions=shown, next=encode_cursor(shown[-1]) if more and shown else None)

    async def find(self, query: ListQuery, *, most: int, deadline: float, principal: Principal) -> Found:
        """Find what a query matches in all shards, the oldest `most`; an error if a shard cannot be asked."""
        query = self._queries.narrowed(query, principal)
        here, elsewhere = self._forwarder.parts()
        calls = [_task(self._queries.find(query, here, most=most, deadline=deadline, principal=principal))]
        calls += [
            self._asked(owner, FindCall(query=query, shards=tuple(shards), most=most), deadline, principal)
            for owner, shards in elsewhere.items()
        ]
        parts = await together(calls)
        places = tuple(islice(merge(*(part.places for part in parts)), most))
        return Found(count=sum(part.count for part in parts), places=places)

    async def delete_group(self, name: str, *, deadline: float, principal: Principal) -> None:
        """Remove a group that has no pending or parked transaction in any shard."""

        async def count_all(group: str, hold_s: float) -> Counted:
            until = min(deadline, asyncio.get_running_loop().time() + _COUNT_S)
            here, elsewhere = self._forwarder.parts()
            found = [self._groups.count(group, here, hold_s=hold_s)]
            found += await together(
                [
                    self._asked(owner, CountCall(group=group, shards=tuple(shards), hold_s=hold_s), until, principal)
                    for owner, shards in elsewhere.items()
                ]
            )
            return Counted(pending=sum(part.pending for part in found), parked=sum(part.parked for part in found))

        await self._groups.delete(name, count_all, deadline=deadline, principal=principal)

    async def lease(
        self, group: str, *, at_most: int, wait_s: float, principal: Principal, wanted: Wanted = always
    ) -> Sequence[LeasedCheck]:
        """Hand out due checks of all shards, waiting for the first at any owner.

        No answer that nobody takes leases a check: the call that waits at other owners hands out nothing.
        """
        if not self._forwarder.others():
            return await self._leases.lease(group, at_most=at_most, wait_s=wait_s, principal=principal, wanted=wanted)
        until = asyncio.get_running_loop().time() + wait_s
        found = await self._lease_now(group, at_most, principal, wanted)
        if found or not wait_s:
            return found
        with self._leases.polling(group):
            while not found and wanted() and not self._leases.closed and asyncio.get_running_loop().time() < until:
                await self._until_due(group, until, principal)
                found = await self._lease_now(group, at_most, principal, wanted)
        return found

    async def _lease_now(self, group: str, at_most: int, principal: Principal, wanted: Wanted) -> Sequence[LeasedCheck]:
        found = await self._leases.lease(group, at_most=at_most, wait_s=0, principal=principal, wanted=wanted)
        return [*found, *await self._fetched(group, at_most - len(found), principal, wanted)]

    async def _fetched(self, group: str, at_most: int, principal: Principal, wanted: Wanted) -> Sequence[LeasedCheck]:
        found: Sequence[LeasedCheck] = ()
        for owner in self._forwarder.others():
            if len(found) >= at_most or not wanted():
                break
            call = LeaseCall(group=group, at_most=at_most - len(found))
            # The checks of an owner that is away are fetched later.
            with suppress(HalfwayError):
                deadline = asyncio.get_running_loop().time() + _COUNT_S
                answer = await self._forwarder.ask(owner, call, deadline=deadline, principal=principal)
                found = (*found, *answer.checks)
        return found

    async def _until_due(self, group: str, until: float, principal: Principal) -> None:
        """Return once a check may be due at any owner, or time is over; HalfwayError if the caller may wait no more."""
        loop = asyncio.get_running_loop()
        here = asyncio.create_task(self._leases.due(group, until=until))
        try:
            while (left := until - loop.time()) > 0 and not self._leases.closed:
                others = [self._due_at(owner, group, principal) for owner in self._forwarder.others()]
                done, _ = await asyncio.wait(
                    [here, *others], timeout=min(left, LOOK_EVERY_S), return_when=asyncio.FIRST_COMPLETED
                )
                if here in done or any(not task.cancelled() and task.result() for task in done):
                    break
                await self._leases.fetching(group, principal, until=until)
            await asyncio.sleep(min(_PAUSE_S, max(0.0, until - loop.time())))
        finally:
            here.cancel()

    def _due_at(self, owner: OwnerHint, group: str, principal: Principal) -> asyncio.Task[bool]:
        """Wait for a check at another owner; all polls of one group here share one call."""
        key = (owner.incarnation, group)
        task = self._waiting.get(key)
        if task is None:
            task = self._waiting[key] = asyncio.create_task(self._ask_due(owner, group, principal))
            task.add_done_callback(lambda _: self._waiting.pop(key, None))
        return task

    async def _ask_due(self, owner: OwnerHint, group: str, principal: Principal) -> bool:
        deadline = asyncio.get_running_loop().time() + 2 * _ASK_S
        try:
            answer: Due = await self._forwarder.ask(
                owner, DueCall(group=group, wait_s=_ASK_S), deadline=deadline, principal=principal
            )
        except HalfwayError:
            await asyncio.sleep(_ASK_S / 2)
            return False
        return answer.due

    async def close(self) -> None:
        """Stop waiting for other owners."""
        for task in list(self._waiting.values()):
            task.cancel()

    def _asked(self, owner: OwnerHint, call: Any, deadline: float, principal: Principal) -> asyncio.Task[Any]:
        return _task(self._forwarder.ask(owner, call, deadline=deadline, principal=principal))


def _page(ordered: Sequence[TransactionView], limit: int) -> tuple[TransactionView, ...]:
    """Return as many as may be on one page; fewer if they have many messages."""
    topics = 0
    for number, one in enumerate(ordered[:limit], 1):
        topics += len(one.topics)
        if topics > _PAGE_TOPICS:
            return tuple(ordered[:number])
    return tuple(ordered[:limit])


def _task(call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.create_task(call)
