"""Jobs of the whole cluster. Each runs on the owner of the shard that its id hashes to; any instance finds it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, assert_never

import msgspec

from halfway.domain.audit_trail import Audited
from halfway.domain.errors import HalfwayError, JobIdReusedError, ShardUnavailableError, UnknownJobError
from halfway.domain.ids import partition_for_key
from halfway.domain.principal import ANYBODY, Permission
from halfway.service.cluster.job_work import PERMISSIONS
from halfway.service.jobs.jobs import MAX_ITEMS_OF_GROUP_JOB
from halfway.service.records.job_records import AllJobs, Away, ItemResult, JobList, JobPage, JobSpec, JobView
from halfway.service.records.peer_calls import JobCall, JobsCall, KnownJobCall, PeerCall, StartJobCall, StopJobCall

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halfway.domain.principal import Principal
    from halfway.service.activity.audit_trail import Auditor
    from halfway.service.cluster.forward import Forwarder
    from halfway.service.cluster.job_work import JobWork
    from halfway.service.jobs.jobs import Jobs
    from halfway.service.ports import Authority, OwnerHint
    from halfway.service.records.peer_calls import AnyJobCall
    from halfway.service.requests import TransactionView
    from halfway.service.shards.shard_table import ShardTable

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
