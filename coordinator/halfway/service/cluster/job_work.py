"""The work of a job: finds its transactions in all shards, and acts on each at its owner."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from halfway.domain.audit_trail import Audited
from halfway.domain.principal import Permission
from halfway.domain.transaction import Cause, Outcome
from halfway.service.answers import Answers, CallsOfTurn
from halfway.service.jobs.job import ActResult
from halfway.service.records.job_records import JobAction
from halfway.service.records.peer_calls import CheckCall, EndCall, FindResult, ResumeCall
from halfway.service.requests import End

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfway.domain.principal import Principal
    from halfway.service.activity.audit_trail import Auditor
    from halfway.service.checkback.dispatcher import CheckDispatcher
    from halfway.service.cluster.fan_out import FanOut
    from halfway.service.cluster.forward import Forwarder
    from halfway.service.ports import Clock
    from halfway.service.records.job_records import JobItem, JobSpec
    from halfway.service.requests import EndResult, TransactionView
    from halfway.service.resolve.caller_requests import CallerRequests

PERMISSIONS: Final = {
    JobAction.CHECK: Permission.CHECK,
    JobAction.COMMIT: Permission.END_BY_HAND,
    JobAction.ROLLBACK: Permission.END_BY_HAND,
    JobAction.RESUME: Permission.RESUME,
}
"""The permission that a caller needs to start a job with each action."""
_AUDITED: Final = {
    JobAction.CHECK: Audited.CHECK_NOW,
    JobAction.COMMIT: Audited.END_BY_HAND,
    JobAction.ROLLBACK: Audited.END_BY_HAND,
    JobAction.RESUME: Audited.RESUME,
}


class JobWork:
    """Does the work of jobs by the same calls as requests of clients."""

    def __init__(
        self,
        fan_out: FanOut,
        forwarder: Forwarder,
        checks: CheckDispatcher,
        caller_requests: CallerRequests,
        auditor: Auditor,
        clock: Clock,
    ) -> None:
        """Store the parts."""
        self._fan_out = fan_out
        self._forwarder = forwarder
        self._checks = checks
        self._caller_requests = caller_requests
        self._auditor = auditor
        self._clock = clock
        self._ends = CallsOfTurn(self._begin_ends)

    async def find(self, spec: JobSpec, principal: Principal, deadline: float) -> FindResult:
        """Find the matches of a job's filter; raise an error if a shard is unavailable."""
        if spec.filter is None:
            return FindResult(count=len(spec.ids), places=tuple((0, name) for name in spec.ids))
        query = spec.query(spec.filter, self._clock.now_ms())
        return await self._fan_out.find(query, most=spec.most, deadline=deadline, principal=principal)

    async def sample(
        self, spec: JobSpec, limit: int, *, deadline: float, principal: Principal
    ) -> tuple[int, Sequence[TransactionView]]:
        """Count the matches of a job's filter, and return the oldest `limit`."""
        if spec.filter is None:
            return len(set(spec.ids)), ()
        query = spec.query(spec.filter, self._clock.now_ms(), limit=limit)
        matches = await self._fan_out.find(query, most=0, deadline=deadline, principal=principal)
        page = await self._fan_out.list(query, deadline=deadline, principal=principal)
        return matches.count, page.transactions

    async def act(
        self, spec: JobSpec, item: JobItem, principal: Principal, by: Principal, deadline: float
    ) -> ActResult:
        """Act on one transaction of a job. The audit trail names `by`, the caller that requested the job.

        Raises:
            IdReplacedError: the id now belongs to another transaction than the one that was found.

        """
        work = self._act(spec, item, principal, deadline)
        return await self._auditor.audit(
            work,
            by,
            _AUDITED[spec.action],
            item.id,
            group=None if spec.filter is None else spec.filter.group,
            remark=spec.reason,
            detail=f"{spec.action.value} by job {spec.id}",
            describe=_group_of,
            of_job=True,
        )

    async def _act(self, spec: JobSpec, item: JobItem, principal: Principal, deadline: float) -> ActResult:
        transaction_id, prepared_at = item.id, item.prepared_at
        if spec.action is JobAction.CHECK:
            check = CheckCall(id=transaction_id, prepared_at=prepared_at)
            here = self._checks.check_now(
                transaction_id, prepared_at=prepared_at, deadline=deadline, principal=principal
            )
            view = await self._forwarder.run_or_forward(here, lambda: check, deadline, principal)
            return ActResult(view.state, changed=True, group=view.group)
        if spec.action is JobAction.RESUME:
            here = self._caller_requests.resume(
                transaction_id, remark=spec.reason, prepared_at=prepared_at, deadline=deadline, principal=principal
            )
            resume = ResumeCall(id=transaction_id, remark=spec.reason, prepared_at=prepared_at)
            view = await self._forwarder.run_or_forward(here, lambda: resume, deadline, principal)
            return ActResult(view.state, view.changed, view.group)
        end = End(
            id=transaction_id,
            outcome=Outcome(spec.action.value),
            remark=spec.reason,
            cause=Cause.OPERATOR,
            prepared_at=prepared_at,
        )
        ended = await self._ends.add(end, deadline=deadline, principal=principal)
        return ActResult(ended.state, ended.changed)

    def _begin_ends(self, ends: Sequence[End], *, deadline: float, principal: Principal) -> Answers[EndResult]:
        answers: Answers[EndResult] = Answers(
            [None] * len(ends), partial(self._forwarder.begin, ends, EndCall, deadline, principal)
        )
        self._caller_requests.begin(ends, answers, deadline=deadline, principal=principal)
        return answers


def _group_of(result: ActResult) -> dict[str, str]:
    return {} if result.group is None else {"group": result.group}
