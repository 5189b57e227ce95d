"""Jobs of the whole cluster. Each runs on the owner of the shard that its id hashes to; any instance finds it.

Its work is to find its transactions in all shards, and to act on each at its owner.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar, assert_never

import msgspec

from halfway.coordinator.cluster.jobs import MAX_ITEMS_OF_GROUP_JOB, ActResult
from halfway.coordinator.records import (
    AllJobs,
    Away,
    CheckCall,
    FindResult,
    ItemResult,
    JobAction,
    JobCall,
    JobList,
    JobPage,
    JobsCall,
    JobSpec,
    JobView,
    KnownJobCall,
    PeerCall,
    ResumeCall,
    StartJobCall,
    StopJobCall,
)
from halfway.coordinator.requests import End
from halfway.protocol.errors import HalfwayError, JobIdReusedError, ShardUnavailableError, UnknownJobError
from halfway.protocol.principal import ANYBODY, Permission
from halfway.protocol.records import Audited
from halfway.protocol.transactions import Cause, Outcome, partition_for_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halfway.coordinator.checkback.dispatcher import CheckDispatcher
    from halfway.coordinator.cluster.forward import FanOut, Forwarder
    from halfway.coordinator.cluster.jobs import Jobs
    from halfway.coordinator.ending import Ending
    from halfway.coordinator.ports import Authority, Clock, OwnerHint
    from halfway.coordinator.queries.action_log import Auditor
    from halfway.coordinator.records import AnyJobCall, JobItem, JobSpec
    from halfway.coordinator.requests import TransactionView
    from halfway.coordinator.shards.shard_table import ShardTable
    from halfway.protocol.principal import Principal


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
        ending: Ending,
        auditor: Auditor,
        clock: Clock,
    ) -> None:
        """Store the parts."""
        self._fan_out = fan_out
        self._forwarder = forwarder
        self._checks = checks
        self._ending = ending
        self._auditor = auditor
        self._clock = clock

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
            here = self._ending.resume(
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
        ended = await self._ending.end(end, deadline=deadline, principal=principal, forwards=True)
        return ActResult(ended.state, ended.changed)


def _group_of(result: ActResult) -> dict[str, str]:
    return {} if result.group is None else {"group": result.group}


T = TypeVar("T")

_ASK_S = 5.0
"""How long another instance may take to answer a call about jobs."""


class ClusterJobs:
    """Starts, lists and stops jobs on any instance."""

    def __init__(
        self,
        jobs: Jobs,
        work: JobWork,
        forwarder: Forwarder,
        shards: ShardTable,
        authority: Authority,
        auditor: Auditor,
    ) -> None:
        """Store the parts."""
        self._jobs = jobs
        self._work = work
        self._forwarder = forwarder
        self._shards = shards
        self._authority = authority
        self._auditor = auditor

    async def preview(
        self, spec: JobSpec, *, sample: int, deadline: float, principal: Principal = ANYBODY
    ) -> tuple[int, Sequence[TransactionView]]:
        """Count the transactions that a job would act on now, and return the oldest `sample` of them."""
        spec = self._permitted(spec, principal)
        return await self._work.sample(spec, sample, deadline=deadline, principal=principal)

    async def start(self, spec: JobSpec, *, deadline: float, principal: Principal = ANYBODY) -> JobView:
        """Accept a job, unless it is known already. No item is processed yet when this returns.

        Raises:
            JobIdReusedError: the id belongs to another job.
            OverloadedError: too many jobs are unfinished.
            ShardUnavailableError: no instance can accept it now.

        """
        spec = self._permitted(spec, principal)
        return await self._auditor.audit(
            self._start(spec, deadline, principal),
            principal,
            Audited.START_JOB,
            spec.id,
            group=None if spec.filter is None else spec.filter.group,
            remark=spec.reason,
            detail=spec.action.value,
        )

    def _permitted(self, spec: JobSpec, principal: Principal) -> JobSpec:
        """Return the job that this caller may start: with a group's key, one on the group's own transactions."""
        self._authority.require(principal, Permission.RUN_JOBS)
        selection = spec.filter
        if selection is not None and selection.group is None and principal.group is not None:
            selection = msgspec.structs.replace(selection, group=principal.group)
        group = None if selection is None else selection.group
        self._authority.require(principal, PERMISSIONS[spec.action], group)
        if selection is not None and selection.key is not None:  # a search for a message key can be used to guess it
            self._authority.require(principal, Permission.READ_PAYLOADS, group)
        most = spec.most if principal.group is None else min(spec.most, MAX_ITEMS_OF_GROUP_JOB)
        return msgspec.structs.replace(spec, filter=selection, of_group=principal.group, most=most)

    async def _start(self, spec: JobSpec, deadline: float, principal: Principal) -> JobView:
        # If its shard moved, the job may still run on the former owner. It must not run twice.
        with suppress(UnknownJobError):
            view: JobView = await self._find(
                lambda: self._jobs.known(spec, principal), KnownJobCall(spec=spec), spec.id, deadline, principal
            )
            return view
        return await self._forwarder.run_or_forward(
            self.start_here(spec, principal), lambda: StartJobCall(spec=spec), deadline, principal
        )

    async def start_here(self, spec: JobSpec, principal: Principal) -> JobView:
        """Accept a job if its shard is served here; raise NotServedError otherwise."""
        self._shards.get(partition_for_key(spec.id.encode(), self._shards.count))
        return self._jobs.start(spec, principal)

    async def page(
        self,
        job_id: str,
        *,
        result: ItemResult | None,
        start: int,
        limit: int,
        deadline: float,
        principal: Principal = ANYBODY,
    ) -> JobPage:
        """Return a job and a page of its items.

        Raises:
            UnknownJobError: no instance has it.
            ShardUnavailableError: no instance that answered has it, and some did not answer.

        """
        self._authority.require(principal, Permission.LIST_JOBS)
        call = JobCall(id=job_id, result=result, start=start, limit=limit)
        page: JobPage = await self._find(lambda: self.page_here(call, principal), call, job_id, deadline, principal)
        return page

    def page_here(self, call: JobCall, principal: Principal) -> JobPage:
        """Return a job of this instance."""
        return self._jobs.page(call.id, result=call.result, start=call.start, limit=call.limit, principal=principal)

    async def stop(self, job_id: str, *, deadline: float, principal: Principal = ANYBODY) -> JobView:
        """Stop a job: it begins no more items. Errors as for `page`."""
        self._authority.require(principal, Permission.RUN_JOBS)
        call = StopJobCall(id=job_id)
        work = self._find(lambda: self._jobs.stop(job_id, principal), call, job_id, deadline, principal)
        view: JobView = await self._auditor.audit(work, principal, Audited.STOP_JOB, job_id)
        return view

    async def all(self, *, deadline: float, principal: Principal = ANYBODY) -> AllJobs:
        """Return the jobs of every instance that answers, and the instances that do not."""
        self._authority.require(principal, Permission.LIST_JOBS)
        answers, away = await self._call_all(lambda: self._jobs.all(principal), JobsCall(), deadline, principal)
        lists: list[JobList] = answers
        jobs = sorted(
            (job for part in lists for job in part.jobs), key=lambda job: (job.accepted_at, job.spec.id), reverse=True
        )
        return AllJobs(jobs=tuple(jobs), away=tuple(away))

    async def answer(self, call: AnyJobCall, _: float, principal: Principal) -> msgspec.Struct:
        """Answer a call of another instance from the jobs of this one."""
        needs_run = isinstance(call, StartJobCall | KnownJobCall | StopJobCall)
        self._authority.require(principal, Permission.RUN_JOBS if needs_run else Permission.LIST_JOBS)
        match call:
            case StartJobCall():
                return await self.start_here(call.spec, principal)
            case KnownJobCall():
                return self._jobs.known(call.spec, principal)
            case JobCall():
                return self.page_here(call, principal)
            case StopJobCall():
                return self._jobs.stop(call.id, principal)
            case JobsCall():
                return self._jobs.all(principal)
            case _:
                assert_never(call)

    async def _find(
        self, here: Callable[[], Any], call: PeerCall, job_id: str, deadline: float, principal: Principal
    ) -> Any:
        answers, away = await self._call_all(here, call, deadline, principal)
        if answers:
            return answers[0]
        if away:
            reasons = "; ".join(f"{instance.instance}: {instance.detail}" for instance in away)
            shown = f" ({reasons})" if principal.group is None else ""  # groups do not learn where instances are
            raise ShardUnavailableError(
                f"no instance that answered has job {job_id!r}, and some did not answer{shown}: try again"
            )
        raise UnknownJobError(job_id)

    async def _call_all(
        self, here: Callable[[], T], call: PeerCall, deadline: float, principal: Principal
    ) -> tuple[list[T], list[Away]]:
        """Call this instance, then all others; return the answers, and the instances that did not answer.

        If this instance has the job of the call, no other is called.
        """
        answers: list[T] = []
        with suppress(UnknownJobError):
            answers.append(here())
        if answers and not isinstance(call, JobsCall):
            return answers, []
        owners = self._forwarder.others()
        until = min(deadline, asyncio.get_running_loop().time() + _ASK_S)
        calls = [self._forwarder.ask(owner, call, deadline=until, principal=principal) for owner in owners]
        return self._partition(answers, owners, await asyncio.gather(*calls, return_exceptions=True))

    @staticmethod
    def _partition(answers: list[T], owners: list[OwnerHint], results: list[Any]) -> tuple[list[T], list[Away]]:
        away: list[Away] = []
        for owner, answer in zip(owners, results, strict=True):
            match answer:
                case UnknownJobError():
                    pass
                case JobIdReusedError():
                    raise answer
                case HalfwayError():
                    away.append(Away(instance=owner.url, detail=answer.detail))
                case BaseException():
                    raise answer
                case _:
                    answers.append(answer)
        return answers, away
