"""What a job does: finds its transactions in all shards, and acts on each, wherever that is."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from halfway.domain.audit_trail import Audited
from halfway.domain.principal import Permission
from halfway.domain.transaction import Cause, Outcome
from halfway.service.answers import Answers
from halfway.service.job_records import JobAction
from halfway.service.jobs.job import Acted
from halfway.service.peer_calls import CheckCall, EndCall, Found, ResumeCall
from halfway.service.requests import End

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfway.domain.principal import Principal
    from halfway.service.audit_trail import Auditor
    from halfway.service.checkback.dispatcher import CheckDispatcher
    from halfway.service.cluster.fan_out import FanOut
    from halfway.service.cluster.forward import Forwarder
    from halfway.service.job_records import JobItem, JobSpec
    from halfway.service.ports import Clock
    from halfway.service.requests import EndResult, TransactionView
    from halfway.service.resolve.caller_requests import CallerRequests

PERMISSIONS: Final = {
    JobAction.CHECK: Permission.CHECK,
    JobAction.COMMIT: Permission.END_BY_HAND,
    JobAction.ROLLBACK: Permission.END_BY_HAND,
    JobAction.RESUME: Permission.RESUME,
}
"""What who starts a job must be allowed to do."""
_AUDITED: Final = {
    JobAction.CHECK: Audited.CHECK_NOW,
    JobAction.COMMIT: Audited.END_BY_HAND,
    JobAction.ROLLBACK: Audited.END_BY_HAND,
    JobAction.RESUME: Audited.RESUME,
}


class JobWork:
    """The work of jobs, by the same ways as that of requests."""

    def __init__(
        self,
        fan_out: FanOut,
        forwarding: Forwarder,
        checks: CheckDispatcher,
        acting: CallerRequests,
        auditor: Auditor,
        clock: Clock,
    ) -> None:
        """Keep the parts."""
        self._fan_out = fan_out
        self._forwarder = forwarding
        self._checks = checks
        self._caller_requests = acting
        self._auditor = auditor
        self._clock = clock

    async def find(self, spec: JobSpec, principal: Principal, deadline: float) -> Found:
        """Find what the filter of a job matches; an error if a shard cannot be asked."""
        if spec.filter is None:
            return Found(count=len(spec.ids), places=tuple((0, name) for name in spec.ids))
        query = spec.query(spec.filter, self._clock.now_ms())
        return await self._fan_out.find(query, most=spec.most, deadline=deadline, principal=principal)

    async def sample(
        self, spec: JobSpec, limit: int, *, deadline: float, principal: Principal
    ) -> tuple[int, Sequence[TransactionView]]:
        """Count what the filter of a job matches, and show the oldest."""
        if spec.filter is None:
            return len(set(spec.ids)), ()
        query = spec.query(spec.filter, self._clock.now_ms(), limit=limit)
        found = await self._fan_out.find(query, most=0, deadline=deadline, principal=principal)
        page = await self._fan_out.list(query, deadline=deadline, principal=principal)
        return found.count, page.transactions

    async def act(self, spec: JobSpec, item: JobItem, principal: Principal, by: Principal, deadline: float) -> Acted:
        """Act on one transaction of a job; it is on record as of who asked for the job.

        Raises:
            IdReplacedError: the id belongs to another transaction than the one that was found.

        """
        work = self._act(spec, item, principal, deadline)
        detail = f"{spec.action.value} by job {spec.id}"
        return await self._auditor.of(work, by, _AUDITED[spec.action], item.id, remark=spec.reason, detail=detail)

    async def _act(self, spec: JobSpec, item: JobItem, principal: Principal, deadline: float) -> Acted:
        transaction_id, prepared_at = item.id, item.prepared_at
        if spec.action is JobAction.CHECK:
            asked = CheckCall(id=transaction_id, prepared_at=prepared_at)
            here = self._checks.check_now(
                transaction_id, prepared_at=prepared_at, deadline=deadline, principal=principal
            )
            view = await self._forwarder.or_forward(here, lambda: asked, deadline, principal)
            return Acted(view.state, changed=True)
        if spec.action is JobAction.RESUME:
            here = self._caller_requests.resume(
                transaction_id, remark=spec.reason, prepared_at=prepared_at, deadline=deadline, principal=principal
            )
            call = ResumeCall(id=transaction_id, remark=spec.reason, prepared_at=prepared_at)
            view = await self._forwarder.or_forward(here, lambda: call, deadline, principal)
            return Acted(view.state, view.changed)
        end = End(
            id=transaction_id,
            outcome=Outcome(spec.action.value),
            remark=spec.reason,
            cause=Cause.OPERATOR,
            prepared_at=prepared_at,
        )
        answers: Answers[EndResult] = Answers(
            [None], partial(self._forwarder.begin, [end], EndCall, deadline, principal)
        )
        self._caller_requests.begin([end], answers, deadline=deadline, principal=principal)
        ended = await answers.only()
        return Acted(ended.state, ended.changed)
