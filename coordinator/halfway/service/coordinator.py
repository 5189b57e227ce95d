"""The service's interface for the REST layer, the scheduler and the command line."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from halfway.domain.audit_trail import Audited
from halfway.domain.principal import ANYBODY, Permission, Principal, PrincipalKind
from halfway.domain.secrets import CheckSecrets
from halfway.domain.transaction import Cause
from halfway.service.activity import Activity
from halfway.service.answers import Answers
from halfway.service.audit_trail import Auditor, LogOnly, group_told
from halfway.service.checkback.dispatcher import CheckDispatcher
from halfway.service.checkback.pull import FetchedChecks, Wanted, always
from halfway.service.checkback.scan import Scan
from halfway.service.cluster.fan_out import FanOut
from halfway.service.cluster.forward import Forwarder, NoOwners, NoPeers
from halfway.service.cluster.job_desk import JobDesk
from halfway.service.cluster.job_work import JobWork
from halfway.service.cluster.peer_handler import PeerHandler
from halfway.service.cluster.statistics import StatisticsDesk
from halfway.service.jobs.jobs import Jobs
from halfway.service.peer_calls import (
    CheckCall,
    EndCall,
    FiguresCall,
    GetCall,
    HistoryCall,
    JobCall,
    JobsCall,
    KnownJobCall,
    PrepareCall,
    ResumeCall,
    StartJobCall,
    StopJobCall,
)
from halfway.service.prepare.group_limits import GroupLimits
from halfway.service.prepare.prepare import Preparer
from halfway.service.query.get_and_list import Queries
from halfway.service.query.history import Histories, NoHistory
from halfway.service.query.lookup import Lookup
from halfway.service.resolve.caller_requests import CallerRequests
from halfway.service.resolve.resolver import Resolver
from halfway.service.shards.groups import Groups
from halfway.service.shards.shard_table import ShardTable

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from halfway.service.check_ports import CheckCaller
    from halfway.service.keys import Keys
    from halfway.service.peer_calls import Found, HistoryView
    from halfway.service.ports import (
        AuditTrail,
        Authority,
        Clock,
        CursorStore,
        GroupStore,
        HalfLog,
        History,
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

    `principal` is who calls; ANYBODY, whom only open access lets in, if nobody is named.
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
        keys: Keys | None = None,
        owners: Owners | None = None,
        peers: Peers | None = None,
        check_secrets: CheckSecrets | None = None,
        audit_trail: AuditTrail | None = None,
        history: History | None = None,
        instance: str = "",
    ) -> None:
        """Wire the parts together; nothing is started. Without `owners` and `peers` nothing is forwarded."""
        self.limits = limits
        self._shards = ShardTable(limits, clock)
        self.authority = authority
        self.now_ms = clock.now_ms
        self.auditor = Auditor(audit_trail or LogOnly(), clock, instance)
        """Records what is done by hand, and to keys."""
        self._check_secrets = check_secrets or CheckSecrets()
        self.keys = keys
        """None if nobody is asked for a key."""
        self._groups = Groups(limits, groups, self._shards, authority, clock, caller)
        self._lookup = Lookup(limits, authority, self._shards, half_log, clock)
        activity = Activity.around(observer, clock)
        self._resolver = Resolver(self._shards, self._lookup, lane, clock, activity)
        self._preparer = Preparer(limits, self._shards, half_log, self._groups, topics, clock, activity)
        self._group_limits = GroupLimits(limits, self._shards, self._groups)
        self._checks = CheckDispatcher(
            limits, self._shards, self._groups, self._lookup, self._resolver, caller, clock, activity
        )
        self._leases = FetchedChecks(limits, self._shards, self._groups, self._lookup, self._checks, clock, activity)
        self._caller_requests = CallerRequests(
            authority,
            self._shards,
            self._groups,
            self._lookup,
            self._resolver,
            self._checks.verdicts,
            self._checks.asks,
            activity,
        )
        self._scan = Scan(limits, self._shards, self._groups, self._resolver, self._checks, cursors, clock, observer)
        self._queries = Queries(authority, self._shards, self._groups, self._lookup)
        self._histories = Histories(authority, self._shards, self._lookup, history or NoHistory(), activity.journal)
        self._forwarder = Forwarder(self._shards, owners or NoOwners(), peers or NoPeers(), observer)
        self._fan_out = FanOut(self._forwarder, self._queries, self._groups, self._leases)
        work = JobWork(self._fan_out, self._forwarder, self._checks, self._caller_requests, self.auditor, clock)
        self._jobs = Jobs(work.find, work.act, clock, instance)
        self.jobs = JobDesk(self._jobs, work, self._forwarder, self._shards, authority, self.auditor)
        """Starts, shows and stops jobs."""
        self.answering = PeerHandler(
            authority,
            self._preparer,
            self._group_limits,
            self._caller_requests,
            self._queries,
            self._groups,
            self._checks,
            self._leases,
        )
        """Does the calls of other instances."""
        self.answering.histories = self._histories
        self.statistics = StatisticsDesk(
            authority,
            self._shards,
            self._groups,
            self._checks,
            activity,
            lane,
            self._forwarder,
            clock,
        )
        """Shows figures of all instances."""
        self.statistics.instance = instance
        self.answering.also(self.statistics.answer, FiguresCall)
        self.answering.also(self.jobs.answer, KnownJobCall, StartJobCall, JobCall, JobsCall, StopJobCall)

    @property
    def listener(self) -> ShardListener:
        """The listener that the membership tells about shards."""
        return self._shards

    @property
    def shards(self) -> ShardTable:
        """The shards this instance serves, for metrics and health."""
        return self._shards

    def prepare(self, request: Prepare, *, deadline: float, principal: Principal = ANYBODY) -> asyncio.Future[Prepared]:
        """Store a half message and answer once it is durable (docs/protocol.md#prepare)."""
        return self.begin_prepares([request], deadline=deadline, principal=principal).only()

    def begin_prepares(
        self, requests: Sequence[Prepare], *, deadline: float, principal: Principal = ANYBODY
    ) -> Answers[Prepared]:
        """Do as `prepare` does, for many: each has gone as far as it can without waiting when this returns."""
        answers: Answers[Prepared] = Answers(
            [None] * len(requests), partial(self._forwarder.begin, requests, PrepareCall, deadline, principal)
        )
        limited = self._group_limits.admitting(answers)

        def admit(index: int, request: Prepare) -> None:
            self.authority.require(principal, Permission.PREPARE, request.group)
            limited(index, request)

        self._preparer.begin(requests, answers, deadline=deadline, admit=admit)
        return answers

    def end(self, request: End, *, deadline: float, principal: Principal = ANYBODY) -> asyncio.Future[EndResult]:
        """Commit, roll back, or say that the outcome is unknown (docs/protocol.md#end-the-lane)."""
        return self.begin_ends([request], deadline=deadline, principal=principal).only()

    def begin_ends(
        self, requests: Sequence[End], *, deadline: float, principal: Principal = ANYBODY
    ) -> Answers[EndResult]:
        """Do as `end` does, for many: each has gone as far as it can without waiting when this returns."""
        answers: Answers[EndResult] = Answers(
            [None] * len(requests), partial(self._forwarder.begin, requests, EndCall, deadline, principal)
        )
        self._caller_requests.begin(requests, answers, deadline=deadline, principal=principal)
        if principal.kind is PrincipalKind.OPERATOR or any(request.cause is Cause.OPERATOR for request in requests):
            self.auditor.watch_ends(requests, answers, principal)
        return answers

    async def get(self, transaction_id: str, *, deadline: float, principal: Principal = ANYBODY) -> TransactionView:
        """Show one transaction, with its messages while it is prepared or parked."""
        here = self._queries.get(transaction_id, deadline=deadline, principal=principal)
        return await self._forwarder.or_forward(here, lambda: GetCall(id=transaction_id), deadline, principal)

    async def history(self, transaction_id: str, *, deadline: float, principal: Principal = ANYBODY) -> HistoryView:
        """Show what happened to a transaction, and where its messages stand (docs/rest.md#history)."""
        here = self._histories.get(transaction_id, deadline=deadline, principal=principal)
        return await self._forwarder.or_forward(here, lambda: HistoryCall(id=transaction_id), deadline, principal)

    async def list(self, query: ListQuery, *, deadline: float, principal: Principal = ANYBODY) -> Page:
        """List transactions, oldest prepare first, without payloads."""
        return await self._fan_out.list(query, deadline=deadline, principal=principal)

    async def find(self, query: ListQuery, *, most: int, deadline: float, principal: Principal = ANYBODY) -> Found:
        """Count what a query matches, and give the ids of the oldest `most`."""
        return await self._fan_out.find(query, most=most, deadline=deadline, principal=principal)

    async def check(self, transaction_id: str, *, deadline: float, principal: Principal = ANYBODY) -> TransactionView:
        """Ask the producer group about a prepared transaction now."""
        here = self._checks.check_now(transaction_id, deadline=deadline, principal=principal)
        work = self._forwarder.or_forward(here, lambda: CheckCall(id=transaction_id), deadline, principal)
        return await self.auditor.of(work, principal, Audited.CHECK_NOW, transaction_id, told=_group_of)

    async def resume(self, transaction_id: str, *, deadline: float, principal: Principal = ANYBODY) -> TransactionView:
        """Make a parked transaction prepared again, with its count at 0; a prepared one is unchanged."""
        here = self._caller_requests.resume(transaction_id, deadline=deadline, principal=principal)
        work = self._forwarder.or_forward(here, lambda: ResumeCall(id=transaction_id), deadline, principal)
        return await self.auditor.of(work, principal, Audited.RESUME, transaction_id, told=_group_of)

    async def lease_checks(
        self, group: str, *, at_most: int, wait_s: float, principal: Principal = ANYBODY, wanted: Wanted = always
    ) -> Sequence[LeasedCheck]:
        """Hand out due checks of a group in pull mode, waiting up to `wait_s` for the first, as long as `wanted`."""
        return await self._fan_out.lease(group, at_most=at_most, wait_s=wait_s, principal=principal, wanted=wanted)

    async def put_group(self, spec: GroupSpec, *, deadline: float, principal: Principal = ANYBODY) -> GroupView:
        """Register a group or change it; answered once this instance has read it back from the log."""
        told = group_told(spec, self._groups.find(spec.name))
        work = self._groups.put(spec, deadline=deadline, principal=principal)
        return await self.auditor.of(work, principal, Audited.CHANGE_GROUP, spec.name, group=spec.name, told=told)

    async def get_group(self, name: str, *, deadline: float, principal: Principal = ANYBODY) -> GroupView:
        """Show a group."""
        return await self._groups.view(name, deadline=deadline, principal=principal)

    async def check_secrets(self, name: str, *, deadline: float, principal: Principal = ANYBODY) -> Sequence[str]:
        """Show what a group's checks are signed with, the newest secret first; nothing if they are not signed."""
        work = self._groups.allowed(name, Permission.READ_CHECK_SECRETS, principal=principal, deadline=deadline)
        group = await self.auditor.of(work, principal, Audited.READ_CHECK_SECRETS, name, group=name)
        return self._check_secrets.shown(group.name)

    async def list_groups(
        self, *, limit: int, after: str | None = None, deadline: float, principal: Principal = ANYBODY
    ) -> GroupPage:
        """Show a page of the groups by name, those after a name."""
        return await self._groups.views(limit=limit, after=after, deadline=deadline, principal=principal)

    async def delete_group(self, name: str, *, deadline: float, principal: Principal = ANYBODY) -> None:
        """Remove a group without pending or parked transactions."""
        work = self._fan_out.delete_group(name, deadline=deadline, principal=principal)
        await self.auditor.of(work, principal, Audited.DELETE_GROUP, name, group=name)

    async def scan(self, shard: int, now: int) -> None:
        """Do what is due now (ms since the epoch) and commit the cursors (docs/protocol.md#scan-and-check-back)."""
        await self._scan.scan(shard, now)

    def clock_was_set(self) -> None:
        """Note that wall time has jumped."""
        self._scan.clock_was_set()

    async def drain(self) -> None:
        """Stop sending checks and answer waiting polls; requests in flight are the REST layer's to finish."""
        await self._jobs.close()
        await self._fan_out.close()
        await self._checks.close()


def _group_of(view: TransactionView) -> dict[str, str]:
    return {"group": view.group}
