"""Forwards calls to the owner of a shard that is not served here, or to all owners, and answers those of others.

One hop, never more. A call that needs every shard (a list, the deletion of a group, fetching checks) returns no partial
result. See docs/protocol.md#forwarding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from heapq import merge
from itertools import islice
from typing import Any, TypeVar, assert_never

import msgspec

from halfway.coordinator.checkback.dispatcher import CheckDispatcher
from halfway.coordinator.checkback.fetching import LOOK_EVERY_S, FetchedChecks, IsConnected, always
from halfway.coordinator.ending import Ending
from halfway.coordinator.fairness import Turns
from halfway.coordinator.ports import Observer, OwnerHint, Owners, Peers
from halfway.coordinator.prepare import Preparer
from halfway.coordinator.queries.queries import Queries, encode_cursor, sort_key
from halfway.coordinator.records import (
    CheckCall,
    CountCall,
    DueCall,
    DueResult,
    EndCall,
    FiguresCall,
    GetCall,
    GroupCounts,
    InstanceFigures,
    LeaseCall,
    LeaseResult,
    ListCall,
    PeerCall,
    PrepareCall,
    ResumeCall,
)
from halfway.coordinator.requests import LeasedCheck, ListQuery, Page, TransactionView
from halfway.coordinator.shards.groups import Groups
from halfway.coordinator.shards.shard_table import ShardTable
from halfway.protocol.errors import (
    EndUnconfirmedError,
    HalfwayError,
    NotServedError,
    OutcomeUnknownError,
    PeerLostError,
    ShardUnavailableError,
)
from halfway.protocol.principal import Permission, Principal

_HELD_BACK_S = 0.25
"""How much earlier the deadline of a forwarded call is than its caller's, to leave time for the answer."""

T = TypeVar("T")


class Forwarder:
    """Finds owners and calls them. An unknown outcome raises the same errors as for a call to this instance."""

    def __init__(self, shards: ShardTable, owners: Owners, peers: Peers | None, observer: Observer) -> None:
        """Store the parts. Without `peers`, nothing is forwarded."""
        self._shards = shards
        self._owners = owners
        self._peers = peers
        self._observer = observer
        self.is_single = peers is None
        """Whether this instance forwards nothing."""
        self._next_owner = 0

    def begin(
        self, call: PeerCall, error: NotServedError, *, deadline: float, principal: Principal
    ) -> asyncio.Task[Any] | None:
        """Forward a call to the owner of the shard that `error` names; return None on a single instance."""
        if self.is_single:
            return None
        forwarded = self._forward(error, call, deadline=deadline, principal=principal)
        return asyncio.get_running_loop().create_task(forwarded)

    async def run_or_forward(
        self, here: Awaitable[T], call: Callable[[], PeerCall], deadline: float, principal: Principal
    ) -> T:
        """Return the result of `here`, or the answer of the shard's owner if the shard is not served here."""
        try:
            return await here
        except NotServedError as error:
            forwarded: T = await self._forward(error, call(), deadline=deadline, principal=principal)
            return forwarded

    async def _forward(self, error: NotServedError, call: PeerCall, *, deadline: float, principal: Principal) -> Any:
        """Send a call to the owner of the shard that `error` names, or to any owner if it names none."""
        owner = next(iter(self.others()), None) if error.shard is None else self.owner_of(error.shard)
        if owner is None:
            raise error
        return await self.ask(owner, call, deadline=deadline, principal=principal)

    async def ask(self, owner: OwnerHint, call: PeerCall, *, deadline: float, principal: Principal) -> Any:
        """Send a call to an owner and return its answer.

        Raises:
            OutcomeUnknownError, EndUnconfirmedError: there was no answer, and the call may have been done.
            ShardUnavailableError: the call was not done, or it is one that changes nothing.
            HalfwayError: any other error that the owner answers with.
        """
        if self._peers is None:
            raise ShardUnavailableError("this instance forwards nothing: set HALFWAY_PEER_CREDENTIAL on every instance")
        loop = asyncio.get_running_loop()
        started, result = loop.time(), "done"
        # At most a quarter of the remaining time, so that the owner has some.
        until = deadline - min(_HELD_BACK_S, max(0.0, deadline - started) / 4)
        try:
            return await self._peers.ask(owner, call, deadline=until, principal=principal)
        except PeerLostError as error:
            result = error.code
            raise _unknown_outcome(call, error) from None
        except HalfwayError as error:
            result = error.code
            raise
        finally:
            self._observer.forwarded(str(type(call).__struct_config__.tag), result, loop.time() - started)

    def owner_of(self, shard: int) -> OwnerHint | None:
        """Return the owner of a shard, None if it is not known here."""
        return self._owners.find(shard)

    def others(self) -> list[OwnerHint]:
        """Return every other known owner, starting with a different one each time."""
        owners = list(dict.fromkeys(hint for shard in range(self._shards.count) if (hint := self.owner_of(shard))))
        self._next_owner += 1
        start = self._next_owner % len(owners) if owners else 0
        return [*owners[start:], *owners[:start]]

    def parts(self) -> tuple[list[int], dict[OwnerHint, list[int]]]:
        """Return the shards served here, and the other shards by owner.

        Raises ShardUnavailableError: a shard has no owner now.
        """
        here: list[int] = []
        elsewhere: dict[OwnerHint, list[int]] = {}
        for number in range(self._shards.count):
            if self._shards.serves(number):
                here.append(number)
                continue
            owner = self.owner_of(number)
            if owner is None:
                raise ShardUnavailableError(
                    f"shard {number} is being recovered or moved, and this needs all shards: try again", shard=number
                )
            elsewhere.setdefault(owner, []).append(number)
        return here, elsewhere


