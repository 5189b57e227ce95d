"""The service's interface for the REST layer, the scheduler and the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfway.domain.errors import NotServedError
from halfway.service.checkback.dispatcher import CheckDispatcher
from halfway.service.checkback.pull import FetchedChecks, Wanted, always
from halfway.service.checkback.scan import Scan
from halfway.service.cluster.fan_out import FanOut
from halfway.service.cluster.forward import Forwarder, NoOwners, NoPeers
from halfway.service.cluster.peer_handler import PeerHandler
from halfway.service.peer_calls import CheckCall, EndCall, GetCall, PrepareCall, ResumeCall
from halfway.service.prepare.prepare import Preparer
from halfway.service.query.get_and_list import Queries
from halfway.service.query.lookup import Lookup
from halfway.service.resolve.caller_requests import CallerRequests
from halfway.service.resolve.resolver import Resolver
from halfway.service.shards.groups import Groups
from halfway.service.shards.shard_table import ShardTable

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from halfway.service.ports import (
        Authority,
        CheckCaller,
        Clock,
        CursorStore,
        GroupStore,
        HalfLog,
        Lane,
        Observer,
        Owners,
        Peers,
        ShardListener,
        Topics,
    )
    from halfway.service.requests import (
        End,
        EndResult,
        GroupPage,
        GroupSpec,
        GroupView,
        LeasedCheck,
        ListQuery,
        Page,
        Prepare,
        Prepared,
        ServiceLimits,
        TransactionView,
    )


class Coordinator:
    """Prepare, end, check, resume, list: each call waits at most until its `deadline` on the loop's clock.

    `credential` is the caller's, for the `Authority` port; None if it has none.
    """

    def __init__(  # noqa: PLR0913 - the ports, once, at the composition root
        self,
        *,
        limits: ServiceLimits,
        lane: Lane,
        half_log: HalfLog,
        cursors: CursorStore,
        groups: GroupStore,
        topics: Topics,
        caller: CheckCaller,
        authority: Authority,
        clock: Clock,
        observer: Observer,
        owners: Owners | None = None,
        peers: Peers | None = None,
    ) -> None:
        """Wire the parts together; nothing is started. Without `owners` and `peers` nothing is forwarded."""
        self.limits = limits
        self._shards = ShardTable(limits, clock, observer)
        self._groups = Groups(limits, groups, self._shards, authority, clock, caller)
        self._lookup = Lookup(limits, self._shards, half_log, clock)
        self._resolver = Resolver(self._shards, self._lookup, lane, clock, observer)
        self._preparer = Preparer(limits, self._shards, half_log, self._groups, topics, clock, observer)
        self._checks = CheckDispatcher(
            limits, self._shards, self._groups, self._lookup, self._resolver, caller, clock, observer
        )
        self._leases = FetchedChecks(limits, self._shards, self._groups, self._lookup, self._checks, clock, observer)
        self._caller_requests = CallerRequests(
            self._groups, self._lookup, self._resolver, self._checks.verdicts, self._checks.asks, observer
        )
        self._scan = Scan(limits, self._shards, self._groups, self._resolver, self._checks, cursors, clock, observer)
        self._queries = Queries(self._shards, self._groups, self._lookup)
        self._forwarder = Forwarder(self._shards, owners or NoOwners(), peers or NoPeers(), observer)
        self._fan_out = FanOut(self._forwarder, self._queries, self._groups, self._leases)
        self.answering = PeerHandler(
            self._preparer, self._caller_requests, self._queries, self._groups, self._checks, self._leases
        )
        """Does the calls of other instances."""

    @property
    def listener(self) -> ShardListener:
        """The listener that the membership tells about shards."""
        return self._shards

    @property
    def shards(self) -> ShardTable:
        """The shards this instance serves, for metrics and health."""
        return self._shards

    async def prepare(self, request: Prepare, *, deadline: float, credential: str | None = None) -> Prepared:
        """Store a half message and answer once it is durable (docs/protocol.md#prepare)."""
        return await self.begin_prepare(request, deadline=deadline, credential=credential)

    def begin_prepare(
        self, request: Prepare, *, deadline: float, credential: str | None = None
    ) -> asyncio.Future[Prepared]:
        """Do as `prepare` does, for many at once: each has gone as far as it can without waiting when this returns."""
        begun = self._preparer.begin(request, deadline=deadline, credential=credential)
        return self._forwarder.or_instead(begun, lambda: PrepareCall(request=request), deadline, credential)

    async def end(self, request: End, *, deadline: float, credential: str | None = None) -> EndResult:
        """Commit, roll back, or say that the outcome is unknown (docs/protocol.md#end-the-lane)."""
        return await self.begin_end(request, deadline=deadline, credential=credential)

    def begin_end(self, request: End, *, deadline: float, credential: str | None = None) -> asyncio.Future[EndResult]:
        """Do as `end` does, for many at once: each has gone as far as it can without waiting when this returns."""
        begun = self._caller_requests.begin_end(request, deadline=deadline, credential=credential)
        return self._forwarder.or_instead(begun, lambda: EndCall(request=request), deadline, credential)

    async def get(self, transaction_id: str, *, deadline: float, credential: str | None = None) -> TransactionView:
        """Show one transaction, with its messages while it is prepared or parked."""
        try:
            return await self._queries.get(transaction_id, deadline=deadline, credential=credential)
        except NotServedError as error:
            shown: TransactionView = await self._forwarder.instead(
                error, GetCall(id=transaction_id), deadline=deadline, credential=credential
            )
            return shown

    async def list(self, query: ListQuery, *, deadline: float, credential: str | None = None) -> Page:
        """List transactions, oldest prepare first, without payloads."""
        return await self._fan_out.list(query, deadline=deadline, credential=credential)

    async def check(self, transaction_id: str, *, deadline: float, credential: str | None = None) -> TransactionView:
        """Ask the producer group about a prepared transaction now."""
        try:
            return await self._checks.check_now(transaction_id, deadline=deadline, credential=credential)
        except NotServedError as error:
            shown: TransactionView = await self._forwarder.instead(
                error, CheckCall(id=transaction_id), deadline=deadline, credential=credential
            )
            return shown

    async def resume(self, transaction_id: str, *, deadline: float, credential: str | None = None) -> TransactionView:
        """Make a parked transaction prepared again, with its count at 0; a prepared one is unchanged."""
        try:
            return await self._caller_requests.resume(transaction_id, deadline=deadline, credential=credential)
        except NotServedError as error:
            shown: TransactionView = await self._forwarder.instead(
                error, ResumeCall(id=transaction_id), deadline=deadline, credential=credential
            )
            return shown

    async def lease_checks(
        self, group: str, *, at_most: int, wait_s: float, credential: str | None = None, wanted: Wanted = always
    ) -> Sequence[LeasedCheck]:
        """Hand out due checks of a group in pull mode, waiting up to `wait_s` for the first, as long as `wanted`."""
        return await self._fan_out.lease(group, at_most=at_most, wait_s=wait_s, credential=credential, wanted=wanted)

    async def put_group(self, spec: GroupSpec, *, deadline: float, credential: str | None = None) -> GroupView:
        """Register a group or change it; answered once this instance has read it back from the log."""
        return await self._groups.put(spec, deadline=deadline, credential=credential)

    async def get_group(self, name: str, *, deadline: float, credential: str | None = None) -> GroupView:
        """Show a group."""
        return await self._groups.view(name, deadline=deadline, credential=credential)

    async def list_groups(
        self, *, limit: int, after: str | None = None, deadline: float, credential: str | None = None
    ) -> GroupPage:
        """Show a page of the groups by name, those after a name."""
        return await self._groups.views(limit=limit, after=after, deadline=deadline, credential=credential)

    async def delete_group(self, name: str, *, deadline: float, credential: str | None = None) -> None:
        """Remove a group without pending or parked transactions."""
        await self._fan_out.delete_group(name, deadline=deadline, credential=credential)

    async def scan(self, shard: int, now: int) -> None:
        """Do what is due now (ms since the epoch) and commit the cursors (docs/protocol.md#scan-and-check-back)."""
        await self._scan.scan(shard, now)

    def clock_was_set(self) -> None:
        """Note that wall time has jumped."""
        self._scan.clock_was_set()

    async def drain(self) -> None:
        """Stop sending checks and answer waiting polls; requests in flight are the REST layer's to finish."""
        await self._fan_out.close()
        await self._checks.close()
