"""Does the calls of other instances: with the shards served here, without asking another instance."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, assert_never

import msgspec

from halfway.domain.errors import NotServedError, ShardUnavailableError
from halfway.service.peer_calls import (
    CheckCall,
    CountCall,
    Due,
    DueCall,
    EndCall,
    GetCall,
    LeaseCall,
    Leased,
    ListCall,
    PeerCall,
    PrepareCall,
    ResumeCall,
)

if TYPE_CHECKING:
    from halfway.service.checkback.dispatcher import CheckDispatcher
    from halfway.service.checkback.pull import FetchedChecks
    from halfway.service.prepare.prepare import Preparer
    from halfway.service.query.get_and_list import Queries
    from halfway.service.resolve.caller_requests import CallerRequests
    from halfway.service.shards.groups import Groups

_LONGEST_WAIT_S = 10.0


class PeerHandler:
    """The other side of the port `Peers`."""

    def __init__(
        self,
        preparing: Preparer,
        acting: CallerRequests,
        queries: Queries,
        groups: Groups,
        checks: CheckDispatcher,
        leases: FetchedChecks,
    ) -> None:
        """Keep the parts."""
        self._preparer = preparing
        self._caller_requests = acting
        self._queries = queries
        self._groups = groups
        self._checks = checks
        self._leases = leases

    async def answer(self, call: PeerCall, *, deadline: float, credential: str | None) -> msgspec.Struct:
        """Do a call and return its answer, of the type in `peer_calls.ANSWERS`.

        Raises:
            ShardUnavailableError: its shard is not served here; nothing was done.
            HalfwayError: any error that the same call by a client raises.

        """
        try:
            return await self._answer(call, deadline, credential)
        except NotServedError as error:
            raise ShardUnavailableError(error.detail, **error.fields) from None

    async def _answer(self, call: PeerCall, deadline: float, credential: str | None) -> msgspec.Struct:
        match call:
            case PrepareCall():
                done: msgspec.Struct = await self._preparer.begin(
                    call.request, deadline=deadline, credential=credential
                )
            case EndCall():
                done = await self._caller_requests.begin_end(call.request, deadline=deadline, credential=credential)
            case GetCall():
                done = await self._queries.get(call.id, deadline=deadline, credential=credential)
            case CheckCall():
                done = await self._checks.check_now(call.id, deadline=deadline, credential=credential)
            case ResumeCall():
                done = await self._caller_requests.resume(call.id, deadline=deadline, credential=credential)
            case ListCall():
                done = await self._queries.list(call.query, call.shards, deadline=deadline, credential=credential)
            case CountCall():
                await self._groups.required(call.group, credential=credential, action="delete_group", deadline=deadline)
                done = self._groups.count(call.group, call.shards, hold_s=call.hold_s)
            case DueCall():
                await self._groups.required(call.group, credential=credential, action="lease_checks", deadline=deadline)
                until = min(deadline, asyncio.get_running_loop().time() + min(call.wait_s, _LONGEST_WAIT_S))
                done = Due(due=await self._leases.due(call.group, until=until))
            case LeaseCall():
                checks = await self._leases.lease(call.group, at_most=call.at_most, wait_s=0, credential=credential)
                done = Leased(checks=tuple(checks))
            case _:
                assert_never(call)
        return done