def _unknown_outcome(call: PeerCall, error: PeerLostError) -> HalfwayError:
    if isinstance(call, PrepareCall):
        fields = {} if call.request.id is None else {"id": call.request.id}
        return OutcomeUnknownError(
            f"the owner of its shard did not answer ({error.detail}): roll back, or send the same prepare with the "
            "same id again",
            **fields,
        )
    if isinstance(call, EndCall | ResumeCall):
        name = call.request.id if isinstance(call, EndCall) else call.id
        return EndUnconfirmedError(
            f"the owner of {name!r} did not answer ({error.detail}): send the same again, it is never done twice",
            id=name,
        )
    return ShardUnavailableError(f"the owner of a shard did not answer ({error.detail}): try again")


async def gather_all(calls: Sequence[asyncio.Task[T]]) -> list[T]:
    """Return all results; the first error cancels the others."""
    try:
        return list(await asyncio.gather(*calls))
    finally:
        for call in calls:
            call.cancel()


_DUE_WAIT_S = 2.0
"""How long another owner waits for a check to become due before it is called again."""
_PAUSE_S = 0.05
_COUNT_S = 5.0
_PAGE_TOPICS = 20_000
"""Topics on one page of a list, not counting those of its last transaction."""


class FanOut:
    """Calls this instance and every other owner, and merges their answers."""

    def __init__(self, forwarder: Forwarder, queries: Queries, groups: Groups, leases: FetchedChecks) -> None:
        self._forwarder = forwarder
        self._queries = queries
        self._groups = groups
        self._leases = leases
        self._waiting: dict[tuple[str, str], asyncio.Task[bool]] = {}
        self._settling: set[asyncio.Task[None]] = set()
        """The calls that tell other owners which of their checks were taken."""

    async def list(self, query: ListQuery, *, deadline: float, principal: Principal) -> Page:
        """List transactions of all shards in one order; raise an error if a shard is unavailable.

        The cursor is the last transaction's place in that order. The order is the same for all shards, so the cursor
        stays valid while shards move.
        """
        query = self._queries.restrict(query, principal)
        here, elsewhere = self._forwarder.parts()
        calls = [asyncio.create_task(self._queries.list(query, here, deadline=deadline, principal=principal))]
        calls += [
            self._call(owner, ListCall(query=query, shards=tuple(shards)), deadline, principal)
            for owner, shards in elsewhere.items()
        ]
        parts = await gather_all(calls)
        ordered = list(islice(merge(*(part.transactions for part in parts), key=sort_key), query.limit + 1))
        shown = _page(ordered, query.limit)
        more = len(ordered) > len(shown) or any(part.more for part in parts)
        counts = [part.count for part in parts if part.count is not None]
        count = sum(counts) if len(counts) == len(parts) else None
        return Page(transactions=shown, next=encode_cursor(shown[-1]) if more and shown else None, count=count)

    async def delete_group(self, name: str, *, deadline: float, principal: Principal) -> None:
        """Delete a group that has no pending or parked transaction in any shard."""

        async def count_all(group: str, hold_s: float) -> GroupCounts:
            until = min(deadline, asyncio.get_running_loop().time() + _COUNT_S)
            here, elsewhere = self._forwarder.parts()
            calls = [
                asyncio.create_task(self._groups.count(group, here, hold_s=hold_s, deadline=until, principal=principal))
            ]
            calls += [
                self._call(owner, CountCall(group=group, shards=tuple(shards), hold_s=hold_s), until, principal)
                for owner, shards in elsewhere.items()
            ]
            counts = await gather_all(calls)
            return GroupCounts(pending=sum(part.pending for part in counts), parked=sum(part.parked for part in counts))

        await self._groups.delete(name, count_all, deadline=deadline, principal=principal)

    async def lease(
        self, group: str, *, at_most: int, wait_s: float, principal: Principal, is_connected: IsConnected = always
    ) -> Sequence[LeasedCheck]:
        """Hand out due checks of all shards, and wait for the first, here and at any other owner.

        The call that waits at other owners hands out nothing, so no check is leased by an answer that is not read.
        """
        until = asyncio.get_running_loop().time() + wait_s
        checks = await self._lease_now(group, at_most, principal, is_connected)
        if checks or not wait_s:
            return checks
        with self._leases.count_poll(group):
            while (
                not checks and is_connected() and not self._leases.closed and asyncio.get_running_loop().time() < until
            ):
                await self._wait_until_due(group, until, principal)
                checks = await self._lease_now(group, at_most, principal, is_connected)
        return checks

    async def _lease_now(
        self, group: str, at_most: int, principal: Principal, is_connected: IsConnected
    ) -> Sequence[LeasedCheck]:
        """Lease checks of this instance and of the other owners; they count only if the caller still waits then."""
        leased: dict[OwnerHint | None, Sequence[LeasedCheck]] = {}
        is_taken = False
        try:
            leased[None] = await self._leases.lease(
                group, at_most=at_most, principal=principal, is_connected=is_connected
            )
            left = at_most - len(leased[None])
            for owner in self._forwarder.others():
                if left <= 0 or not is_connected():
                    break
                call = LeaseCall(group=group, at_most=left)
                # A later poll fetches the checks of an owner that is unavailable.
                with suppress(HalfwayError):
                    deadline = asyncio.get_running_loop().time() + _COUNT_S
                    answer = await self._forwarder.ask(owner, call, deadline=deadline, principal=principal)
                    leased[owner] = answer.checks
                    left -= len(answer.checks)
            is_taken = is_connected()
        finally:
            for holder, held in leased.items():
                self._settle(holder, group, [check.check_id for check in held], principal, is_taken=is_taken)
        return [check for held in leased.values() for check in held] if is_taken else []

    def _settle(
        self, owner: OwnerHint | None, group: str, checks: Sequence[str], principal: Principal, *, is_taken: bool
    ) -> None:
        """Let the owner count checks, or take them back. If it never learns it, they are due after their leases."""
        if owner is None:
            self._leases.settle(group, checks, is_taken=is_taken)
        elif checks:
            call = LeaseCall(group=group, at_most=0, settled=tuple(checks), taken=is_taken)
            task = asyncio.create_task(self._tell(owner, call, principal))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    async def _tell(self, owner: OwnerHint, call: LeaseCall, principal: Principal) -> None:
        with suppress(HalfwayError):
            deadline = asyncio.get_running_loop().time() + _COUNT_S
            await self._forwarder.ask(owner, call, deadline=deadline, principal=principal)

    async def _wait_until_due(self, group: str, until: float, principal: Principal) -> None:
        """Wait until a check may be due at any owner, or until `until`; HalfwayError if the caller loses its rights."""
        loop = asyncio.get_running_loop()
        here = asyncio.create_task(self._leases.wait_until_due(group, until=until))
        try:
            while (left := until - loop.time()) > 0 and not self._leases.closed:
                others = [self._due_at(owner, group, principal) for owner in self._forwarder.others()]
                done, _ = await asyncio.wait(
                    [here, *others], timeout=min(left, LOOK_EVERY_S), return_when=asyncio.FIRST_COMPLETED
                )
                if here in done:
                    return
                if any(not task.cancelled() and task.result() for task in done):
                    break
                await self._leases.require_pull_group(group, principal, until=until)
            await asyncio.sleep(min(_PAUSE_S, max(0.0, until - loop.time())))
        finally:
            here.cancel()

    def _due_at(self, owner: OwnerHint, group: str, principal: Principal) -> asyncio.Task[bool]:
        """Wait for a due check at another owner. All polls of one group on this instance share one call."""
        key = (owner.incarnation, group)
        task = self._waiting.get(key)
        if task is None:
            task = self._waiting[key] = asyncio.create_task(self._ask_due(owner, group, principal))
            task.add_done_callback(lambda _: self._waiting.pop(key, None))
        return task

    async def _ask_due(self, owner: OwnerHint, group: str, principal: Principal) -> bool:
        deadline = asyncio.get_running_loop().time() + 2 * _DUE_WAIT_S
        try:
            answer: DueResult = await self._forwarder.ask(
                owner, DueCall(group=group, wait_s=_DUE_WAIT_S), deadline=deadline, principal=principal
            )
        except HalfwayError:
            await asyncio.sleep(_DUE_WAIT_S / 2)
            return False
        return answer.due

    async def close(self) -> None:
        """Stop waiting at other owners."""
        for task in list(self._waiting.values()):
            task.cancel()

    def _call(self, owner: OwnerHint, call: Any, deadline: float, principal: Principal) -> asyncio.Task[Any]:
        return asyncio.create_task(self._forwarder.ask(owner, call, deadline=deadline, principal=principal))


