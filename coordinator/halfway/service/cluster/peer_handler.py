"""Answers the calls of other instances from the shards served here, without calling another instance."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from halfway.domain.errors import NotServedError, ShardUnavailableError
from halfway.domain.principal import Permission, Principal
from halfway.service.answers import Answers, CallsOfTurn
from halfway.service.records.peer_calls import (
    CheckCall,
    CountCall,
    DueCall,
    DueResult,
    EndCall,
    FindCall,
    GetCall,
    HistoryCall,
    InstanceCall,
    LeaseCall,
    LeaseResult,
    ListCall,
    PeerCall,
    PrepareCall,
    ReadCall,
    ResumeCall,
    SearchCall,
    ShardCall,
)

if TYPE_CHECKING:
    from halfway.service.checkback.dispatcher import CheckDispatcher
    from halfway.service.checkback.pull import FetchedChecks
    from halfway.service.fairness import Turns
    from halfway.service.prepare.prepare import Preparer
    from halfway.service.query.get_and_list import Queries
    from halfway.service.query.history import Histories
    from halfway.service.requests import End, EndResult, Prepare, Prepared
    from halfway.service.resolve.caller_requests import CallerRequests
    from halfway.service.shards.groups import Groups

_LONGEST_WAIT_S = 10.0

InstanceCallHandler = Callable[[Any, float, Principal], Awaitable[msgspec.Struct]]
"""Answers a call by a deadline on the loop's clock, for a principal."""


class PeerHandler:
    """The receiving side of the port `Peers`."""

    histories: Histories
    turns: Turns

    def __init__(
        self,
        preparer: Preparer,
        caller_requests: CallerRequests,
        queries: Queries,
        groups: Groups,
        checks: CheckDispatcher,
        leases: FetchedChecks,
    ) -> None:
        """Store the parts."""
        self._preparer = preparer
        self._caller_requests = caller_requests
        self._queries = queries
        self._groups = groups
        self._checks = checks
        self._leases = leases
        self._handlers: dict[type, InstanceCallHandler] = {}
        self._prepares = CallsOfTurn(self._begin_prepares)
        self._ends = CallsOfTurn(self._begin_ends)

    def register(self, handler: InstanceCallHandler, *calls: type) -> None:
        """Answer calls of these types with `handler`."""
        self._handlers.update(dict.fromkeys(calls, handler))

    async def answer(self, call: PeerCall, *, deadline: float, principal: Principal) -> msgspec.Struct:
        """Carry out a call and return its answer, of the type in `peer_calls.ANSWERS`.

        Raises:
            ShardUnavailableError: its shard is not served here; nothing was done.
            HalfwayError: any error that the same call of a client raises.

        """
        try:
            if isinstance(call, InstanceCall):
                return await self._handlers[type(call)](call, deadline, principal)
            return await self._answer(call, deadline, principal)
        except NotServedError as error:
            raise ShardUnavailableError(error.detail, **error.fields) from None

    async def _answer(self, call: ShardCall, deadline: float, principal: Principal) -> msgspec.Struct:
        match call:
            case PrepareCall():
                answer: msgspec.Struct = await self._prepares.add(call.request, deadline=deadline, principal=principal)
            case EndCall():
                answer = await self._ends.add(call.request, deadline=deadline, principal=principal)
            case CheckCall():
                answer = await self._checks.check_now(
                    call.id, prepared_at=call.prepared_at, deadline=deadline, principal=principal
                )
            case ResumeCall():
                answer = await self._caller_requests.resume(
                    call.id,
                    remark=call.remark,
                    prepared_at=call.prepared_at,
                    deadline=deadline,
                    principal=principal,
                )
            case DueCall():
                await self._groups.get_permitted(
                    call.group, Permission.FETCH_CHECKS, principal=principal, deadline=deadline
                )
                until = min(deadline, asyncio.get_running_loop().time() + min(call.wait_s, _LONGEST_WAIT_S))
                answer = DueResult(due=await self._leases.wait_until_due(call.group, until=until))
            case LeaseCall():
                checks = await self._leases.lease(call.group, at_most=call.at_most, wait_s=0, principal=principal)
                answer = LeaseResult(checks=tuple(checks))
            case _:
                answer = await self._read(call, deadline, principal)
        return answer

    def _begin_prepares(
        self, requests: Sequence[Prepare], *, deadline: float, principal: Principal
    ) -> Answers[Prepared]:
        answers: Answers[Prepared] = Answers([None] * len(requests))
        self._preparer.begin(requests, answers, deadline=deadline, principal=principal, forwarded=True)
        return answers

    def _begin_ends(self, requests: Sequence[End], *, deadline: float, principal: Principal) -> Answers[EndResult]:
        answers: Answers[EndResult] = Answers([None] * len(requests))
        self._caller_requests.begin(requests, answers, deadline=deadline, principal=principal)
        return answers

    async def _read(self, call: ReadCall, deadline: float, principal: Principal) -> msgspec.Struct:
        """Answer a call that changes no transaction."""
        match call:
            case GetCall():
                answer: msgspec.Struct = await self._queries.get(call.id, deadline=deadline, principal=principal)
                await self.turns.next(principal.group)  # its payload is encoded next
            case HistoryCall():
                answer = await self.histories.get(call.id, deadline=deadline, principal=principal)
            case ListCall() | SearchCall():
                answer = await self._queries.list(call.query, call.shards, deadline=deadline, principal=principal)
            case FindCall():
                answer = await self._queries.find(
                    call.query, call.shards, most=call.most, deadline=deadline, principal=principal
                )
            case CountCall():
                await self._groups.get_permitted(
                    call.group, Permission.DELETE_GROUP, principal=principal, deadline=deadline
                )
                answer = self._groups.count(call.group, call.shards, hold_s=call.hold_s)
            case _:
                assert_never(call)
        return answer
