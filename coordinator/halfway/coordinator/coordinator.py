"""The service's interface for the REST layer, the scheduler and the command line."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from halfway.coordinator.access import Keys
from halfway.coordinator.changes import Change
from halfway.coordinator.checkback.dispatcher import CheckDispatcher
from halfway.coordinator.checkback.fetching import FetchedChecks, IsConnected, always
from halfway.coordinator.checkback.scan import Scan
from halfway.coordinator.cluster.forward import FanOut, Forwarder, PeerHandler
from halfway.coordinator.cluster.statistics import ClusterStatistics
from halfway.coordinator.ending import Ending
from halfway.coordinator.fairness import Turns
from halfway.coordinator.operations import Operation
from halfway.coordinator.ports import (
    AuditTrail,
    Authority,
    CheckCaller,
    Clock,
    CursorStore,
    GroupStore,
    HalfLog,
    History,
    Lane,
    Observer,
    OwnerHint,
    Owners,
    Peers,
    Topics,
)
from halfway.coordinator.prepare import Preparation, Preparer
from halfway.coordinator.queries.action_log import Auditor, describe_group_change
from halfway.coordinator.queries.activity import Activity
from halfway.coordinator.queries.queries import Histories, Lookup, Queries
from halfway.coordinator.records import CheckCall, EndCall, GetCall, HistoryView, PrepareCall, ResumeCall
from halfway.coordinator.requests import (
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
from halfway.coordinator.shards.groups import Groups
from halfway.coordinator.shards.shard_table import ShardTable
from halfway.protocol.errors import HalfwayError, NotServedError, OutcomeExpiredError, UnknownTransactionError
from halfway.protocol.keys import CheckSecrets
from halfway.protocol.principal import ANYBODY, Permission, Principal
from halfway.protocol.records import Audited


class Coordinator:
    """The calls of the service. Each waits at most until its `deadline`, a time on the event loop's clock.

    `principal` is the caller. The default, ANYBODY, is allowed only under open access.
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
        owners: Owners,
        history: History,
        keys: Keys | None = None,
        peers: Peers | None = None,
        check_secrets: CheckSecrets | None = None,
        audit_trail: AuditTrail | None = None,
        instance: str = "",
    ) -> None:
        """Connect the parts; nothing is started. Without `peers` no call is forwarded."""
        self.limits = limits
        self._shards = self.shards = ShardTable(limits, clock)
        """The shards that this instance serves. The membership notifies it."""
        self.authority = authority
        self.now_ms = clock.now_ms
        self._check_secrets = check_secrets or CheckSecrets()
        self.keys = keys
        """None if there is no master secret to make keys with."""
        self._groups = Groups(limits, groups, self._shards, authority, clock, caller)
        self._lookup = Lookup(limits, authority, self._shards, half_log, clock)
        self.auditor = Auditor(audit_trail, clock, instance, self._lookup.group_here)
        """Records manual actions, and actions on groups and keys."""
        self.group_here = self._lookup.group_here
        activity = Activity.around(observer, clock)
        self.is_registered = self._groups.is_registered
        self.groups = self._groups.all
        self._ending = Ending(authority, self._shards, self._groups, self._lookup, lane, clock, activity)
        self.changes_waiting = self._ending.waiting
        self._ending.audit = self.auditor.record_end
        self._preparer = Preparer(
            limits, authority, self._shards, half_log, self._groups, self._lookup, topics, clock, activity, self._ending
        )
        self.turns = Turns()
        """The turns in which long reads and batches are done, slice by slice."""
        self._checks = CheckDispatcher(
            limits, self._shards, self._groups, self._lookup, self._ending, caller, clock, activity
        )
        self.checks_of_group = self._checks.figures
        self._leases = FetchedChecks(limits, self._shards, self._groups, self._lookup, self._checks, clock, activity)
        self._scan = Scan(limits, self._shards, self._groups, self._ending, self._checks, cursors, clock, observer)
        self._queries = Queries(authority, self._shards, self._groups, self._lookup, self.turns)
        self._histories = Histories(self._shards, history)
        self._forwarder = Forwarder(self._shards, owners, peers, observer)
        self._fan_out = FanOut(self._forwarder, self._queries, self._groups, self._leases)
        self._preparer.forward = self._forward_prepare
        self._ending.forward = self._forward_end
        self.peer_handler = PeerHandler(
            self._preparer, self._ending, self._queries, self._groups, self._checks, self._leases
        )
        """Answers the calls of other instances."""
        self.peer_handler.turns = self.turns
        self.statistics = ClusterStatistics(
            authority, self._shards, self._groups, self._checks, activity, lane, self._forwarder, clock
        )
        """Gathers the figures of all instances."""
        self.statistics.instance = instance
        self.peer_handler.figures = self.statistics.answer

    def prepare(self, request: Prepare, *, deadline: float, principal: Principal = ANYBODY) -> Operation[Prepared]:
        """Store a half message, and answer when it is durable (docs/protocol.md#prepare)."""
        return self._preparer.prepare(request, deadline=deadline, principal=principal, forwards=True)

    def end(self, request: End, *, deadline: float, principal: Principal = ANYBODY) -> Operation[EndResult]:
        """Commit or roll back a transaction, or report its outcome as unknown (docs/protocol.md#end-the-lane)."""
        return self._ending.end(request, deadline=deadline, principal=principal, forwards=True, is_audited=True)

    def _forward_prepare(self, one: Preparation, error: NotServedError) -> asyncio.Task[Any] | None:
        call = PrepareCall(request=one.request)
        return self._forwarder.begin(call, error, deadline=one.deadline, principal=one.principal)

    def _forward_end(self, change: Change, error: NotServedError) -> asyncio.Task[Any] | None:
        if change.request is None:
            return None
        call = EndCall(request=change.request)
        return self._forwarder.begin(call, error, deadline=change.deadline, principal=change.principal)

    async def get(
        self,
        transaction_id: str,
        *,
        payload: bool = True,
        at_most: int | None = None,
        deadline: float,
        principal: Principal = ANYBODY,
    ) -> TransactionView:
        """Return one transaction, with its messages while it is prepared or parked; without them above `at_most` bytes.

        Its `size` tells whether they were left out.
        """
        here = self._queries.get(
            transaction_id, payload=payload, at_most=at_most, deadline=deadline, principal=principal
        )
        call = GetCall(id=transaction_id, payload=payload, at_most=at_most)
        return await self._forwarder.run_or_forward(here, lambda: call, deadline, principal)

    async def history(self, transaction_id: str, *, deadline: float, principal: Principal = ANYBODY) -> HistoryView:
        """Return the events of a transaction, and the places of its messages (docs/api.md#history)."""
        known: TransactionView | None = None
        unknown: HalfwayError | None = None
        try:
            known = await self.get(transaction_id, payload=False, deadline=deadline, principal=principal)
        except (UnknownTransactionError, OutcomeExpiredError) as error:
            unknown = error
        history = await self._histories.read(transaction_id, known, deadline=deadline, principal=principal)
        if history is None:
            raise unknown or UnknownTransactionError(transaction_id)
        return history

    async def list(self, query: ListQuery, *, deadline: float, principal: Principal = ANYBODY) -> Page:
        """List transactions, oldest prepare first, without payloads."""
        return await self._fan_out.list(query, deadline=deadline, principal=principal)

    async def check(
        self, transaction_id: str, *, remark: str | None = None, deadline: float, principal: Principal = ANYBODY
    ) -> TransactionView:
        """Check a prepared transaction with its producer group now. The remark is for the audit trail."""
        here = self._checks.check_now(transaction_id, deadline=deadline, principal=principal)
        work = self._forwarder.run_or_forward(here, lambda: CheckCall(id=transaction_id), deadline, principal)
        return await self.auditor.audit(
            work, principal, Audited.CHECK_NOW, transaction_id, remark=remark, describe=_group_of
        )

    async def resume(
        self, transaction_id: str, *, remark: str | None = None, deadline: float, principal: Principal = ANYBODY
    ) -> TransactionView:
        """Make a parked transaction prepared again, with its check count at 0. A prepared one is unchanged."""
        here = self._ending.resume(transaction_id, remark=remark, deadline=deadline, principal=principal)
        call = ResumeCall(id=transaction_id, remark=remark)
        work = self._forwarder.run_or_forward(here, lambda: call, deadline, principal)
        return await self.auditor.audit(
            work, principal, Audited.RESUME, transaction_id, remark=remark, describe=_group_of
        )

    async def lease_checks(
        self,
        group: str,
        *,
        at_most: int,
        wait_s: float,
        principal: Principal = ANYBODY,
        is_connected: IsConnected = always,
    ) -> Sequence[LeasedCheck]:
        """Hand out due checks of a group in pull mode. Wait up to `wait_s` for the first while `is_connected`."""
        return await self._fan_out.lease(
            group, at_most=at_most, wait_s=wait_s, principal=principal, is_connected=is_connected
        )

    async def put_group(self, spec: GroupSpec, *, deadline: float, principal: Principal = ANYBODY) -> GroupView:
        """Register a group, replace it, or add to it. Answer when this instance has read it back from the log."""
        if spec.validate_only:
            return self._groups.would_be(spec, principal)
        describe = describe_group_change(self._groups.find(spec.name), self._groups.policy(spec.name))
        work = self._groups.put(spec, deadline=deadline, principal=principal)
        return await self.auditor.audit(
            work, principal, Audited.CHANGE_GROUP, spec.name, group=spec.name, describe=describe
        )

    async def get_group(self, name: str, *, deadline: float, principal: Principal = ANYBODY) -> GroupView:
        return await self._groups.view(name, deadline=deadline, principal=principal)

    async def check_secrets(self, name: str, *, deadline: float, principal: Principal = ANYBODY) -> Sequence[str]:
        """Return the secrets that sign a group's checks, the newest first; none if checks are not signed."""
        work = self._groups.get_permitted(name, Permission.READ_CHECK_SECRETS, principal=principal, deadline=deadline)
        group = await self.auditor.audit(work, principal, Audited.READ_CHECK_SECRETS, name, group=name)
        return self._check_secrets.shown(group.name)

    async def list_groups(
        self, *, limit: int, after: str | None = None, deadline: float, principal: Principal = ANYBODY
    ) -> GroupPage:
        """Return a page of the groups by name, those after a name."""
        return await self._groups.views(limit=limit, after=after, deadline=deadline, principal=principal)

    async def delete_group(self, name: str, *, deadline: float, principal: Principal = ANYBODY) -> None:
        """Delete a group that has no pending or parked transactions."""
        work = self._fan_out.delete_group(name, deadline=deadline, principal=principal)
        await self.auditor.audit(work, principal, Audited.DELETE_GROUP, name, group=name)

    async def scan(self, shard: int, now: int) -> None:
        """Act on what is due at `now` (ms since the epoch); commit cursors (docs/protocol.md#scan-and-check-back)."""
        await self._scan.scan(shard, now)

    def other_owners(self) -> Sequence[OwnerHint]:
        """Return the other instances that calls can be forwarded to; none on an instance that forwards nothing."""
        return () if self._forwarder.is_single else self._forwarder.others()

    def clock_was_set(self) -> None:
        """Handle a jump of the wall clock."""
        self._scan.clock_was_set()

    async def drain(self) -> None:
        """Stop checks, and answer waiting polls. The REST layer finishes the requests in flight."""
        await self._fan_out.close()
        await self._checks.close()


def _group_of(view: TransactionView) -> dict[str, str]:
    return {"group": view.group}