def _page(ordered: Sequence[TransactionView], limit: int) -> tuple[TransactionView, ...]:
    """Return the transactions of one page; fewer than `limit` if they have many messages."""
    topics = 0
    for number, transaction in enumerate(ordered[:limit], 1):
        topics += len(transaction.topics)
        if topics > _PAGE_TOPICS:
            return tuple(ordered[:number])
    return tuple(ordered[:limit])


_LONGEST_WAIT_S = 10.0


class PeerHandler:
    """The receiving side of the port `Peers`: it answers from the shards served here, and calls no other instance."""

    turns: Turns
    figures: Callable[[FiguresCall, float, Principal], Awaitable[InstanceFigures]]
    """Returns the figures of this instance by a deadline on the loop's clock, for a principal."""

    def __init__(
        self,
        preparer: Preparer,
        ending: Ending,
        queries: Queries,
        groups: Groups,
        checks: CheckDispatcher,
        leases: FetchedChecks,
    ) -> None:
        self._preparer = preparer
        self._ending = ending
        self._queries = queries
        self._groups = groups
        self._checks = checks
        self._leases = leases

    async def answer(self, call: PeerCall, *, deadline: float, principal: Principal) -> msgspec.Struct:
        """Carry out a call and return its answer, of the type in `ANSWERS`.

        Raises:
            ShardUnavailableError: its shard is not served here; nothing was done.
            HalfwayError: any error that the same call of a client raises.
        """
        try:
            return await self._answer(call, deadline, principal)
        except NotServedError as error:
            raise ShardUnavailableError(error.detail, **error.fields) from None

    async def _answer(  # noqa: C901, PLR0911 - a case for each call
        self, call: PeerCall, deadline: float, principal: Principal
    ) -> msgspec.Struct:
        match call:
            case PrepareCall():
                return await self._preparer.prepare(
                    call.request, deadline=deadline, principal=principal, is_relayed=True
                )
            case EndCall():
                return await self._ending.end(call.request, deadline=deadline, principal=principal)
            case CheckCall():
                return await self._checks.check_now(call.id, deadline=deadline, principal=principal)
            case ResumeCall():
                return await self._ending.resume(call.id, remark=call.remark, deadline=deadline, principal=principal)
            case DueCall():
                await self._groups.get_permitted(
                    call.group, Permission.FETCH_CHECKS, principal=principal, deadline=deadline
                )
                until = min(deadline, asyncio.get_running_loop().time() + min(call.wait_s, _LONGEST_WAIT_S))
                return DueResult(due=await self._leases.wait_until_due(call.group, until=until))
            case LeaseCall():
                checks = await self._leases.lease(call.group, at_most=call.at_most, principal=principal)
                self._leases.settle(call.group, call.settled, is_taken=call.taken)
                return LeaseResult(checks=tuple(checks))
            case GetCall():
                view = await self._queries.get(
                    call.id, payload=call.payload, at_most=call.at_most, deadline=deadline, principal=principal
                )
                await self.turns.next(principal.group)  # its payload is encoded next
                return view
            case ListCall():
                return await self._queries.list(call.query, call.shards, deadline=deadline, principal=principal)
            case CountCall():
                return await self._groups.count(
                    call.group, call.shards, hold_s=call.hold_s, deadline=deadline, principal=principal
                )
            case FiguresCall():
                return await self.figures(call, deadline, principal)
            case _:
                assert_never(call)
