"""Does the calls of other instances: with the shards served here, without asking another instance."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from halfway.domain.errors import NotServedError, ShardUnavailableError
from halfway.domain.principal import Permission, Principal
from halfway.service.answers import Answers
from halfway.service.peer_calls import (
    CheckCall,
    Core,
    CountCall,
    Due,
    DueCall,
    EndCall,
    FindCall,
    GetCall,
    HistoryCall,
    LeaseCall,
    Leased,
    ListCall,
    Look,
    Overview,
    PeerCall,
    PrepareCall,
    ResumeCall,
    SearchCall,
)

if TYPE_CHECKING:
    from halfway.service.checkback.dispatcher import CheckDispatcher
    from halfway.service.checkback.pull import FetchedChecks
    from halfway.service.ports import Authority
    from halfway.service.prepare.group_limits import GroupLimits
    from halfway.service.prepare.prepare import Preparer
    from halfway.service.query.get_and_list import Queries
    from halfway.service.query.history import Histories
    from halfway.service.requests import EndResult, Prepared
    from halfway.service.resolve.caller_requests import CallerRequests
    from halfway.service.shards.groups import Groups

_LONGEST_WAIT_S = 10.0

Also = Callable[[Any, float, Principal], Awaitable[msgspec.Struct]]
"""Does a call, until a deadline on the loop's clock, for a caller."""


class PeerHandler:
    """The other side of the port `Peers`."""

    histories: Histories

    def __init__(
        self,
        authority: Authority,
        preparing: Preparer,
        group_limits: GroupLimits,
        acting: CallerRequests,
        queries: Queries,
        groups: Groups,
        checks: CheckDispatcher,
        leases: FetchedChecks,
    ) -> None:
        """Keep the parts."""
        self._authority = authority
        self._preparer = preparing
        self._group_limits = group_limits
        self._caller_requests = acting
        self._queries = queries
        self._groups = groups
        self._checks = checks
        self._leases = leases
        self._also: dict[type, Also] = {}

    def also(self, answer: Also, *calls: type) -> None:
        """Have `answer` do calls of these types."""
        self._also.update(dict.fromkeys(calls, answer))

    async def answer(self, call: PeerCall, *, deadline: float, principal: Principal) -> msgspec.Struct:
        """Do a call and return its answer, of the type in `peer_calls.ANSWERS`.

        Raises:
            ShardUnavailableError: its shard is not served here; nothing was done.
            HalfwayError: any error that the same call by a client raises.

        """
        try:
            if isinstance(call, Overview):
                return await self._also[type(call)](call, deadline, principal)
            return await self._answer(call, deadline, principal)
        except NotServedError as error:
            raise ShardUnavailableError(error.detail, **error.fields) from None

    async def _answer(self, call: Core, deadline: float, principal: Principal) -> msgspec.Struct:
        match call:
            case PrepareCall():
                prepared: Answers[Prepared] = Answers([None])
                self._authority.require(principal, Permission.PREPARE, call.request.group)
                admit = self._group_limits.admitting(prepared, forwarded=True)
                self._preparer.begin([call.request], prepared, deadline=deadline, admit=admit)
                done: msgspec.Struct = await prepared.only()
            case EndCall():
                ended: Answers[EndResult] = Answers([None])
                self._caller_requests.begin([call.request], ended, deadline=deadline, principal=principal)
                done = await ended.only()
            case CheckCall():
                done = await self._checks.check_now(
                    call.id, prepared_at=call.prepared_at, deadline=deadline, principal=principal
                )
            case ResumeCall():
                done = await self._caller_requests.resume(
                    call.id,
                    remark=call.remark,
                    prepared_at=call.prepared_at,
                    deadline=deadline,
                    principal=principal,
                )
            case DueCall():
                await self._groups.allowed(call.group, Permission.FETCH_CHECKS, principal=principal, deadline=deadline)
                until = min(deadline, asyncio.get_running_loop().time() + min(call.wait_s, _LONGEST_WAIT_S))
                done = Due(due=await self._leases.due(call.group, until=until))
            case LeaseCall():
                checks = await self._leases.lease(call.group, at_most=call.at_most, wait_s=0, principal=principal)
                done = Leased(checks=tuple(checks))
            case _:
                done = await self._look(call, deadline, principal)
        return done

    async def _look(self, call: Look, deadline: float, principal: Principal) -> msgspec.Struct:
        """Do a call that changes no transaction."""
        match call:
            case GetCall():
                done: msgspec.Struct = await self._queries.get(call.id, deadline=deadline, principal=principal)
            case HistoryCall():
                done = await self.histories.get(call.id, deadline=deadline, principal=principal)
            case ListCall() | SearchCall():
                done = await self._queries.list(call.query, call.shards, deadline=deadline, principal=principal)
            case FindCall():
                done = await self._queries.find(
                    call.query, call.shards, most=call.most, deadline=deadline, principal=principal
                )
            case CountCall():
                await self._groups.allowed(call.group, Permission.DELETE_GROUP, principal=principal, deadline=deadline)
                done = self._groups.count(call.group, call.shards, hold_s=call.hold_s)
            case _:
                assert_never(call)
        return done
